"""``ingle plugins``: what is installed, what it offers, what failed where, and whether one keeps
the contract."""

from __future__ import annotations

import json as json_module
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from ingle.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from ingle.registry.plugin_registry import PluginRegistry


def plugins(
    action: Literal["check"] | None = None,
    name: str | None = None,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    strict_plugins: Annotated[bool, Parameter(negative=())] = False,
    disable_plugin: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
) -> int:
    """Show every plugin: what it offers, or the stage at which it failed and why.

    `ingle plugins check NAME` runs the conformance kit on one of them.

    Args:
        action: `check`, or nothing to show the table.
        name: The plugin to check, by distribution or entry-point name.
        json: Print JSON instead of a table, tracebacks included.
        strict_plugins: End with an error when any plugin failed.
        disable_plugin: Plugins not to load, by distribution or entry-point name.
    """
    from ingle.engine.device import choose_device
    from ingle.registry.loader import load_plugins

    registry = load_plugins(disable_plugin, strict_plugins)
    if action == "check":
        return _check(registry, name)
    device = choose_device("auto")
    registry.matmul_kernels(device)
    registry.kv_cache_formats(device)
    report = registry.report
    if json:
        print(json_module.dumps(report.to_dict(tracebacks=True), indent=2))
    else:
        print(report.format_table())
    return 0


def _check(registry: PluginRegistry, name: str | None) -> int:
    """0 when the plugin passes every test of the kit, else 1."""
    if name is None:
        raise ConfigError(
            "ingle plugins check needs the name of a plugin: ingle plugins lists them."
        )
    found = [r for r in registry.records if name in (r.name, r.distribution) and not r.disabled]
    if not found:
        known = ", ".join(sorted(record.name for record in registry.records))
        raise PluginError(f"There is no plugin {name!r}. Installed: {known}.")
    if found[0].failures:
        raise PluginError(f"plugin {found[0].label} failed at {found[0].report().reason}")
    if find_spec("pytest") is None:
        raise PluginError("ingle plugins check runs the kit with pytest: pip install pytest")
    # The kit is no part of the command line: it is loaded only here, and by tests.
    check = import_module("ingle.testing.check")
    return 0 if check.check_plugin(registry, found[0]) == 0 else 1
