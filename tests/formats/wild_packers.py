"""Every layout of AWQ, GPTQ and EXL2 files, packed from their written description alone.

In numpy and on single bits: nothing here is shared with the plugins, so the two check each other.
Each packer takes random numbers and options, and gives the tensors of one linear beside the weight
they stand for.

Shape letters: N output features, K input features, G groups, b bits of a code, w bits of a word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
LEGACY_3_BIT = (0x24924924, 0x92492492, 0x49249249)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Packed:
    """Tensors by role, and the weight [N, K] in float32."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor
    extra: dict[str, Any] = field(default_factory=dict)

    def named(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors as a checkpoint names them."""
        return {f"{name}.{role}": tensor for role, tensor in self.tensors.items()}


def stream(codes: Array, bits: int, word_bits: int = 32) -> Array:
    """Codes [..., n] as unsigned words [..., ceil(n * b / w)]: one bit after another."""
    single = (codes[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    flat = single.reshape(*codes.shape[:-1], -1)
    flat = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % word_bits)])
    words = flat.reshape(*codes.shape[:-1], -1, word_bits)
    return (words << np.arange(word_bits, dtype=np.uint64)).sum(-1, dtype=np.uint64)


def planes(codes: Array, bits: int) -> Array:
    """gptq_p: each block of 32 codes is cut into planes, low bits first, one after another."""
    blocks = codes.reshape(*codes.shape[:-1], -1, 32)
    parts, offset = [], 0
    for width in PLANES[bits]:
        parts.append(stream((blocks >> offset) & (2**width - 1), width))
        offset += width
    return np.concatenate(parts, -1).reshape(*codes.shape[:-1], -1)


def signed(words: Array, word_bits: int = 32) -> torch.Tensor:
    """Unsigned words as the signed integers of the same bits."""
    kept = words.astype({8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[word_bits])
    return torch.from_numpy(kept.view(SIGNED[word_bits]).copy())


def floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.002, 0.1, shape)).to(dtype)


def weight_of(codes: Array, zeros: Array, scales: torch.Tensor, group_of: Array) -> torch.Tensor:
    """(q - z) * s: codes [N, K], zeros and scales [G, N], group of each input [K]."""
    steps = torch.from_numpy(codes.astype(np.int64) - zeros.astype(np.int64)[group_of].T)
    return steps.float() * scales.float()[torch.from_numpy(group_of)].T


def random_zeros(
    rng: np.random.Generator, shape: tuple[int, ...], bits: int, sym: bool, least: int = 0
) -> Array:
    if sym:
        return np.full(shape, 1 << (bits - 1))
    return rng.integers(least, 1 << bits, shape)


@dataclass(kw_only=True)
class Gptq:
    """Options of one GPTQ linear; ``zeros`` is v1, v2 or legacy (3 bits of old GPTQModel)."""

    bits: int = 4
    group: int = 32
    sym: bool = False
    zeros: str = "v1"
    planar: bool = False
    word_bits: int = 32
    g_idx: str = "sequential"
    scales: torch.dtype = torch.float16

    def pack(self, rng: np.random.Generator, n: int, k: int) -> Packed:
        group = k if self.group == -1 else self.group
        num_groups = -(-k // group)
        codes = rng.integers(0, 1 << self.bits, (n, k))
        zeros = random_zeros(rng, (num_groups, n), self.bits, self.sym)
        scales = floats(rng, (num_groups, n), self.scales)
        group_of = np.arange(k) // group
        if self.g_idx.startswith("act"):
            group_of = group_of[rng.permutation(k)]
        cut = planes if self.planar else lambda c, b: stream(c, b, self.word_bits)
        tensors = {
            "qweight": signed(cut(codes, self.bits).T, self.word_bits),
            "qzeros": signed(self._stored_zeros(zeros, cut), self.word_bits),
            "scales": scales,
        }
        stored = np.zeros(k, dtype=np.int64) if self.g_idx == "all zero" else group_of
        if self.g_idx != "absent":
            dtype = torch.int64 if self.g_idx.endswith("int64") else torch.int32
            tensors["g_idx"] = torch.from_numpy(stored).to(dtype)
        return Packed(tensors, weight_of(codes, zeros, scales, group_of), {"zeros": zeros})

    def _stored_zeros(self, zeros: Array, cut: Any) -> Array:
        if self.planar or self.zeros == "v2":
            return cut(zeros, self.bits)
        if self.zeros == "legacy":
            words = stream(zeros, 3)
            taken = np.array(LEGACY_3_BIT, dtype=np.uint64)[np.arange(words.shape[1]) % 3]
            return (words - taken) & np.uint64(0xFFFFFFFF)
        if self.bits in (2, 4, 8):
            one = sum(1 << shift for shift in range(0, self.word_bits, self.bits))
            return stream(zeros, self.bits, self.word_bits) - np.uint64(one)
        return cut((zeros - 1) & ((1 << self.bits) - 1), self.bits)


def interleaved(codes: Array) -> Array:
    """[..., n] with every run of eight in AWQ's order."""
    return codes.reshape(*codes.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(codes.shape)


def awq_gemm(
    rng: np.random.Generator, n: int, k: int, *, bits: int = 4, group: int = 32,
    sym: bool = False, interleave: bool = True, scales: torch.dtype = torch.float16,
) -> Packed:  # fmt: skip
    group = k if group == -1 else group
    codes = rng.integers(0, 1 << bits, (n, k))
    zeros = random_zeros(rng, (-(-k // group), n), bits, sym)
    s = floats(rng, zeros.shape, scales)
    order = interleaved if interleave else lambda c: c
    tensors = {
        "qweight": signed(stream(order(codes.T), bits)),
        "qzeros": signed(stream(order(zeros), bits)),
        "scales": s,
    }
    return Packed(tensors, weight_of(codes, zeros, s, np.arange(k) // group))


def zero_words(num_groups: int, group: int) -> int:
    """Words of zeros per output that the gemv writers keep."""
    multiple = 1 if group >= 128 else 128 // group
    words = -(-num_groups // 8)
    return -(-words // multiple) * multiple


def awq_gemv(rng: np.random.Generator, n: int, k: int, *, group: int = 128) -> Packed:
    """Padding holds rubbish here, so that a reader that uses it is found out."""
    group = k if group == -1 else group
    num_groups = k // group
    padded = 8 * zero_words(num_groups, group)
    codes = rng.integers(0, 16, (n, k))
    zeros = rng.integers(0, 16, (padded, n))
    s = floats(rng, (padded, n), torch.float16)
    tensors = {
        "qweight": signed(stream(codes, 4)),
        "qzeros": signed(stream(zeros.T, 4)),
        "scales": s.T.contiguous(),
    }
    return Packed(tensors, weight_of(codes, zeros, s, np.arange(k) // group))


def awq_gemv_fast(
    rng: np.random.Generator, n: int, k: int, *, group: int = 128, llm_awq: bool = False
) -> Packed:
    padded = 8 * zero_words(k // group, group)
    codes = rng.integers(0, 16, (n, k))
    s = floats(rng, (padded, n), torch.float16)
    products = -(s.float() * torch.from_numpy(rng.integers(0, 16, (padded, n)))).half()
    words = np.zeros((n // 4, k), dtype=np.uint64)
    for row in range(n):
        for column in range(k):
            kk = column % 32
            p1 = (kk % 8) // 2 * 8 + kk // 8 * 2 + kk % 2
            p = p1 // 8 * 8 + p1 % 2 * 4 + p1 % 8 // 2
            col = 32 * (column // 32) + p
            lin = 64 * (row % 4) + col % 64
            shift = np.uint64(4 * (lin % 4))
            words[row // 4, 64 * (col // 64) + lin // 4] |= np.uint64(codes[row, column]) << shift
    tensors = {
        "qweight": signed(words, 16),
        "scales": s,
        "scaled_zeros" if llm_awq else "qzeros": products,
    }
    group_of = torch.arange(k) // group
    exact = torch.from_numpy(codes).float() * s.float()[group_of].T
    return Packed(tensors, exact + products.float()[group_of].T)


def marlin(
    rng: np.random.Generator, n: int, k: int, *, group: int = 128, names: tuple[str, str]
) -> Packed:
    """Tiles of 16 x 16, runs of 1024 in the order of a matrix fragment; ``names``: B and s."""
    group = k if group == -1 else group
    codes = rng.integers(0, 16, (n, k))
    s = floats(rng, (k // group, n), torch.float16)
    tiles = codes.T.reshape(k // 16, 16, n // 16, 16).transpose(0, 2, 1, 3).reshape(k // 16, -1)
    order = []
    for lane in range(32):
        c, first = lane // 4, 2 * (lane % 4)
        eight = [
            16 * row + c + 8 * beta
            for beta in (0, 1)
            for row in (first, first + 1, first + 8, first + 9)
        ]
        for j in range(4):
            order += [256 * j + eight[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    runs = tiles.reshape(k // 16, -1, 1024)[..., order].reshape(k // 16, -1)
    if k // group > 1:
        gather = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        gather = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    stored = s.reshape(len(s), -1, len(gather))[..., gather].reshape(s.shape)
    tensors = {names[0]: signed(stream(runs, 4)), names[1]: stored.contiguous()}
    middle = np.full(s.shape, 8)
    return Packed(tensors, weight_of(codes, middle, s, np.arange(k) // group))


def exl2(
    rng: np.random.Generator, n: int, groups: list[tuple[int, int]], *, identity: bool = False
) -> Packed:
    """``groups``: (bits, rows) in descending bits; n is a multiple of 8."""
    k = sum(rows for _, rows in groups)
    perm = np.arange(k) if identity else rng.permutation(k)
    scale_codes = rng.integers(0, 16, (len(groups), n))
    largest = (10.0 ** rng.uniform(-4, 0, len(groups))).astype(np.float16)
    words, pairs, rows_of = [], [], []
    offset = 0
    for index, (bits, rows) in enumerate(groups):
        codes = rng.integers(0, 1 << bits, (rows, n))
        words.append(stream(codes.T, bits).T)
        pairs += [bits, offset]
        offset += len(words[-1])
        part = (largest[index].astype(np.float32) / np.float32(256)).astype(np.float16)
        square = ((scale_codes[index] + 1) ** 2).astype(np.float32)
        scale = (square * part.astype(np.float32)).astype(np.float16).astype(np.float32)
        rows_of.append(((codes - (1 << (bits - 1))) * scale).astype(np.float16))
    quantised = np.concatenate(rows_of)
    inverse = np.argsort(perm)
    tensors = {
        "q_weight": signed(np.concatenate(words)),
        "q_scale": signed(stream(scale_codes, 4)),
        "q_scale_max": torch.from_numpy(largest),
        "q_groups": torch.from_numpy(np.array(pairs, dtype=np.uint16).view(np.int16)),
        "q_invperm": torch.from_numpy(inverse.astype(np.int32)),
    }
    return Packed(tensors, torch.from_numpy(quantised[inverse].T.astype(np.float32)))
