"""The models a server may serve: what each is called, and how it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath

from ingle import ConfigError, EngineConfig
from ingle_server.config import ServerConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelEntry:
    """One model.

    Attributes:
        names: What clients call it; the first one is listed first.
        config: How it is loaded.
        hidden_names: Understood, but not shown: a folder's whole path.
    """

    names: tuple[str, ...]
    config: EngineConfig
    hidden_names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name it is listed under first."""
        return self.names[0]

    @cached_property
    def num_bytes(self) -> int:
        """Size of its folder's weight files; 0 for a hub id."""
        folder = Path(self.config.model).expanduser()
        if not folder.is_dir():
            return 0
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def accepts(self, name: str) -> bool:
        """Whether ``name`` means this model."""
        return name in self.names or name in self.hidden_names


def find_models(engine: EngineConfig, server: ServerConfig) -> list[ModelEntry]:
    """Every model of the command line, the one to load first in front.

    Raises:
        ConfigError: ``--model-dir`` holds none, or two have the same name.
    """
    models = [*([engine.model] if engine.model else []), *server.more_models]
    found = _models_in(server.model_dir) if server.model_dir else []
    if server.model_dir and not models and not found:
        raise ConfigError(f"--model-dir {server.model_dir} holds no folder with a config.json.")
    entries = [entry_of(dataclasses.replace(engine, model=model), ()) for model in models]
    entries = _with_served_names(entries, server.served_model_name)
    entries += [
        ModelEntry(names=(path.stem if path.is_file() else path.name,), config=config)
        for path in found
        for config in [dataclasses.replace(engine, model=str(path))]
    ]
    _check_unique(entries)
    return entries


def entry_of(config: EngineConfig, names: tuple[str, ...]) -> ModelEntry:
    """One model under ``names``, or under its own name without any."""
    if names:
        return ModelEntry(names=names, config=config)
    return ModelEntry(names=(own_name(config.model),), config=config, hidden_names=(config.model,))


def own_name(model: str) -> str:
    """The hub id, or a folder's last part.

    A whole folder path would tell strangers about this machine; it is understood, but not shown.
    """
    is_folder = model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model
    return (PurePath(model).name or model) if is_folder else model


def _with_served_names(entries: list[ModelEntry], names: Sequence[str]) -> list[ModelEntry]:
    """One model takes all names; several take one each."""
    if not names or not entries:
        return entries
    if len(entries) == 1:
        return [entry_of(entries[0].config, tuple(names))]
    if len(names) != len(entries):
        raise ConfigError(
            f"--served-model-name: {len(names)} names for {len(entries)} models; give one each."
        )
    return [entry_of(entry.config, (name,)) for entry, name in zip(entries, names, strict=True)]


def _models_in(folder: str) -> list[Path]:
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"--model-dir {folder} is no folder.")
    return sorted(path for path in root.iterdir() if _is_model(path))


def _is_model(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".gguf"
    return (path / "config.json").is_file() or any(path.glob("*.gguf"))


def _check_unique(entries: Sequence[ModelEntry]) -> None:
    seen: set[str] = set()
    for name in (name for entry in entries for name in entry.names):
        if name in seen:
            raise ConfigError(
                f"Two models are called {name}; give them names with --served-model-name."
            )
        seen.add(name)
