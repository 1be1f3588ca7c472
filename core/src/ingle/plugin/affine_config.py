"""What a checkpoint says about its own integer quantisation, whichever file says it.

The words differ from writer to writer (``bits``, ``w_bit``, ``wbits``) and so do the files. A
format believes none of it against the tensors: it decides only what shapes leave open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ingle.errors import CheckpointError
from ingle.plugin.checkpoint import CheckpointInfo

T = TypeVar("T")

_FILES = ("quantize_config.json", "quant_config.json")
_TEXT_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")
"""What a text model's names start with, from one version of its library to the next."""
_TEXT_NAME = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?((?:layers\.|lm_head$).*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOptions:
    """What the config says about one module; None where it says nothing usable."""

    bits: int | None
    group_size: int | None
    symmetric: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineConfig:
    """The quantisation config of one checkpoint; every key is optional.

    Attributes:
        files: The JSON objects found, the most trusted first: what one leaves out, the next may
            say.
        source: The file the first came from, for messages; empty when there is none.
        defaults: What they say about modules that no override names.
    """

    files: tuple[Mapping[str, Any], ...]
    source: str
    defaults: ModuleOptions = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "defaults", _options(self.files))

    @classmethod
    def find(cls, info: CheckpointInfo) -> AffineConfig:
        """From ``config.json``, then ``quantize_config.json``, then ``quant_config.json``."""
        found = {"config.json": info.quantization_config or {}}
        found |= {name: info.config_files.get(name) or {} for name in _FILES}
        stated = {name: values for name, values in found.items() if values}
        return cls(files=tuple(stated.values()), source=next(iter(stated), ""))

    @property
    def values(self) -> Mapping[str, Any]:
        """Every key, as the most trusted file says it."""
        return {key: value for values in reversed(self.files) for key, value in values.items()}

    def _stated(self, key: str) -> object:
        """``key`` as the most trusted file says it; None where none does."""
        return next((values[key] for values in self.files if key in values), None)

    def text(self, *keys: str) -> str | None:
        """The first of ``keys`` that holds a string, in lower case."""
        for values in self.files:
            for key in keys:
                value = values.get(key)
                if isinstance(value, str) and value:
                    return value.lower()
        return None

    @property
    def method(self) -> str | None:
        """The quantisation method it names, in lower case; None where old files leave it out."""
        return self.text("quant_method", "method")

    @property
    def layout(self) -> str | None:
        """The storage layout it names, in lower case."""
        return self.text("packing_format", "checkpoint_format", "format", "version")

    def module(self, name: str) -> ModuleOptions:
        """What it says about the module with checkpoint name ``name``, overrides applied."""
        override = self._dynamic(name) or self._extra_config(name)
        return _options((override, *self.files)) if override else self.defaults

    def _dynamic(self, name: str) -> Mapping[str, Any]:
        """GPTQModel's ``dynamic``: patterns matched at the start of the name, first match wins.

        Negative patterns (``-:``) mean "not quantised", which the tensors already say.
        """
        rules = _mapping(self._stated("dynamic"))
        for spelling in _spellings(name) if rules else ():
            for pattern, override in rules.items():
                expression = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
                if self._compile(expression).match(spelling):
                    return {} if pattern.startswith("-:") else _mapping(override)
        return {}

    def _extra_config(self, name: str) -> Mapping[str, Any]:
        """AutoRound's ``extra_config``: the exact name, else a suffix, else a pattern."""
        extra = _mapping(self._stated("extra_config"))
        for spelling in _spellings(name) if extra else ():
            key = self._extra_key(extra, spelling)
            if key is not None:
                return _mapping(extra[key])
        return {}

    def _extra_key(self, extra: Mapping[str, Any], name: str) -> str | None:
        if name in extra:
            return name
        suffixes = (key for key in extra if name.endswith(key))
        patterns = (key for key in extra if self._compile(key).search(name))
        return next(suffixes, None) or next(patterns, None)

    def _compile(self, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{self.source}: {pattern!r} is not a regular expression ({error}); correct it"
            ) from error


def _options(files: tuple[Mapping[str, Any], ...]) -> ModuleOptions:
    return ModuleOptions(
        bits=_first(files, lambda v: _integer(v, "bits", "w_bit", "wbits")),
        group_size=_first(files, lambda v: _integer(v, "group_size", "q_group_size", "groupsize")),
        symmetric=_first(files, _symmetric),
    )


def _spellings(name: str) -> Iterator[str]:
    """``name``, then a text model's module as other versions of its library name it: a config
    keeps the names of the day it was written, the tensors may have been renamed since."""
    yield name
    found = _TEXT_NAME.match(name)
    if found:
        yield from (f"{prefix}{found[1]}" for prefix in _TEXT_PREFIXES)


def _first(
    files: tuple[Mapping[str, Any], ...], read: Callable[[Mapping[str, Any]], T | None]
) -> T | None:
    """What the first of ``files`` that says anything says."""
    return next((value for values in files if (value := read(values)) is not None), None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _integer(values: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _symmetric(values: Mapping[str, Any]) -> bool | None:
    """``sym``, else the opposite of ``zero_point``, else unknown (old files)."""
    if isinstance(values.get("sym"), bool):
        return bool(values["sym"])
    if isinstance(values.get("zero_point"), bool):
        return not values["zero_point"]
    return None
