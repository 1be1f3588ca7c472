"""Who may read a file that was written here."""

from __future__ import annotations

from pathlib import Path

_READ_AND_WRITE = 0o666


def readable_as_its_folder(path: Path) -> None:
    """Lets those read and write ``path`` who may read and write its folder.

    The safetensors library makes files that nobody but their owner can read, so a model made by one
    user could not be served by another, such as the one inside a container.
    """
    path.chmod(path.parent.stat().st_mode & _READ_AND_WRITE)
