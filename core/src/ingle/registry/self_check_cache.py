"""Results of kernel self-checks, kept on disk so that start-up stays fast. No torch here."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class SelfCheckCache:
    """Measured errors of kernels that passed, by key, in one JSON file.

    Only passes are kept: a failure is measured anew at every start, so that it always comes with
    its traceback and goes away when its cause does. A file that cannot be read or written costs
    nothing but the time to measure again.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._errors: dict[str, float] = {}
        self._loaded = False

    def get(self, key: str) -> float | None:
        """The error measured for ``key``, or None."""
        if not self._loaded:
            self._errors |= self._read()
            self._loaded = True
        return self._errors.get(key)

    def add(self, key: str, error: float) -> None:
        """Remembers a pass. Other processes' entries are kept; the file is replaced at once."""
        self._errors[key] = error
        if self._path is None:
            return
        self._errors = self._read() | self._errors
        try:
            write_json(self._path, self._errors)
        except OSError:
            self._path = None

    def _read(self) -> dict[str, float]:
        if self._path is None:
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {k: float(v) for k, v in found.items() if isinstance(v, int | float)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces ``path`` with ``content`` as JSON, never leaving half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=0, sort_keys=True)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
