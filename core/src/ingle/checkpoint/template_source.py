"""Where a model folder keeps its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ingle.checkpoint.config_files import read_optional_object
from ingle.errors import CheckpointError, ConfigError

MAX_TEMPLATE_BYTES: Final = 1024 * 1024
MAX_PATH_CHARS: Final = 1024
DEFAULT_TEMPLATE: Final = "default"


def find_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Every chat template of the folder by name; the usual one is ``default``.

    ``chat_template.jinja`` and ``additional_chat_templates/*.jinja`` win over
    ``chat_template.json``, which wins over ``tokenizer_config.json``.

    Raises:
        CheckpointError: When one of these files cannot be used.
    """
    found = _named(folder / "tokenizer_config.json", tokenizer_config.get("chat_template"))
    old = folder / "chat_template.json"
    found |= _named(old, read_optional_object(old).get("chat_template"))
    main = folder / "chat_template.jinja"
    if main.is_file():
        found[DEFAULT_TEMPLATE] = _read(main)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read(path)
    return found


def read_template(given: str | None) -> str | None:
    """What ``--chat-template`` means: a file's text, or the template itself; None stays None.

    Raises:
        ConfigError: When it is neither.
        CheckpointError: When the file cannot be read.
    """
    if given is None:
        return None
    if "\n" not in given and len(given) < MAX_PATH_CHARS and Path(given).is_file():
        return _read(Path(given))
    if "{{" in given or "{%" in given:
        return given
    raise ConfigError(
        f"--chat-template must be a file or a Jinja template; there is no file {given[:80]!r}."
    )


def _named(path: Path, value: Any) -> dict[str, str]:
    """A template given as a string, as ``{name: template}`` or as a list of objects."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = {DEFAULT_TEMPLATE: value}
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    pairs = value.items() if isinstance(value, dict) else ()
    if not pairs or not all(isinstance(n, str) and isinstance(t, str) for n, t in pairs):
        raise CheckpointError(
            f"{path}: chat_template must be a string or a list of objects with name and template."
        )
    return dict(pairs)


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_TEMPLATE_BYTES} bytes.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
