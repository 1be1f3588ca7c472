"""Rows times weights of 8 bits on a CPU: some outputs at a time are decoded to bfloat16 in one
compiled pass over their codes, and multiplied.

There is a function for every kind of tables. The compiler's process finds one by its name, such as
``BYTES_float16_uint8``.

Shape letters: R rows of activations, N output features, K input features, G groups of inputs, n
outputs decoded at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from ingle.plugin.compiled_function import MIN_SIZE, Compilable, CompiledFunction

TILE_WEIGHTS = 1 << 21
"""Weights decoded at a time, at most: 4 MiB, which stay in the cache for the product."""
NO_ZEROS = "none"
MIDDLE = 128.0
"""Every zero, where there are none."""

Tables = Sequence[torch.Tensor]
"""Scales and, if there are any, zeros or offsets: each [G, n]."""


def decode_bytes(codes: torch.Tensor, *rest: torch.Tensor) -> None:
    """``(code - zero) * scale`` or ``code * scale + offset``, in float32 and rounded once.

    Args:
        codes: uint8 [n, G, K/G].
        rest: ``Tables``; then where the weights go, bfloat16 [n, G, K/G].
    """
    *tables, tile = rest
    scales, *others = (table.float().T.unsqueeze(2) for table in tables)
    if others and tables[1].is_floating_point():
        values = codes.float() * scales + others[0]
    else:
        values = (codes.float() - (others[0] if others else MIDDLE)) * scales
    tile.copy_(values.bfloat16())


def __getattr__(name: str) -> Compilable:
    """The function of that name."""
    parts = name.split("_")
    if len(parts) == 3 and parts[0] == "BYTES":
        return _decode(parts[1], parts[2])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _decode(scales: str, zeros: str) -> Compilable:
    names = [scales] if zeros == NO_ZEROS else [scales, zeros]
    codes = ("outputs", "groups", "inputs")
    return Compilable(
        name=f"{__name__}:BYTES_{scales}_{zeros}",
        function=decode_bytes,
        arguments=(
            (codes, torch.uint8),
            *((("groups", "outputs"), getattr(torch, name)) for name in names),
            (codes, torch.bfloat16),
        ),
        usual={"outputs": 512, "groups": 32, "inputs": 128},
        max_relative_error=2.0**-6,
    )


class ByteProducts:
    """Products with weights of one kind of tables, and the memory they decode into.

    Args:
        scales: Dtype of the scales.
        zeros: Of the zeros or offsets; None without.

    Attributes:
        decode: The function; the product pays when it is compiled.
    """

    def __init__(self, scales: torch.dtype, zeros: torch.dtype | None) -> None:
        names = (str(scales), f"torch.{NO_ZEROS}" if zeros is None else str(zeros))
        self.decode = CompiledFunction(_decode(*(n.removeprefix("torch.") for n in names)))
        self._memory = torch.empty(0, dtype=torch.bfloat16)

    def product(
        self, x: torch.Tensor, codes: torch.Tensor, tables: Tables, out: torch.Tensor
    ) -> torch.Tensor:
        """``x`` (bfloat16 [R, K]) times the weight, into ``out`` [R, N], which is returned.

        Args:
            x: Activations.
            codes: uint8 [N, G, K/G].
            tables: For all outputs.
            out: Where the product goes.
        """
        for first, last in _parts(codes.shape[0], codes[0].numel()):
            part = codes[first:last]
            tile = self._tile(part.numel()).view(part.shape)
            self.decode(part, *(table[:, first:last].contiguous() for table in tables), tile)
            torch.mm(x, tile.flatten(1).T, out=out[:, first:last])
        return out

    def _tile(self, size: int) -> torch.Tensor:
        """bfloat16 [size] with any contents. New memory would cost more than decoding into it."""
        if self._memory.numel() < size:
            with torch.inference_mode(False):  # for use in that mode and out of it
                self._memory = torch.empty(size, dtype=torch.bfloat16)
        return self._memory[:size]


def _parts(outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """First and last output (exclusive) of each tile, none of a single one where there are more."""
    number = -(-outputs // max(MIN_SIZE, TILE_WEIGHTS // inputs))
    return ((outputs * at // number, outputs * (at + 1) // number) for at in range(number))
