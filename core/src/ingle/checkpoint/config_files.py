"""The JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ingle.errors import CheckpointError

MAX_CONFIG_BYTES: Final = 1024 * 1024
MAX_TOKENIZER_BYTES: Final = 256 * 1024 * 1024
_TOKENIZER_FILES: Final = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        CheckpointError: When it cannot be read, is larger than ``max_bytes`` or is no JSON object.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes; more than {max_bytes} is refused.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {str(error)[:120]}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return content


def read_optional_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """As ``read_json_object``; a file that is not there is an empty object."""
    return read_json_object(path, max_bytes) if path.is_file() else {}


def read_companions(folder: Path) -> dict[str, dict[str, Any]]:
    """Every JSON object file of ``folder`` of at most 1 MiB, by name, but config.json and the
    tokenizer's. Files that hold something else are left out, unless their name ends in
    ``config.json``: a damaged one of those would change how weights are read.

    Raises:
        CheckpointError: When a ``*config.json`` is damaged.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == "config.json" or path.name in _TOKENIZER_FILES:
            continue
        if not path.is_file() or path.stat().st_size > MAX_CONFIG_BYTES:
            continue
        try:
            found[path.name] = read_json_object(path)
        except CheckpointError:
            if path.name.endswith("config.json"):
                raise
    return found
