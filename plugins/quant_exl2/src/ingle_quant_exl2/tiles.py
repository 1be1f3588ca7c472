"""How core's Triton products decode a tile of an EXL2 matrix as it lies on disk: for float32
activations and whatever else the kernel for planes declines.

Letters: N output features as stored, K input features, G groups, W words.
"""

# Triton functions take pointers and constants that no annotation describes.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ingle.plugin import TritonDecode
from ingle_quant_exl2.layout import ROW_UNIT
from ingle_quant_exl2.weight import StoredExl2Weight


@triton.jit
def decode_exl2(T, n, k, N: tl.constexpr, K: tl.constexpr, META: tl.constexpr, DTYPE):
    """Weights rounded to float16 first, as the format does it: [BN, BK]. See ``TritonDecode``.

    T: words int32 [W, N], scale codes int32 [G, N/8], largest scales / 256 float16 [G], and for
    every 32 rows its group and its first word, int32 [K/32]. META: the bits.
    """
    BITS: tl.constexpr = META[0]
    group, first = tl.load(T[3] + k // 32), tl.load(T[4] + k // 32)
    bit = k % 32 * BITS
    shift, last = bit % 32, first + BITS - 1
    word, after = first + bit // 32, tl.minimum(first + bit // 32 + 1, last)
    low = tl.load(T[0] + word.to(tl.int64)[None, :] * N + n[:, None])
    codes = low.to(tl.uint32, bitcast=True) >> shift[None, :]
    if 32 % BITS:
        high = tl.load(T[0] + after.to(tl.int64)[None, :] * N + n[:, None])
        # Shifting by a whole word means nothing, so in two steps.
        codes |= (high.to(tl.uint32, bitcast=True) << (31 - shift)[None, :]) << 1
    codes = (codes & ((1 << BITS) - 1)).to(tl.int32) - (1 << (BITS - 1))
    eight = tl.load(T[1] + group[None, :] * (N // 8) + (n // 8)[:, None])
    step = ((eight >> (n % 8 * 4)[:, None]) & 15) + 1
    largest = tl.load(T[2] + group).to(tl.float32)[None, :]
    scales = ((step * step).to(tl.float32) * largest).to(tl.float16).to(tl.float32)
    return (codes.to(tl.float32) * scales).to(tl.float16).to(DTYPE)


def exl2_decode(weight: StoredExl2Weight) -> TritonDecode:
    """The decoder of a matrix as stored: one section for each run of equal widths."""
    layout, device = weight.layout, weight.q_weight.device
    words = [
        section.word + unit * section.bits
        for section in layout.sections
        for unit in range(section.rows // ROW_UNIT)
    ]
    tensors = (
        weight.q_weight,
        weight.q_scale,
        (weight.q_scale_max.float() / 256).half(),
        torch.tensor(layout.unit_groups, dtype=torch.int32, device=device),
        torch.tensor(words, dtype=torch.int32, device=device),
    )
    return TritonDecode(
        fn=decode_exl2,
        tensors=tensors,
        sections=tuple((s.start, s.stop, (s.bits,)) for s in layout.sections),
        tile=(1, 1),
    )
