"""What became of every plugin: read by ``ingle plugins`` and ``GET /v1/plugins``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Stage = Literal[
    "discover",
    "import",
    "api_version",
    "register",
    "collect",
    "supports",
    "self_check",
    "warm_up",
]
Status = Literal["ok", "failed", "disabled"]

STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
"""In the order a plugin goes through them."""

MAX_TABLE_REASON = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFailure:
    """One thing that went wrong with one plugin.

    Attributes:
        stage: Where.
        item: The hook, format or kernel concerned; empty when it is the plugin as a whole.
        reason: One line.
        traceback: The plugin's own, as text; empty when nothing was raised.
    """

    stage: Stage
    item: str
    reason: str
    traceback: str = ""

    @property
    def line(self) -> str:
        """Stage, item and reason in one line."""
        return f"{self.stage}: {self.item + ': ' if self.item else ''}{self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginReport:
    """What became of one plugin.

    Attributes:
        name: Its entry point's name; for a built-in, the module's.
        distribution: The package it came in.
        version: That package's version.
        module: What is imported.
        builtin: Whether it is part of core.
        status: ``failed`` when anything of it failed, even if the rest of it is in use.
        stage: The last stage it reached.
        failures: Everything that went wrong, in order.
        weight_formats: Names of the formats it gave.
        matmul_kernels: Names of the kernels it gave, for all devices asked about so far.
        kv_cache_formats: Names of the cache formats it gave.
    """

    name: str
    distribution: str
    version: str
    module: str
    builtin: bool
    status: Status
    stage: Stage
    failures: tuple[PluginFailure, ...] = ()
    weight_formats: tuple[str, ...] = ()
    matmul_kernels: tuple[str, ...] = ()
    kv_cache_formats: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The first failure in one line, or an empty string."""
        return self.failures[0].line if self.failures else ""

    @property
    def traceback(self) -> str:
        """The first failure's traceback, or an empty string."""
        return self.failures[0].traceback if self.failures else ""

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of everything it gave."""
        return (*self.weight_formats, *self.matmul_kernels, *self.kv_cache_formats)

    def to_dict(self, *, tracebacks: bool = False) -> dict[str, Any]:
        """Plain data for JSON. Tracebacks show paths of this machine, so they must be asked for."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "module": self.module,
            "builtin": self.builtin,
            "status": self.status,
            "stage": self.stage,
            "reason": self.reason,
            "failures": [_failure_dict(failure, tracebacks) for failure in self.failures],
            "weight_formats": list(self.weight_formats),
            "matmul_kernels": list(self.matmul_kernels),
            "kv_cache_formats": list(self.kv_cache_formats),
        }


def _failure_dict(failure: PluginFailure, tracebacks: bool) -> dict[str, str]:
    shown = {"stage": failure.stage, "item": failure.item, "reason": failure.reason}
    return {**shown, "traceback": failure.traceback} if tracebacks else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryReport:
    """What became of all plugins.

    Attributes:
        plugins: Built-ins first, then by entry-point name.
        notes: Things worth saying that belong to no plugin.
    """

    plugins: tuple[PluginReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[PluginReport, ...]:
        """Those of which anything failed."""
        return tuple(plugin for plugin in self.plugins if plugin.status == "failed")

    def to_dict(self, *, tracebacks: bool = False) -> dict[str, Any]:
        """Plain data for JSON."""
        plugins = [plugin.to_dict(tracebacks=tracebacks) for plugin in self.plugins]
        return {"plugins": plugins, "notes": list(self.notes)}

    def format_table(self) -> str:
        """One line per plugin, one more per failure, and the notes."""
        header = ("plugin", "package", "status", "stage", "gives")
        rows = [header, *(_row(plugin) for plugin in self.plugins)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = []
        for row, plugin in zip(rows, (None, *self.plugins), strict=True):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
            lines.extend(f"    {_cut(f.line)}" for f in (plugin.failures if plugin else ()))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _row(plugin: PluginReport) -> tuple[str, str, str, str, str]:
    package = f"{plugin.distribution} {plugin.version}".strip()
    gives = ", ".join(dict.fromkeys(plugin.gives))
    return plugin.name, package, plugin.status, plugin.stage, gives


def _cut(line: str) -> str:
    return line if len(line) <= MAX_TABLE_REASON else line[: MAX_TABLE_REASON - 3] + "..."
