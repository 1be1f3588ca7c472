"""``ingle plugins``: what is installed, what it offers, and what failed where."""

from __future__ import annotations

import json as json_module
from typing import Annotated

from cyclopts import Parameter


def plugins(
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    strict_plugins: Annotated[bool, Parameter(negative=())] = False,
    disable_plugin: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
) -> None:
    """Show every plugin: what it offers, or the stage at which it failed and why.

    Args:
        json: Print JSON instead of a table, tracebacks included.
        strict_plugins: End with an error when any plugin failed.
        disable_plugin: Plugins not to load, by distribution or entry-point name.
    """
    from ingle.engine.device import choose_device
    from ingle.registry.loader import load_plugins

    registry = load_plugins(disable_plugin, strict_plugins)
    device = choose_device("auto")
    registry.matmul_kernels(device)
    registry.kv_cache_formats(device)
    report = registry.report
    if json:
        print(json_module.dumps(report.to_dict(tracebacks=True), indent=2))
    else:
        print(report.format_table())
