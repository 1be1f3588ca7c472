"""Reads the YAML file after ``--config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ingle.errors import ConfigError


def read_settings(path: str) -> dict[str, Any]:
    """The file's options by name; empty values are left out, so their defaults stand.

    Raises:
        ConfigError: When the file is missing, is no YAML, or is no mapping of options to values.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: cannot read {path}: {error}.") from error
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"--config: {path} is not valid YAML: {where}.") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(
            f"--config: {path} must hold lines such as 'max-model-len: 8k', got a "
            f"{type(settings).__name__}."
        )
    return {str(key): value for key, value in settings.items() if value is not None}
