"""EXL2's bit streams, scales and permutation, in plain integer operations on any device.

Inside a group each column is a little-endian bit stream that runs down the rows: the code of the
group's row j takes stream bits ``[j*b, j*b+b)`` and stream bit i is bit ``i % 32`` of word
``i // 32``. 32 rows of b-bit codes are exactly b words, so rows are handled 32 at a time.

Letters: N output features, K input features, G groups, W words, U units of 32 rows.
"""

from __future__ import annotations

import torch

from ingle_quant_exl2.layout import ROW_UNIT


def unpack_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes ``[W*32/bits, N]`` uint8 of the words ``[W, N]`` int32 of one section."""
    num_words, columns = words.shape
    units = words.reshape(num_words // bits, bits, columns)
    codes = torch.empty(units.shape[0], ROW_UNIT, columns, dtype=torch.uint8, device=words.device)
    for row in range(ROW_UNIT):
        codes[:, row] = _unpack_row(units, row * bits, bits)
    return codes.view(-1, columns)


def _unpack_row(units: torch.Tensor, position: int, bits: int) -> torch.Tensor:
    """The codes at stream bit ``position`` of each unit ``[U, bits, N]``: [U, N] int32.

    Words are signed, so a right shift copies the sign bit down: the mask takes it off again.
    """
    word, shift = divmod(position, 32)
    low_bits = min(bits, 32 - shift)
    code = (units[:, word] >> shift) & ((1 << low_bits) - 1)
    if low_bits < bits:
        code |= (units[:, word + 1] & ((1 << (bits - low_bits)) - 1)) << low_bits
    return code


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Words ``[K*bits/32, N]`` int32 of codes ``[K, N]`` below ``2**bits``; undoes unpack."""
    rows, columns = codes.shape
    units = codes.to(torch.int64).view(rows // ROW_UNIT, ROW_UNIT, columns)
    words = torch.zeros(rows // ROW_UNIT, bits + 1, columns, dtype=torch.int64, device=codes.device)
    for row in range(ROW_UNIT):
        word, shift = divmod(row * bits, 32)
        value = units[:, row] << shift
        words[:, word] |= value & 0xFFFFFFFF
        words[:, word + 1] |= value >> 32
    return _as_int32(words[:, :bits].reshape(-1, columns))


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit values held in int64 as the int32 with the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def unpack_scale_codes(q_scale: torch.Tensor) -> torch.Tensor:
    """Scale codes ``[G, N]`` int32, 0 to 15, of ``q_scale [G, N/8]`` int32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=q_scale.device)
    return ((q_scale.unsqueeze(-1) >> shifts) & 15).flatten(1)


def pack_scale_codes(codes: torch.Tensor) -> torch.Tensor:
    """``q_scale [G, N/8]`` int32 of scale codes ``[G, N]``, 0 to 15; output n in nibble n % 8."""
    groups, columns = codes.shape
    nibbles = codes.to(torch.int64).view(groups, columns // 8, 8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=codes.device)
    return _as_int32((nibbles << shifts).sum(-1))


def group_scales(q_scale: torch.Tensor, q_scale_max: torch.Tensor) -> torch.Tensor:
    """The scale of every group and output: [G, N] float16.

    ``(code + 1)**2`` of 256 parts of the group's largest scale, rounded to float16 twice as
    exllamav2 does: once after the division by 256, which loses bits below 2**-6, and once after
    the product. Each product is exact in float32, so each is one rounding.
    """
    largest = (q_scale_max.float() / 256).half().float()
    squares = (unpack_scale_codes(q_scale) + 1).square().float()
    return (squares * largest[:, None]).half()
