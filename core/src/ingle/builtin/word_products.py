"""Several rows and many times 4-bit weights whose codes are ``nibble_words``: compiled functions.

Up to ``MAX_ROWS`` rows are multiplied by codes as these are read, ``ROWS`` at a time, so that a
code is made a number once for all of them. For more rows some outputs at a time are decoded to
bfloat16 and multiplied.

There is a function for every kind of weight: its groups' runs, and what its tables hold. The
compiler's process finds one by its name, such as ``ROWS_2_float16_uint8``.

Shape letters as in ``nibble_words``; R rows of activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from ingle.builtin.nibble_words import (
    LANES,
    NIBBLES,
    in_place,
    run_sums,
    stored,
    terms,
    total,
)
from ingle.plugin.compiled_function import Compilable, CompiledFunction
from ingle.plugin.nibble_tiles import tiles

VECTORS = 2
"""V for several rows: what is made of a run's codes stays in registers until the last row."""
ROWS = 4
"""Rows that share what is made of a code."""
MAX_ROWS = 32
"""From here on decoding first is cheaper."""
NO_ZEROS = "none"

Tables = Sequence[torch.Tensor]
"""Scales and, if there are any, zeros or offsets: each [NB, G, L]."""


def few_rows(x: torch.Tensor, codes: torch.Tensor, *rest: torch.Tensor) -> None:
    """Rows times a weight.

    Args:
        x: bfloat16 [R/4, 4, K].
        codes: int32 [NB, G, runs, V, L].
        rest: ``Tables``; then where the result goes, bfloat16 [R/4, 4, NB, L].
    """
    *tables, out = rest
    shape = (*x.shape[:2], 1, *codes.shape[1:4], NIBBLES)
    rows = x.float()
    ready, totals = stored(in_place(rows)).view(shape), stored(total(rows.view(shape)))
    wide, tables = codes.unsqueeze(1), [table.unsqueeze(1) for table in tables]
    for at in range(x.shape[1]):
        sums = run_sums(wide, ready[:, at].transpose(0, 1))
        row = terms(sums, totals[:, at].transpose(0, 1), tables).sum((2, 3))
        out[:, at].copy_(row.transpose(0, 1))


def decode_words(codes: torch.Tensor, *rest: torch.Tensor) -> None:
    """The weights of some blocks, in float32 and rounded once.

    Args:
        codes: int32 [NB, G, K/8G, L].
        rest: ``Tables``; then where they go, bfloat16 [G, K/8G, 8, NB * L].
    """
    *tables, tile = rest
    scales, *others = (table.float().transpose(0, 1)[:, None, None] for table in tables)
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32).view(NIBBLES, 1, 1)
    nibbles = (codes.permute(1, 2, 0, 3).unsqueeze(2) >> shifts) & 15
    if others and tables[1].is_floating_point():
        values = nibbles.float() * scales + others[0]
    else:
        values = (nibbles.float() - (others[0] if others else 8.0)) * scales
    tile.copy_(values.bfloat16().reshape(tile.shape))


def __getattr__(name: str) -> Compilable:
    """The function of that name."""
    parts = name.split("_")
    if len(parts) == 4 and parts[0] in ("ONE", "ROWS"):
        return _few_rows(parts[0] == "ONE", int(parts[1]), parts[2], parts[3])
    if len(parts) == 3 and parts[0] == "TILE":
        return _tile(parts[1], parts[2])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _table_arguments(scales: str, zeros: str) -> list[tuple[tuple[str | int, ...], torch.dtype]]:
    names = [scales] if zeros == NO_ZEROS else [scales, zeros]
    return [(("blocks", "groups", LANES), getattr(torch, name)) for name in names]


@cache
def _few_rows(is_one: bool, runs: int, scales: str, zeros: str) -> Compilable:
    """``few_rows`` for up to ``ROWS`` rows, or for any number."""
    many = 1 if is_one else "rows"
    name = f"{'ONE' if is_one else 'ROWS'}_{runs}_{scales}_{zeros}"
    return Compilable(
        name=f"{__name__}:{name}",
        function=few_rows,
        arguments=(
            ((many, ROWS, (runs * VECTORS * NIBBLES, "groups")), torch.bfloat16),
            (("blocks", "groups", runs, VECTORS, LANES), torch.int32),
            *_table_arguments(scales, zeros),
            ((many, ROWS, "blocks", LANES), torch.bfloat16),
        ),
        usual={"blocks": 64, "groups": 32} | ({} if is_one else {"rows": 4}),
        max_relative_error=2.0**-6,
        is_written_out=True,
    )


