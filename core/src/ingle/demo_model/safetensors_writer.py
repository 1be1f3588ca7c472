"""Writes a safetensors file tensor by tensor, so that no more than one is in memory."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch


def write_bfloat16_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[torch.Tensor]
) -> None:
    """Writes ``tensors``, in the order of ``shapes``, to ``path`` as bfloat16.

    Args:
        path: The file to write.
        shapes: Name and shape of every tensor.
        tensors: The tensors in the same order, of any floating dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, not {shape}")
            rounded = tensor.to(torch.bfloat16).contiguous()
            rounded.view(torch.uint8).numpy().tofile(file)
