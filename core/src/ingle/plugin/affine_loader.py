"""What formats with affine weights share: a plugin adds only where its codes lie.

A plugin lists its modules as ``StoredLinear`` from the headers alone and reads one of them into
an ``AffineWeight``; names, sizes, sharding and fusing are the same for all of them. Importing this
module loads no torch: headers are read without it.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Final

from ingle.errors import CheckpointError
from ingle.plugin.affine_checks import StoredLinear as StoredLinear
from ingle.plugin.affine_checks import check_finite, check_types
from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.checkpoint import (
    CheckpointInfo,
    Detection,
    Support,
    TensorReader,
    refuse_packed_embeddings,
)
from ingle.plugin.linear import LinearSpec, LinearWeight, WeightFormat, WeightLoader

if TYPE_CHECKING:
    import torch

    from ingle.plugin.affine import AffineWeight

_TRANSFORM: Final = re.compile(r"hadamard|rotat|transform")
"""Names of buffers that say a linear's input must be rotated before it is multiplied."""

_OUTPUT_BLOCK: Final = 64
"""Outputs in a block of the layout for CPUs; what does not fill its blocks is not compiled."""

_DTYPE_BYTES: Final = {"8": 1, "16": 2, "32": 4, "64": 8}


def module_names(info: CheckpointInfo, suffix: str) -> list[str]:
    """Names of the modules that store a tensor ``<module><suffix>``, in file order."""
    return [n.removesuffix(suffix) for n in info.tensor_names if n.endswith(suffix)]


def packed_modules(info: CheckpointInfo, suffix: str) -> list[str]:
    """Those of ``module_names`` whose tensor holds integers, as words of codes do."""
    names = module_names(info, suffix)
    return [name for name in names if info.tensor_dtypes[f"{name}{suffix}"][0] in "IU"]


def module_tensors(info: CheckpointInfo, module: str, roles: Iterable[str]) -> dict[str, str]:
    """Those of ``<module>.<role>`` that exist, by role."""
    names = {role: f"{module}.{role}" for role in roles}
    return {role: name for role, name in names.items() if name in info.tensor_shapes}


def fragment_size(words: Sequence[int], scales: Sequence[int]) -> tuple[int, int] | None:
    """(N, K) of a weight in fragments, or None when words [K/16, 2N] and scales [G, N] are not
    those of one: it is written in whole squares of 64 inputs and outputs, in equal groups."""
    inputs, outputs, groups = 16 * words[0], scales[1], scales[0]
    whole = inputs > 0 and inputs % 64 == 0 and outputs % 64 == 0
    if not whole or words[1] != 2 * outputs or groups == 0 or inputs % groups:
        return None
    return outputs, inputs


def element_bits(info: CheckpointInfo, tensor: str) -> int:
    """Bits of one element of a tensor: 32 for ``I32``; 8 for ``F8_E4M3`` and ``BOOL``."""
    digits = info.tensor_dtypes[tensor].lstrip("BFIU").split("_")[0]
    return 8 * _DTYPE_BYTES.get(digits, 1)


def choose_bits(widths: Iterable[int], stated: int | None) -> int | None:
    """Of the widths that the shapes allow the stated one, else 4, which nearly every file has,
    else the smallest; None when there is none."""
    allowed = sorted(widths)
    preferred = [bits for bits in (stated, 4) if bits in allowed]
    return next(iter([*preferred, *allowed]), None)


