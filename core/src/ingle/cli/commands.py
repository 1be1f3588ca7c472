"""Finds the subcommands: core's own, and those of other packages by entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from ingle.cli.flags import Command, make_command
from ingle.errors import ConfigError, PluginError

ENTRY_POINT_GROUP: Final = "ingle.commands"

_CORE: Final = {
    "generate": "ingle.cli.generate:generate",
    "chat": "ingle.cli.chat:chat",
    "fit": "ingle.cli.fit:fit",
    "plugins": "ingle.cli.plugins:plugins",
    "dequantize": "ingle.cli.dequantize:dequantize",
    "bench": "ingle.cli.bench:bench",
    "compile": "ingle.cli.compile:compile_kernels",
    "eval": "ingle.cli.evaluate:evaluate",
    "quantize": "ingle.cli.quantize:command_for",
    "demo-model": "ingle.cli.demo_model:demo_model",
    "version": "ingle.cli.version:version",
}

_BY_ARGUMENTS: Final = ("quantize",)
"""Commands whose flags depend on what is typed: what is imported makes the command."""

_ELSEWHERE: Final = {"serve": "ingle-server"}
"""Commands that everybody expects, by the distribution that brings them."""


def find_command(name: str, argv: Sequence[str] = ()) -> Command | None:
    """The subcommand ``name``, or None when there is none.

    Only this one is imported, so a broken package cannot harm the others. ``argv`` is what
    follows it.

    Raises:
        ConfigError: For ``serve`` when ingle-server is not installed.
        PluginError: When the package that brings it cannot be imported.
    """
    if name in _CORE:
        module, _, function = _CORE[name].partition(":")
        found = getattr(import_module(module), function)
        if name in _BY_ARGUMENTS:
            made: Command = found(argv)
            return made
        return make_command(name, found)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return make_command(name, _load(entry_point))
    if name in _ELSEWHERE:
        package = _ELSEWHERE[name]
        raise ConfigError(f"{name} comes with the package {package}: pip install {package}")
    return None


def find_commands() -> list[Command]:
    """Every subcommand, ``serve`` first; one that cannot be loaded says so when it is run."""
    installed = {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    names = [*_ELSEWHERE, *sorted(installed - set(_ELSEWHERE) - set(_CORE)), *_CORE]
    return [_find_or_explain(name) for name in names]


def _find_or_explain(name: str) -> Command:
    try:
        command = find_command(name)
    except (ConfigError, PluginError) as error:
        return make_command(name, _explaining(error))
    assert command is not None
    return command


def _explaining(error: Exception) -> Callable[[], None]:
    def explain() -> None:
        raise error

    explain.__doc__ = f"Not available: {error}"
    return explain


def _load(entry_point: EntryPoint) -> Callable[..., Any]:
    package = entry_point.dist.name if entry_point.dist is not None else entry_point.module
    try:
        loaded = entry_point.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise PluginError(f"{entry_point.name} of {package} cannot be loaded: {error}") from error
    if not callable(loaded):
        raise PluginError(f"{entry_point.name} of {package} must be a function, got {loaded!r}.")
    function: Callable[..., Any] = loaded
    return function
