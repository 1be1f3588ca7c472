"""Small integer codes in and out of words: what every affine weight format is made of.

A *bit stream* along an axis: code i occupies bits [i*b, (i+1)*b) of the words laid end to end, word
0 lowest. Words are little endian, so a stream of words of any size is the same stream of bytes,
and the word size never matters once the axis is last.

Shape letters: N output features, K input features, b bits, W words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ingle.errors import PluginError
from ingle.plugin.affine_words import WORD_BITS, candidate_bits, num_words

__all__ = [
    "CODES_PER_RUN",
    "WORD_BITS",
    "candidate_bits",
    "in_runs",
    "num_words",
    "pack_bits",
    "reorder_runs",
    "repack_words",
    "split_nibbles",
    "unpack_bits",
]

CODES_PER_RUN = 8
"""Eight b-bit codes fill b whole bytes, for every b."""


def unpack_bits(words: torch.Tensor, bits: int, count: int, axis: int = -1) -> torch.Tensor:
    """The first ``count`` codes of the bit streams along ``axis``: uint8, that axis moved last.

    Args:
        words: Integers of any size, one stream along ``axis`` for every other index.
        bits: b, 2 to 8.
        count: How many codes to give back; fewer than the words hold cuts the padding off.
        axis: The packed axis.
    """
    stream = _contiguous(words.movedim(axis, -1)).view(torch.uint8)
    if not 2 <= bits <= 8 or stream.shape[-1] * 8 < count * bits:
        raise PluginError(
            f"cannot take {count} codes of {bits} bits out of {tuple(words.shape)} {words.dtype}"
        )
    if bits == 8:
        codes = stream
    elif bits == 4:
        codes = split_nibbles(stream)
    else:
        codes = _split_runs(stream, bits)
    return codes[..., :count]


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without gaps and with the strides of its shape, so that its bytes can be viewed
    as another dtype: torch's own ``contiguous`` leaves any stride where a dimension is 1."""
    return tensor.contiguous().view(-1).view(tensor.shape)


def split_nibbles(stream: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] to uint8 [..., 2n]: low nibble first.

    Spreads the two nibbles of a byte over the two bytes of an int16, so that every step runs over
    contiguous memory: about ten times faster than writing two interleaved halves.
    """
    spread = stream.to(torch.int16)
    spread = spread.bitwise_or_(spread << 4).bitwise_and_(0x0F0F)
    return spread.view(torch.uint8)


def _split_runs(stream: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 bytes [..., n] to codes [..., 8 * ceil(n / b)], any b: b bytes hold eight codes."""
    runs = in_runs(F.pad(stream, (0, -stream.shape[-1] % bits)), bits)
    codes = runs.new_empty((*runs.shape[:-1], CODES_PER_RUN))
    for i in range(CODES_PER_RUN):
        first, shift = divmod(i * bits, 8)
        value = runs[..., first] >> shift
        if shift + bits > 8:
            value = value | (runs[..., first + 1] << (8 - shift))
        codes[..., i] = value & ((1 << bits) - 1)
    return codes.flatten(-2)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The bit streams of ``codes`` (uint8 [..., n], each below 2**bits): int32 [..., W].

    W is ``num_words(n, bits)``; unused bits are zero.
    """
    padding = -codes.shape[-1] % WORD_BITS
    padded = F.pad(codes, (0, padding)) if padding else _contiguous(codes)
    if bits == 8:
        words = padded.view(torch.int32)
    elif bits == 4:
        words = _join_nibbles(padded)
    else:
        words = _join_runs(padded, bits).view(torch.int32)
    return words[..., : num_words(codes.shape[-1], bits)].contiguous()


def _join_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., 8n] to int32 [..., n]: eight bytes are folded together as one int64."""
    words = codes.view(torch.int64)
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        words = (words >> shift).bitwise_or_(words).bitwise_and_(mask)
    return words.to(torch.int32)


def _join_runs(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., 8n] to bytes [..., b * n]."""
    runs = in_runs(codes, CODES_PER_RUN)
    stream = runs.new_zeros((*runs.shape[:-1], bits))
    for i in range(CODES_PER_RUN):
        first, shift = divmod(i * bits, 8)
        stream[..., first] |= runs[..., i] << shift
        if shift + bits > 8:
            stream[..., first + 1] |= runs[..., i] >> (8 - shift)
    return stream.flatten(-2)


def repack_words(words: torch.Tensor, bits: int, count: int, axis: int) -> torch.Tensor:
    """A bit stream along ``axis`` as int32 words with that axis last: [..., W], a fresh copy.

    The codes themselves are not touched: only the words are transposed and, for words that are
    not 32 bits, cut anew. Bits past ``count`` codes are those that were stored.
    """
    stream = words.movedim(axis, -1).clone(memory_format=torch.contiguous_format)
    stream = stream.view(torch.uint8)
    num_bytes = num_words(count, bits) * (WORD_BITS // 8)
    stream = F.pad(stream, (0, max(0, num_bytes - stream.shape[-1])))[..., :num_bytes]
    return stream.contiguous().view(torch.int32)


def reorder_runs(codes: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Every run of ``len(order)`` codes along the last axis reordered: out[j] = run[order[j]].

    An interleave is data: AWQ's, Marlin's and every other nibble order is such a list.
    """
    return in_runs(codes, len(order))[..., list(order)].flatten(-2)


def in_runs(values: torch.Tensor, length: int) -> torch.Tensor:
    """[..., n] as runs along the last axis: [..., n / length, length]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // length, length)
