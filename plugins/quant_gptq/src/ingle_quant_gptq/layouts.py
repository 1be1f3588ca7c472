"""Which GPTQ layout each module of a checkpoint is stored in, from the headers alone.

Shape letters: N output features, K input features, G groups, b bits, w bits of a word.

============  =============  =============  =====================  ================
layout        codes          scales         zeros                  other
============  =============  =============  =====================  ================
stream        [K*b/w, N]     [G, N]         qzeros [G, N*b/w]      g_idx [K], maybe
planar        the same shapes; codes are cut into bit planes (``checkpoint_format: gptq_p``)
fragments     B [K/16, 2*N]  s [G, N]       none                   (serialised Marlin)
float_zeros   [K*b/32, N]    [N, G]         zeros [N, G], float    (March 2023)
============  =============  =============  =====================  ================

Sources: GPTQModel 7.7.0, AutoGPTQ 0.7.1, AutoRound 0.16.1 and GPTQ-for-LLaMa, as they write files.
"""

from __future__ import annotations

import re
from typing import Final

from ingle.plugin import CheckpointInfo
from ingle.plugin.affine_config import AffineConfig
from ingle.plugin.affine_loader import (
    StoredLinear,
    choose_bits,
    element_bits,
    fragment_size,
    module_tensors,
    packed_modules,
)
from ingle.plugin.affine_words import candidate_bits

_ROLES = ("qweight", "scales", "qzeros", "g_idx", "zeros")
_UNREADABLE_LAYOUTS = ("bitblas",)
"""Layouts of GPTQModel whose words depend on the GPU they were made on."""

PLANAR_BITS: Final = (3, 5, 6, 7)


def find_linears(info: CheckpointInfo, config: AffineConfig) -> dict[str, StoredLinear]:
    """Every module stored in a GPTQ layout, by name."""
    if config.layout in _UNREADABLE_LAYOUTS:
        return {}
    found = [_plain(info, config, name) for name in packed_modules(info, ".qweight")]
    found += [_fragments(info, name) for name in packed_modules(info, ".B")]
    return {linear.name: linear for linear in found if linear is not None}


def _fragments(info: CheckpointInfo, name: str) -> StoredLinear | None:
    """Believed only by its tensors: the marker ``marlin`` is also on files of plain layout."""
    tensors = module_tensors(info, name, ("B", "s"))
    shapes = [info.tensor_shapes[tensor] for tensor in tensors.values()]
    if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes):
        return None
    size = fragment_size(*shapes)
    if size is None:
        return None
    return StoredLinear(
        name=name,
        layout="fragments",
        bits=4,
        out_features=size[0],
        in_features=size[1],
        tensors=tensors,
    )


def _plain(info: CheckpointInfo, config: AffineConfig, name: str) -> StoredLinear | None:
    tensors = module_tensors(info, name, _ROLES)
    words = info.tensor_shapes[tensors["qweight"]]
    scales = info.tensor_shapes.get(tensors.get("scales", ""), ())
    if len(words) != 2 or len(scales) != 2:
        return None
    if "qzeros" in tensors and len(info.tensor_shapes[tensors["qzeros"]]) != 2:
        return None
    if "zeros" in tensors and "qzeros" not in tensors:
        return _float_zeros(config, name, tensors, words) if scales[0] == words[1] else None
    if scales[1] != words[1] or (scales[0] == words[0] and _may_be_rows(info, config, tensors)):
        return None
    if "g_idx" in tensors and len(info.tensor_shapes[tensors["g_idx"]]) != 1:
        return None
    bits = _bits(info, config, name, tensors)
    if bits is None:
        return None
    in_features, spare, extra = _inputs(info, config, name, tensors, bits)
    planar = config.layout == "gptq_p" and bits in PLANAR_BITS
    return StoredLinear(
        name=name,
        layout="planar" if planar else "stream",
        bits=bits,
        out_features=words[1],
        in_features=in_features,
        spare_inputs=spare,
        extra_inputs=extra,
        tensors=tensors,
    )


def _may_be_rows(info: CheckpointInfo, config: AffineConfig, tensors: dict[str, str]) -> bool:
    """Whether a layer with as many rows of words as of scales may store one row per output, as
    one layout of another format does; here it would have groups of a word's inputs, which is
    rare but real (2 bits in groups of 16)."""
    words, scales = (info.tensor_shapes[tensors[role]] for role in ("qweight", "scales"))
    zeros = info.tensor_shapes.get(tensors.get("qzeros", ""), scales)
    named = re.search("gptq|round", f"{config.method} {config.layout}") is not None
    return "g_idx" not in tensors and not named and words[0] > 1 and zeros[1] * 8 == scales[1]


def _float_zeros(
    config: AffineConfig, name: str, tensors: dict[str, str], words: tuple[int, ...]
) -> StoredLinear:
    """The oldest files state nothing, so 4 bits unless a config says otherwise."""
    bits = config.module(name).bits or 4
    return StoredLinear(
        name=name,
        layout="float_zeros",
        bits=bits,
        out_features=words[1],
        in_features=words[0] * 32 // bits,
        tensors=tensors,
    )


def _bits(
    info: CheckpointInfo, config: AffineConfig, name: str, tensors: dict[str, str]
) -> int | None:
    """The width at which zeros fill their words and, where K is known, codes fill theirs.

    The config's width is taken when the shapes allow it: those of very small layers allow
    several, those of layers without zeros and group index any.
    """
    word_bits = element_bits(info, tensors["qweight"])
    rows, outputs = info.tensor_shapes[tensors["qweight"]]
    widths = set(range(2, 9))
    if "qzeros" in tensors:
        zero_words = info.tensor_shapes[tensors["qzeros"]][-1]
        widths &= set(candidate_bits(outputs, zero_words, word_bits))
    if "g_idx" in tensors:
        (inputs,) = info.tensor_shapes[tensors["g_idx"]]
        widths &= set(candidate_bits(inputs, rows, word_bits))
    stated = config.module(name).bits
    if len(widths) == 7 and stated is None and config.method is None:
        return None
    return choose_bits(widths, stated)


def _inputs(
    info: CheckpointInfo, config: AffineConfig, name: str, tensors: dict[str, str], bits: int
) -> tuple[int, int, int]:
    """K, and how many inputs fewer and more would fill the same words: 0 when the group index
    states it. Of several K that fit the stated groups the roundest is taken, 72 before 74."""
    if "g_idx" in tensors:
        return info.tensor_shapes[tensors["g_idx"]][0], 0, 0
    word_bits = element_bits(info, tensors["qweight"])
    rows = info.tensor_shapes[tensors["qweight"]][0]
    fewest, most = (rows - 1) * word_bits // bits + 1, rows * word_bits // bits
    fitting = range(fewest, most + 1)
    groups, size = info.tensor_shapes[tensors["scales"]][0], config.module(name).group_size or 0
    grouped = [k for k in fitting if size > 0 and -(-k // size) == groups]
    likeliest = max(grouped or fitting, key=lambda k: k & -k, default=most)
    return likeliest, likeliest - fewest, most - likeliest
