"""Which AWQ layout each module of a checkpoint is stored in, from the headers alone.

Every layout is told apart by the shapes of its tensors, so ``version`` in the config is not
needed (files with a wrong one exist).

Shape letters: N output features, K input features, G groups, Z words of zeros per row.

==========  ==========================  =============  ===========================
layout      qweight                     scales         zeros
==========  ==========================  =============  ===========================
gemm        [K, N*b/32], packed over N  [G, N]         qzeros [G, N*b/32]
gemv        int32 [N, K/8]              [N, 8*Z]       qzeros int32 [N, Z]
gemv_fast   int16 [N/4, K]              [8*Z, N]       qzeros or scaled_zeros, float
marlin      int32 [K/16, 2*N]           [G, N]         none
==========  ==========================  =============  ===========================

Sources: AutoAWQ 0.2.9, llm-awq, GPTQModel 7.7.0 and AutoRound 0.16.1, as they write files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ingle.plugin import CheckpointError, CheckpointInfo
from ingle.plugin.affine_checks import FLOATS
from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.affine_loader import (
    StoredLinear,
    choose_bits,
    element_bits,
    fragment_size,
    module_names,
    module_tensors,
    packed_modules,
)
from ingle.plugin.affine_words import candidate_bits

GEMV_FAST_RUN: Final = 64
"""Inputs that one row of a gemv_fast weight keeps together."""

_ROLES = ("qweight", "scales", "qzeros", "scaled_zeros")

INPUT_DIVISOR: Final = "input_divisor"
"""Role of an activation's ``scales`` (AutoAWQ's ScaledActivation): the input is divided by it."""


def find_linears(info: CheckpointInfo, config: AffineConfig) -> dict[str, StoredLinear]:
    """Every module stored in an AWQ layout, by name."""
    found = (_classify(info, config, name) for name in packed_modules(info, ".qweight"))
    return {linear.name: linear for linear in found if linear is not None}


def _classify(info: CheckpointInfo, config: AffineConfig, name: str) -> StoredLinear | None:
    tensors = module_tensors(info, name, _ROLES)
    if "scales" not in tensors or f"{name}.g_idx" in info.tensor_shapes:
        return None
    shapes = {role: info.tensor_shapes[tensor] for role, tensor in tensors.items()}
    if any(len(shape) != 2 for shape in shapes.values()):
        return None
    if _has_float_zeros(info, tensors):
        return _gemv_fast(name, tensors, shapes)
    if shapes["qweight"][0] == shapes["scales"][0]:
        return _gemv(name, tensors, shapes)
    if "qzeros" not in tensors and shapes["qweight"][1] == 2 * shapes["scales"][1]:
        size = fragment_size(shapes["qweight"], shapes["scales"])
        return None if size is None else _linear(name, "marlin", 4, size, tensors)
    return _gemm(info, config, name, tensors)


def _linear(
    name: str, layout: str, bits: int, size: tuple[int, int], tensors: Mapping[str, str]
) -> StoredLinear:
    """``size`` is (N, K)."""
    return StoredLinear(
        name=name,
        layout=layout,
        bits=bits,
        out_features=size[0],
        in_features=size[1],
        tensors=tensors,
    )


def _has_float_zeros(info: CheckpointInfo, tensors: Mapping[str, str]) -> bool:
    zeros = tensors.get("scaled_zeros") or tensors.get("qzeros")
    return zeros is not None and info.tensor_dtypes[zeros] in FLOATS


def _gemv_fast(
    name: str, tensors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> StoredLinear | None:
    rows, inputs = shapes["qweight"]
    outputs = shapes["scales"][1]
    if rows * 4 != outputs or inputs % GEMV_FAST_RUN:
        return None
    return _linear(name, "gemv_fast", 4, (outputs, inputs), tensors)


def _gemv(
    name: str, tensors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> StoredLinear | None:
    outputs, words = shapes["qweight"]
    zeros = shapes.get("qzeros", (0, 0))
    if zeros[0] != outputs or zeros[1] * 8 != shapes["scales"][1]:
        return None
    return _linear(name, "gemv", 4, (outputs, words * 8), tensors)


def _gemm(
    info: CheckpointInfo, config: AffineConfig, name: str, tensors: Mapping[str, str]
) -> StoredLinear | None:
    inputs, words = info.tensor_shapes[tensors["qweight"]]
    outputs = info.tensor_shapes[tensors["scales"]][1]
    widths = candidate_bits(outputs, words, element_bits(info, tensors["qweight"]))
    bits = choose_bits(widths, config.module(name).bits)
    if bits is None:
        return None
    return _linear(name, "gemm", bits, (outputs, inputs), tensors)


def with_input_divisors(
    info: CheckpointInfo, linears: Mapping[str, StoredLinear]
) -> dict[str, StoredLinear]:
    """``linears`` with each ``ScaledActivation`` attached to the linear that follows it.

    For models whose MLP activation is a module of its own, AutoAWQ stores a divisor
    ``<mlp>.<activation>.scales`` ([K]); to leave it out would ruin the model silently. The linear
    that follows is the one of the same parent with K inputs and, should two have them, other than
    K outputs. Raises ``CheckpointError`` when no single linear fits.
    """
    result = dict(linears)
    for activation in module_names(info, ".scales"):
        shape = info.tensor_shapes[f"{activation}.scales"]
        if len(shape) == 1 and f"{activation}.qweight" not in info.tensor_shapes:
            linear = _following(activation, shape[0], linears)
            tensors = {**linear.tensors, INPUT_DIVISOR: f"{activation}.scales"}
            result[linear.name] = replace(linear, tensors=tensors)
    return result


def _following(activation: str, size: int, linears: Mapping[str, StoredLinear]) -> StoredLinear:
    parent = activation.rpartition(".")[0]
    siblings = [
        linear
        for linear in linears.values()
        if linear.name.rpartition(".")[0] == parent and linear.in_features == size
    ]
    if len(siblings) > 1:
        siblings = [linear for linear in siblings if linear.out_features != size]
    if len(siblings) != 1:
        raise CheckpointError(
            f"tensor {activation}.scales [{size}] divides the input of one linear in {parent}, "
            f"but {len(siblings)} quantised linears there could be meant"
        )
    return siblings[0]