def infer_group_size(
    in_features: int, num_groups: int, stated: int | None, tensor: str = ""
) -> int:
    """Inputs per group when ``in_features`` inputs have ``num_groups`` rows of scales.

    The stated size is taken when it fits, else equal groups, else the usual sizes with a short
    last group. Raises ``CheckpointError``, which names ``tensor``, when nothing fits.
    """
    equal = [in_features // num_groups] if num_groups and in_features % num_groups == 0 else []
    stated_sizes = [stated] if stated is not None and stated > 0 else []
    for size in (*stated_sizes, *equal, 128, 64, 32, 256, 512, 1024, 16):
        if -(-in_features // size) == num_groups:
            return size
    named = f"tensor {tensor}: " if tensor else ""
    raise CheckpointError(
        f"{named}{num_groups} rows of scales do not fit {in_features} inputs at any group size "
        f"(the config says {stated})"
    )


def integer_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """``zeros`` (uint8 [G, N]) of its own, or None when every one is the middle, 2**(b-1)."""
    return None if all_middle(zeros, bits) else owned(zeros)


def all_middle(zeros: torch.Tensor, bits: int) -> bool:
    """Whether every one of ``zeros`` is 2**(b-1), as in a symmetric file."""
    return bool((zeros == 1 << (bits - 1)).all())


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: a weight owns its bytes, the reader's belong to the mapped file."""
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def no_zeros(config: AffineConfig, linear: StoredLinear) -> None:
    """What a layer without stored zeros has: None, in the middle. ``CheckpointError`` when the
    config says that they are not: then they are missing."""
    if config.module(linear.name).symmetric is False:
        raise CheckpointError(
            f"tensor {linear.name}.qzeros is missing: {config.source} says that the zeros of "
            "this checkpoint are stored"
        )


def expect_shape(name: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> torch.Tensor:
    """``tensor``, once its shape is the wanted one; ``CheckpointError`` otherwise."""
    if tuple(tensor.shape) != wanted:
        raise CheckpointError(
            f"tensor {name}: expected shape {list(wanted)}, found {list(tensor.shape)}"
        )
    return tensor


def _refuse_transforms(info: CheckpointInfo, stored: Mapping[str, StoredLinear]) -> None:
    """Raises ``CheckpointError`` when a linear would be silently wrong without a rotation."""
    for name in info.tensor_names:
        module, _, leaf = name.rpartition(".")
        if module in stored and _TRANSFORM.search(leaf):
            raise CheckpointError(
                f"tensor {name} rotates the input of {module}, which Ingle does not do; "
                "use a checkpoint exported without rotation"
            )


class AffineLoader(WeightLoader):
    """Serves the linears of one checkpoint whose headers have been read into ``stored``."""

    types: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {}
    """By layout and role: safetensors types that differ from what the role usually has."""

    def __init__(
        self, info: CheckpointInfo, config: AffineConfig, stored: Mapping[str, StoredLinear]
    ) -> None:
        self.info = info
        self.config = config
        self.stored = stored
        for linear in stored.values():
            check_types(info, linear, self.types.get(linear.layout, {}))
        _refuse_transforms(info, stored)
        refuse_packed_embeddings({name: s.tensors.values() for name, s in stored.items()})

    @abstractmethod
    def read_weight(self, linear: StoredLinear, reader: TensorReader) -> AffineWeight:
        """The whole of one linear, unsharded; ``linear.in_features`` is exact by now.

        Raises ``CheckpointError`` when its tensors do not fit each other.
        """

    def linears(self) -> Mapping[str, tuple[int, int]]:
        """Every linear stored in this format: name -> (out_features, in_features)."""
        return {s.name: (s.out_features, s.in_features) for s in self.stored.values()}

    def tensor_names(self, name: str) -> tuple[str, ...]:
        """The checkpoint tensors that linear ``name`` is made of."""
        return tuple(self._find(name).tensors.values())

    def packed_bytes(self, name: str) -> int:
        """Bytes linear ``name`` takes on disk."""
        return sum(
            prod(self.info.tensor_shapes[t]) * element_bits(self.info, t) // 8
            for t in self.tensor_names(name)
        )

    def row_product_bytes(self, name: str) -> int | None:
        """For 8 bits, and 4 in whole blocks of outputs: what is not codes."""
        linear = self._find(name)
        is_whole = linear.bits == 4 and linear.out_features % _OUTPUT_BLOCK == 0
        if linear.bits != 8 and not is_whole:
            return None
        codes = linear.out_features * linear.in_features * linear.bits // 8
        return max(0, self.packed_bytes(name) - codes)

    def can_shard(self, spec: LinearSpec) -> Support:
        """Always: an affine weight is cut after it is read, along either axis."""
        return Support(ok=True, reason="affine weights are cut along either axis")

    def load_linear(self, spec: LinearSpec, reader: TensorReader) -> LinearWeight:
        """One linear as an ``AffineWeight``, cut to ``spec.shard``."""
        linear = self._find(spec.name)
        least = linear.in_features - linear.spare_inputs
        most = linear.in_features + linear.extra_inputs
        if linear.out_features < spec.out_features or not least <= spec.in_features <= most:
            tensors = {t: list(self.info.tensor_shapes[t]) for t in linear.tensors.values()}
            raise CheckpointError(
                f"{spec.name}: the model wants [{spec.out_features}, {spec.in_features}], but "
                f"{tensors} hold {linear.bits}-bit [{linear.out_features}, {linear.in_features}]; "
                "is config.json that of another model?"
            )
        weight = self.read_weight(replace(linear, in_features=spec.in_features), reader)
        check_finite(linear, weight)
        weight.out_features = spec.out_features
        if weight.input_scale is not None:
            weight.input_scale = weight.input_scale.to(spec.dtype)
        return weight.shard(spec.shard)

    def fuse(self, parts: Sequence[LinearWeight]) -> LinearWeight | None:
        """The parts side by side along N when they agree, else None."""
        from ingle.plugin.affine import concatenate

        return concatenate(parts)

    def _find(self, name: str) -> StoredLinear:
        if name not in self.stored:
            raise CheckpointError(f"no quantised tensors are stored for the linear {name}")
        return self.stored[name]


def _beside(info: CheckpointInfo, module: str) -> dict[str, list[int]]:
    """Shape of every tensor of ``module``, by name."""
    start = f"{module}."
    return {
        name: list(shape) for name, shape in info.tensor_shapes.items() if name.startswith(start)
    }


def _modules_without_codes(
    info: CheckpointInfo, linears: Mapping[str, StoredLinear]
) -> Iterator[str]:
    """Modules with what belongs to codes, zeros or a group index, but neither codes nor weight."""
    for suffix in (".qzeros", ".g_idx"):
        for name in module_names(info, suffix):
            kept = (f"{name}.{leaf}" in info.tensor_shapes for leaf in ("qweight", "weight"))
            if name not in linears and not any(kept):
                yield name


def _named(config: AffineConfig) -> str:
    source = config.source or "no config"
    return f"{source} names method {config.method}, layout {config.layout}"


class AffineFormat(WeightFormat):
    """Recognises a checkpoint by its tensors; what the config says only rules out or prefers.

    Attributes:
        own_methods: Matches the ``quant_method`` values that name this format.
        possible_methods: Matches every ``quant_method`` under which its tensors occur; any other
            one means that tensors of the same names are another format's.
        wanted_shapes: The shapes of its most common layout, for messages.
        loader_class: What reads the linears.
    """

    own_methods: ClassVar[re.Pattern[str]]
    possible_methods: ClassVar[re.Pattern[str]]
    wanted_shapes: ClassVar[str]
    loader_class: ClassVar[type[AffineLoader]]
    _latest: tuple[CheckpointInfo, Mapping[str, StoredLinear]] | None = None

    @abstractmethod
    def find_linears(
        self, info: CheckpointInfo, config: AffineConfig
    ) -> Mapping[str, StoredLinear]:
        """Every module stored in this format, by name, from the headers alone."""

    def _linears(self, info: CheckpointInfo, config: AffineConfig) -> Mapping[str, StoredLinear]:
        """``find_linears`` of it, found once: a checkpoint is opened right after it is recognised,
        and a mixture of experts has tens of thousands of linears."""
        if self._latest is None or self._latest[0] is not info:
            self._latest = (info, self.find_linears(info, config))
        return self._latest[1]

    def make_loader(
        self, info: CheckpointInfo, config: AffineConfig, linears: Mapping[str, StoredLinear]
    ) -> AffineLoader:
        """A loader for ``linears``; refuses what cannot be read."""
        return self.loader_class(info, config, linears)

    def detect(self, info: CheckpointInfo) -> Detection | None:
        """By the tensors; preferred when the config names this format too."""
        config = AffineConfig.find(info)
        if config.method is not None and not self.possible_methods.search(config.method):
            return None
        linears = self._linears(info, config)
        if not linears:
            return None
        kinds = sorted({f"{linear.layout}, {linear.bits} bits" for linear in linears.values()})
        named = self._is_named(config)
        reason = f"{len(linears)} linears stored as {self.name} ({'; '.join(kinds)})"
        return Detection(reason=reason, priority=20 if named else 10)

    def _is_named(self, config: AffineConfig) -> bool:
        return self.own_methods.search(f"{config.method} {config.layout}") is not None

    def _refuse_misshapen(
        self, info: CheckpointInfo, config: AffineConfig, linears: Mapping[str, StoredLinear]
    ) -> None:
        """Raises ``CheckpointError`` for packed codes whose other tensors fit no layout."""
        words = dict.fromkeys(module_names(info, ".qweight"), "qweight")
        words |= dict.fromkeys(packed_modules(info, ".B"), "B")
        for name, role in words.items():
            if name not in linears and f"{name}.weight" not in info.tensor_shapes:
                raise CheckpointError(
                    f"tensor {name}.{role} and those beside it fit no layout of {self.name}: "
                    f"wanted {self.wanted_shapes}, found {_beside(info, name)} ({_named(config)})"
                )
        for name in _modules_without_codes(info, linears):
            raise CheckpointError(
                f"tensor {name}.qweight is missing: found {_beside(info, name)} of that linear. "
                "A file of the checkpoint may be missing or cut short."
            )

    def open(self, info: CheckpointInfo) -> WeightLoader:
        """A loader for every linear stored in this format."""
        config = AffineConfig.find(info)
        linears = self._linears(info, config)
        if self._is_named(config) or not linears:
            self._refuse_misshapen(info, config, linears)
        if not linears:
            raise CheckpointError(
                f"{info.path}: no linear is stored in a layout of {self.name} that can be read "
                f"({_named(config)})"
            )
        return self.make_loader(info, config, linears)
