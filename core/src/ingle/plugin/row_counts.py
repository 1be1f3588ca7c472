"""How many rows a product on a CPU is given."""

from __future__ import annotations

import torch

MIN_FLOAT32_ROWS = 8
"""Fewer rows in float32 are filled up to these. Of a few rows MKL sums each in one long chain,
which loses digits, and a row then gives other bits alone than among others."""


def padded_rows(rows: int) -> int:
    """The row count to multiply with instead of ``rows``.

    oneDNN makes a program for every shape it meets: 1.5 ms and 0.57 MB each, and a decoder has five
    or six shapes to a row count. A server whose steps differ in length would be busy with that, and
    grow by hundreds of megabytes. Up to 32 rows a product waits for its weight, so more rows cost
    nothing; above, they are kept to an eighth, or 15.
    """
    if rows <= 4:
        return rows
    octave = 1 << (rows - 1).bit_length() - 1  # the power of two below ``rows``
    step = octave // 2 if rows <= 32 else min(64, max(16, octave // 8))
    return -(-rows // step) * step


def with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``x [R, K]`` as the first rows of a matrix of ``rows`` rows, the others zero."""
    if x.shape[0] == rows:
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))