@cache
def _tile(scales: str, zeros: str) -> Compilable:
    return Compilable(
        name=f"{__name__}:TILE_{scales}_{zeros}",
        function=decode_words,
        arguments=(
            (("blocks", "groups", "words", LANES), torch.int32),
            *_table_arguments(scales, zeros),
            (("groups", "words", NIBBLES, (LANES, "blocks")), torch.bfloat16),
        ),
        usual={"blocks": 64, "groups": 32, "words": 16},
        max_relative_error=2.0**-6,
    )


class WordProducts:
    """Products with one kind of weight, and the memory they decode into.

    Args:
        group: Inputs of a group.
        scales: Dtype of the scales.
        zeros: Of the zeros or offsets; None without.
    """

    def __init__(self, group: int, scales: torch.dtype, zeros: torch.dtype | None) -> None:
        kind = (_name(scales), NO_ZEROS if zeros is None else _name(zeros))
        runs = group // (VECTORS * NIBBLES)
        self._one = CompiledFunction(_few_rows(True, runs, *kind))
        self._rows = CompiledFunction(_few_rows(False, runs, *kind))
        self._tile = CompiledFunction(_tile(*kind))
        self._memory = torch.empty(0, dtype=torch.bfloat16)

    @property
    def functions(self) -> tuple[CompiledFunction, ...]:
        """What products call."""
        return (self._one, self._rows, self._tile)

    def product(
        self, x: torch.Tensor, codes: torch.Tensor, tables: Tables, out: torch.Tensor
    ) -> torch.Tensor:
        """``x`` (bfloat16 [R, K]) times the weight, into ``out`` [R, N], which is returned.

        Args:
            x: Activations.
            codes: int32 [NB, G, K/8G, L].
            tables: Scales and zeros or offsets.
            out: Where the product goes; N is at most 16 NB.
        """
        if x.shape[0] == 0:
            return out
        if x.shape[0] <= MAX_ROWS:
            return self._few(x, codes, tables, out)
        for first, last in tiles(codes.shape[0], codes[0].numel() * NIBBLES, LANES):
            tile = self._decoded(codes[first:last], [table[first:last] for table in tables])
            columns = slice(first * LANES, min(last * LANES, out.shape[1]))
            width = columns.stop - columns.start
            if width == tile.shape[1]:
                torch.mm(x, tile, out=out[:, columns])
            else:
                out[:, columns] = torch.mm(x, tile)[:, :width]
        return out

    def _few(
        self, x: torch.Tensor, codes: torch.Tensor, tables: Tables, out: torch.Tensor
    ) -> torch.Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[0] % ROWS)).contiguous()
        whole = padded.new_empty(padded.shape[0], codes.shape[0] * LANES)
        function = self._one if padded.shape[0] == ROWS else self._rows
        rows = padded.view(-1, ROWS, x.shape[1])
        words = codes.view(*codes.shape[:2], -1, VECTORS, LANES)
        function(rows, words, *tables, whole.view(-1, ROWS, codes.shape[0], LANES))
        return out.copy_(whole[: x.shape[0], : out.shape[1]])

    def _decoded(self, codes: torch.Tensor, tables: Tables) -> torch.Tensor:
        """Blocks of codes as bfloat16 [K, NB * L]."""
        blocks, groups = codes.shape[:2]
        inputs = codes[0].numel() // LANES * NIBBLES
        tile = self._tile_memory(inputs * blocks * LANES)
        self._tile(codes, *tables, tile.view(groups, -1, NIBBLES, blocks * LANES))
        return tile.view(inputs, -1)

    def _tile_memory(self, size: int) -> torch.Tensor:
        """bfloat16 [size] with any contents. New memory would cost more than decoding into it."""
        if self._memory.numel() < size:
            with torch.inference_mode(False):  # for use in that mode and out of it
                self._memory = torch.empty(size, dtype=torch.bfloat16)
        return self._memory[:size]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
