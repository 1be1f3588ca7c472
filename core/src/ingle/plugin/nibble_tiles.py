"""Many rows times 4-bit weights on a CPU: some outputs at a time are decoded to bfloat16 in one
pass over their codes, and multiplied.

Codes lie as torch's int4 product for CPUs has them: in blocks of B outputs, uint8 [N/B, K, B/2],
the low nibble of byte i being output i of its block and the high one output B/2 + i.

Shape letters: R rows, N outputs, K inputs, G groups of inputs, B block of outputs, T blocks decoded
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from ingle.plugin.compiled_function import MIN_SIZE, Compilable, CompiledFunction

TILE_WEIGHTS = 1 << 23
"""Weights decoded at a time, at most: 16 MiB."""

TILE_OUTPUTS = 1024
"""But so many outputs at least. oneDNN takes twice as long for 512 rows and 384 to 640 outputs as
in wider products, for 1,024 rows up to 768 (bfloat16 with AMX, 2 threads, K 2,048 to 14,336)."""

Tables = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""``tables(start, stop)``: scales and integer zeros of outputs ``start:stop``, both
[G, stop - start]."""


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, tile: torch.Tensor
) -> None:
    """``(code - zero) * scale``, in float32 and rounded once, into ``tile``.

    Zeros are float16 because beside bfloat16 that makes torch 2.13's compiler work in single
    vector registers; in pairs of them, its choice otherwise, the same loop takes four times as
    long.

    Args:
        codes: uint8 [T, G, K/G, B/2].
        scales: float32 [G, T, 2, B/2].
        zeros: float16 [G, T, 2, B/2].
        tile: bfloat16 [G, K/G, T * B].
    """
    shifts = torch.arange(0, 8, 4, dtype=torch.int32).view(2, 1)
    nibbles = (codes.to(torch.int32).permute(1, 2, 0, 3).unsqueeze(3) >> shifts) & 15
    values = (nibbles.float() - zeros.float().unsqueeze(1)) * scales.unsqueeze(1)
    tile.copy_(values.bfloat16().reshape(tile.shape))


def _compilable(half: int) -> Compilable:
    """``decode_blocks`` for blocks of twice ``half`` outputs."""
    return Compilable(
        name=f"{__name__}:DECODE_{2 * half}",
        function=decode_blocks,
        arguments=(
            (("blocks", "groups", "inputs", half), torch.uint8),
            (("groups", "blocks", 2, half), torch.float32),
            (("groups", "blocks", 2, half), torch.float16),
            (("groups", "inputs", (2 * half, "blocks")), torch.bfloat16),
        ),
        usual={"blocks": 8, "groups": 32, "inputs": 128},
    )


DECODE_64 = _compilable(32)
DECODE_32 = _compilable(16)


def block_size() -> int:
    """B of torch's int4 product on this processor."""
    return 64 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 32


class NibbleTiles:
    """The product, and the memory it decodes into.

    Attributes:
        decode: ``decode_blocks``; the product pays from when it is compiled.
    """

    def __init__(self) -> None:
        self.decode = CompiledFunction(DECODE_64 if block_size() == 64 else DECODE_32)
        self._memory = torch.empty(0, dtype=torch.bfloat16)

    def product(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        num_groups: int,
        tables: Tables,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """``x [R, K]`` (bfloat16) times the weight, into ``out`` [R, N], which is returned.

        Args:
            x: Activations.
            codes: uint8 [blocks, K, B/2], in as many blocks as N takes.
            num_groups: G; K is a multiple of it.
            tables: Scales and zeros.
            out: Where the product goes; N may end inside the last block.
        """
        size = 2 * codes.shape[2]
        for first, last in tiles(codes.shape[0], codes.shape[1] * size, size):
            columns = slice(first * size, min(last * size, out.shape[1]))
            tile = self._decoded(codes[first:last], num_groups, tables(columns.start, columns.stop))
            width = columns.stop - columns.start
            if width == tile.shape[1]:
                torch.mm(x, tile, out=out[:, columns])
            else:
                out[:, columns] = torch.mm(x, tile)[:, :width]
        return out

    def _decoded(
        self, codes: torch.Tensor, num_groups: int, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Blocks of codes [T, K, B/2] as bfloat16 [K, T * B]."""
        blocks, inputs, half = codes.shape
        scales, zeros = tables
        if scales.shape[1] < blocks * 2 * half:  # the last block is not full
            padding = (0, blocks * 2 * half - scales.shape[1])
            scales, zeros = F.pad(scales, padding), F.pad(zeros, padding)
        if num_groups == 1 and inputs % MIN_SIZE == 0:
            # Compiled code takes no dimension of 1: the group as several with the same scale.
            num_groups = MIN_SIZE
            scales, zeros = (one.expand(num_groups, -1) for one in (scales, zeros))
        by_block = (num_groups, blocks, 2, half)
        tile = self._tile(inputs * blocks * 2 * half)
        self.decode(
            codes.view(blocks, num_groups, -1, half),
            scales.to(torch.float32).reshape(by_block),
            zeros.to(torch.float16).reshape(by_block),
            tile.view(num_groups, -1, blocks * 2 * half),
        )
        return tile.view(inputs, -1)

    def _tile(self, size: int) -> torch.Tensor:
        """bfloat16 [size] with any contents. New memory would cost more than decoding into it."""
        if self._memory.numel() < size:
            with torch.inference_mode(False):  # for use in that mode and out of it
                self._memory = torch.empty(size, dtype=torch.bfloat16)
        return self._memory[:size]


def tiles(num_blocks: int, block_weights: int, size: int) -> Iterator[tuple[int, int]]:
    """First and last block (exclusive) of each tile, of blocks of ``size`` outputs: alike, so that
    none is narrow, and none of a single block where there are more; for that two tiles may
    overlap."""
    step = max(MIN_SIZE, TILE_OUTPUTS // size, TILE_WEIGHTS // block_weights)
    number = -(-num_blocks // step)
    for at in range(number):
        first, last = (num_blocks * end // number for end in (at, at + 1))
        last = max(last, min(MIN_SIZE, num_blocks))
        yield max(0, min(first, last - MIN_SIZE)), last
