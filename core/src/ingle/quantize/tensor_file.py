"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file under another name and renames it once it is on the disk."""
    part = path.with_name(f".{path.name}.part")
    # Copies: a file's tensors may not share memory, and linears of one input share a group index.
    owned = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_file(owned, part, metadata={"format": "pt"})
    _publish(part, path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What ``write_tensors`` wrote."""
    found: dict[str, torch.Tensor] = load_file(path)
    return found


def write_text(path: Path, text: str) -> None:
    """The same for a text file, in UTF-8."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    _publish(part, path)


def _publish(part: Path, path: Path) -> None:
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
