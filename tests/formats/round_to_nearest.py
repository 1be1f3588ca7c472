"""Packs dense weights as AWQ and GPTQ files, rounding to nearest: for tests, not for quality.

Written from the formats' descriptions with plain loops over fields, apart from the packing that
the plugins share, so that the two check each other.

Shape letters: N output features, K input features, G groups.
"""

from __future__ import annotations

import torch

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AWQ gemm word holds column 8c + AWQ_COLUMNS[i]."""


def pack_awq_gemm(weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    """``weight`` [N, K] as ``qweight``, ``qzeros``, ``scales`` of AWQ gemm, 4 bits, with zeros."""
    codes, zeros, scales = quantize(weight, 4, group_size, sym=False)
    return {
        "qweight": _pack_fields(_interleave(codes.T), 4),
        "qzeros": _pack_fields(_interleave(zeros.T), 4),
        "scales": scales.T.contiguous().to(torch.float16),
    }


def pack_gptq(
    weight: torch.Tensor, bits: int, group_size: int, sym: bool, order: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """``weight`` [N, K] as ``qweight``, ``qzeros``, ``scales`` and ``g_idx`` of GPTQ v1.

    2, 4 or 8 bits. Zeros of 0 are avoided, as every careful v1 writer does. ``order`` (int64 [K])
    makes act-order: groups are runs of ``weight[:, order]``.
    """
    inputs = weight.shape[1]
    order = torch.arange(inputs) if order is None else order
    codes, zeros, scales = quantize(weight[:, order], bits, group_size, sym)
    group = inputs if group_size == -1 else group_size
    back = order.argsort()
    return {
        "qweight": _pack_fields(codes[:, back], bits).T.contiguous(),
        "qzeros": _pack_fields(zeros.T - 1, bits),
        "scales": scales.T.contiguous().to(torch.float16),
        "g_idx": (torch.arange(inputs) // group)[back].to(torch.int32),
    }


def rounded(
    weight: torch.Tensor, bits: int, group_size: int, sym: bool, order: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight that the packed one stands for: float32 [N, K]."""
    inputs = weight.shape[1]
    order = torch.arange(inputs) if order is None else order
    codes, zeros, scales = quantize(weight[:, order], bits, group_size, sym)
    group = inputs if group_size == -1 else group_size
    zeros, scales = (t.repeat_interleave(group, 1) for t in (zeros, scales))
    return ((codes - zeros) * scales)[:, order.argsort()]


def quantize(
    weight: torch.Tensor, bits: int, group_size: int, sym: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], zeros [N, G] (1 to 2**b - 1) and scales [N, G] (rounded to float16)."""
    rows, inputs = weight.shape
    group = inputs if group_size == -1 else group_size
    grouped = weight.float().view(rows, inputs // group, group)
    top = 2**bits - 1
    if sym:
        scales = grouped.abs().amax(-1) / (2 ** (bits - 1) - 1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales.clamp_min(1e-8)).round().clamp(1, top)
    scales = scales.clamp_min(1e-6).to(torch.float16).float()
    codes = (grouped / scales[..., None]).round() + zeros[..., None]
    codes = codes.clamp(0, top).view(rows, inputs)
    return codes.to(torch.int64), zeros.to(torch.int64), scales


def _interleave(columns: torch.Tensor) -> torch.Tensor:
    return columns.reshape(columns.shape[0], -1, 8)[..., list(AWQ_COLUMNS)].flatten(1)


def _pack_fields(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 fields [R, C] to int32 words [R, C * b / 32], first field lowest."""
    per_word = 32 // bits
    words = torch.zeros(fields.shape[0], fields.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words |= (fields[:, place::per_word] & (2**bits - 1)) << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_exl2(
    weight: torch.Tensor, sections: tuple[tuple[int, int, int], ...], order: torch.Tensor
) -> dict[str, torch.Tensor]:
    """``weight`` [N, K] as the five tensors of EXL2; N is a multiple of 8.

    ``sections``: (bits, rows, rows of a group), bits descending, the last one's rows -1: the rest.
    ``order`` (int64 [K]): the input of each quantised row.
    """
    rows = weight.float().T[order]
    words, codes, largest, pairs = [], [], [], []
    start = offset = 0
    for bits, count, size in sections:
        stop = len(rows) if count == -1 else start + count
        for first in range(start, stop, size):
            group = rows[first : min(first + size, stop)]
            code, top, quantised = _exl2_group(group, bits)
            words.append(_pack_down(quantised, bits))
            codes.append(code)
            largest.append(top)
            pairs += [bits, offset]
            offset += len(words[-1])
        start = stop
    return {
        "q_weight": torch.cat(words),
        "q_scale": _pack_fields(torch.stack(codes) - 1, 4),
        "q_scale_max": torch.stack(largest),
        "q_groups": torch.tensor(pairs, dtype=torch.int16),
        "q_invperm": order.argsort().to(torch.int32),
    }


def _exl2_group(group: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale codes 1 to 16 [N], largest scale (float16) and codes [rows, N] of one group."""
    middle = 1 << (bits - 1)
    wanted = group.abs().amax(0).clamp_min(1e-8) / middle
    top = wanted.max().to(torch.float16)
    code = (16 * (wanted / top.float()).sqrt()).ceil().clamp(1, 16)
    scale = (code.square() * (top.float() / 256).half().float()).half().float()
    quantised = ((group / scale).round() + middle).clamp(0, 2 * middle - 1)
    return code.to(torch.int64), top, quantised.to(torch.int64)


def _pack_down(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [rows, N], rows in whole 32s, as one bit stream down each column: int32 words."""
    units = codes.view(-1, 32, codes.shape[1])
    words = torch.zeros(len(units), bits, codes.shape[1], dtype=torch.int64)
    for row in range(32):
        for bit in range(bits):
            word, shift = divmod(row * bits + bit, 32)
            words[:, word] |= ((units[:, row] >> bit) & 1) << shift
    words = words.flatten(0, 1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
