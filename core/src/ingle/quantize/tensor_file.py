"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ingle.errors import CapacityError, CheckpointError

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file under another name and renames it once it is on the disk.

    Raises:
        CapacityError, CheckpointError: The disk is full, or the folder cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    # Copies: a file's tensors may not share memory, and linears of one input share a group index.
    owned = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    with writing(path, part):
        save_file(owned, part, metadata={"format": "pt"})
        _publish(part, path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What ``write_tensors`` wrote."""
    found: dict[str, torch.Tensor] = load_file(path)
    return found


def write_text(path: Path, text: str) -> None:
    """The same for a text file, in UTF-8."""
    part = path.with_name(f".{path.name}.part")
    with writing(path, part):
        part.write_text(text, encoding="utf-8")
        _publish(part, path)


@contextmanager
def writing(path: Path, part: Path | None = None) -> Iterator[None]:
    """Turns what can go wrong while ``path`` is written into an error that says what to do;
    ``part``, a file half written, is removed then.

    Raises:
        CapacityError, CheckpointError: The disk is full, or the folder cannot be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if part is not None:
            part.unlink(missing_ok=True)
        if getattr(error, "errno", None) in _FULL or _is_full(str(error)):
            raise CapacityError(
                f"no room for {path}: the disk (or a quota) is full. Make room and repeat the "
                "command; it goes on where it stopped."
            ) from error
        raise CheckpointError(f"{path} cannot be written: {error}.") from error


def _is_full(message: str) -> bool:
    """Whether safetensors, which has no error numbers, speaks of a full disk."""
    return any(f"os error {number})" in message for number in _FULL)


def _publish(part: Path, path: Path) -> None:
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
