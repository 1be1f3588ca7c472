"""Texts out of a user's file or folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ingle.errors import ConfigError

LINES: Final = (".jsonl", ".ndjson")
PARQUET: Final = ".parquet"
PLAIN: Final = (".txt", ".md", ".rst", ".text")
_COLUMNS: Final = ("text", "content")


def read_texts(path: Path) -> Iterator[str]:
    """The texts of ``path``, one by one, files of a folder in name order.

    Raises:
        ConfigError: When it cannot be read, or is of a kind that is not known.
    """
    if path.is_dir():
        known = (*PLAIN, *LINES, PARQUET)
        files = sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())
        if not files:
            raise ConfigError(f"--calibration {path} has no files of {', '.join(known)}.")
        for file in files:
            yield from _read_file(file)
    else:
        yield from _read_file(path)


def _read_file(path: Path) -> Iterator[str]:
    if path.suffix == PARQUET:
        yield from _read_parquet(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {path} cannot be read as UTF-8 text: {error}.") from None
    if path.suffix not in LINES:
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _text_of_line(path, number, line)


def _text_of_line(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        raise ConfigError(f"--calibration {path}, line {number}: this is no JSON.") from None
    if isinstance(entry, str):
        return entry
    found = entry if isinstance(entry, dict) else {}
    for column in _COLUMNS:
        if isinstance(found.get(column), str):
            return str(found[column])
    raise ConfigError(
        f"--calibration {path}, line {number}: no text in it; wanted is a string or an object "
        f"with one under {' or '.join(_COLUMNS)}."
    )


def _read_parquet(path: Path) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"--calibration {path}: reading parquet needs pyarrow: pip install pyarrow"
        ) from None
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        column = next((name for name in _COLUMNS if name in names), None)
        if column is None:
            raise ConfigError(
                f"--calibration {path} has the columns {', '.join(names)}; wanted is one called "
                f"{' or '.join(_COLUMNS)}."
            )
        for batch in file.iter_batches(columns=[column]):
            yield from (str(value) for value in batch.column(0).to_pylist() if value)
    except (OSError, ArrowException) as error:
        raise ConfigError(f"--calibration {path} cannot be read as parquet: {error}.") from None
