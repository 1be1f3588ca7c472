"""Finds and loads plugins one at a time, so that one that fails takes nobody with it.

pluggy's own entry-point loader stops at the first faulty plugin, and a hook call stops at the
first exception. Here every plugin has a manager of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from typing import Any, Final

import pluggy

import ingle
from ingle.errors import ConfigError, PluginError
from ingle.plugin import API_VERSION, ENTRY_POINT_GROUP, hookspecs
from ingle.plugin.cache_folder import default_cache_folder
from ingle.plugin.hookspecs import PROJECT_NAME
from ingle.registry.plugin_registry import PluginRegistry
from ingle.registry.record import PluginRecord, spelling

BUILTIN_MODULES: Final = (
    "ingle.builtin.dense",
    "ingle.builtin.affine_cpu",
    "ingle.builtin.affine_cuda",
    "ingle.builtin.tile_cuda",
    "ingle.builtin.kv_native",
    "ingle.builtin.kv_int",
)
"""Plugins inside core, by module name: nothing else in core names them."""

REQUIRED: Final = frozenset(("dense", "kv_native"))
"""Built-ins without which nothing runs: they cannot be disabled."""

HOOK_PREFIX: Final = f"{PROJECT_NAME}_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plugin that was found but not imported yet."""

    record: PluginRecord
    load: Callable[[], Any]


def load_plugins(
    disabled: Sequence[str] = (), strict: bool = False, *, cache_folder: Path | None = None
) -> PluginRegistry:
    """Every plugin that is built in or installed, loaded, with a report of what failed.

    Args:
        disabled: Entry-point or distribution names not to load (``--disable-plugin``).
        strict: Raise when any plugin fails (``--strict-plugins``).
        cache_folder: Where self-check results are kept; None takes ``default_cache_folder()``.

    Raises:
        ConfigError: When ``disabled`` names a part of core that cannot be left out.
        PluginError: In strict mode, naming every plugin that failed.
    """
    candidates = [*builtin_candidates(), *installed_candidates()]
    notes = mark_disabled([candidate.record for candidate in candidates], disabled)
    for candidate in candidates:
        candidate.record.strict = strict
        if not (candidate.record.disabled or candidate.record.failures):
            load_one(candidate)
    registry = PluginRegistry(
        [candidate.record for candidate in candidates],
        strict=strict,
        cache_folder=cache_folder or default_cache_folder(),
        notes=notes,
    )
    registry.weight_formats()
    return registry


def builtin_candidates() -> Iterator[Candidate]:
    """The plugins inside core."""
    for module in BUILTIN_MODULES:
        record = PluginRecord(
            name=module.rpartition(".")[2],
            module=module,
            distribution="ingle",
            version=ingle.__version__,
            builtin=True,
        )
        yield Candidate(record=record, load=partial(import_module, module))


def installed_candidates() -> list[Candidate]:
    """The plugins of all installed distributions, by entry-point name.

    Distributions are read one at a time because one with broken metadata would otherwise hide
    all others. The first of a name on ``sys.path`` counts, as for an import.
    """
    found: list[Candidate] = []
    seen: set[str] = set()
    for distribution in distributions():
        record = PluginRecord(name="?", module="?", distribution="?", version="?")
        candidates = record.attempt("discover", partial(read_candidates, distribution, seen))
        if candidates is None:
            record.name = record.distribution = distribution_name(distribution)
            candidates = [Candidate(record=record, load=str)]
        found.extend(candidates)
    return sorted(found, key=lambda candidate: candidate.record.name)


def read_candidates(distribution: Distribution, seen: set[str]) -> list[Candidate]:
    """The plugins one distribution declares. ``seen`` gains its name when it declares any."""
    if ENTRY_POINT_GROUP not in (distribution.read_text("entry_points.txt") or ""):
        return []
    entry_points = [e for e in distribution.entry_points if e.group == ENTRY_POINT_GROUP]
    name = str(distribution.metadata["Name"])
    if spelling(name) in seen:
        return []
    seen.add(spelling(name))
    return [entry_point_candidate(e, name, distribution.version) for e in entry_points]


def distribution_name(distribution: Distribution) -> str:
    """The name of a distribution whose entry points could not be read, or a question mark."""
    record = PluginRecord(name="?", module="?", distribution="?", version="?")
    return record.attempt("discover", lambda: str(distribution.metadata["Name"])) or "?"


def entry_point_candidate(entry_point: EntryPoint, name: str, version: str) -> Candidate:
    """One entry point of the distribution ``name``."""
    record = PluginRecord(
        name=entry_point.name, module=entry_point.value, distribution=name, version=version
    )
    return Candidate(record=record, load=entry_point.load)


def mark_disabled(records: Sequence[PluginRecord], disabled: Sequence[str]) -> tuple[str, ...]:
    """Marks what ``--disable-plugin`` names; returns a note for every name that hit nothing.

    Raises:
        ConfigError: When a name hits a part of core that cannot be left out.
    """
    notes = []
    for name in disabled:
        wanted = spelling(name)
        hit = [r for r in records if wanted in (spelling(r.name), spelling(r.distribution))]
        for record in hit:
            if record.builtin and record.name in REQUIRED:
                raise ConfigError(
                    f"--disable-plugin {name}: {record.name} is the part of core that every model "
                    "needs; it cannot be disabled."
                )
            record.disabled = True
        if not hit:
            notes.append(f"--disable-plugin {name}: no plugin or package of that name is installed")
    return tuple(notes)


def load_one(candidate: Candidate) -> None:
    """Takes one plugin through import, API version and register; a failure ends it there."""
    record = candidate.record
    plugin = record.attempt("import", candidate.load)
    if plugin is None:
        return
    record.source = str(getattr(plugin, "__file__", None) or "")
    if record.attempt("api_version", lambda: check_api_version(plugin)):
        record.hooks = record.attempt("register", lambda: register(plugin, record.name))


def check_api_version(plugin: Any) -> bool:
    """True when the plugin was written for a contract this core keeps.

    Raises:
        PluginError: When it states none, or one of another major or a newer minor version.
    """
    stated = getattr(plugin, "INGLE_PLUGIN_API", None)
    match stated:
        case (int(major), int(minor)):
            pass
        case _:
            raise PluginError(
                f"INGLE_PLUGIN_API must be a pair of integers such as {API_VERSION}, got {stated!r}"
            )
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        raise PluginError(
            f"it is written for plugin API {major}.{minor}, ingle {ingle.__version__} has "
            f"{API_VERSION[0]}.{API_VERSION[1]}: "
            f"update {'ingle' if (major, minor) > API_VERSION else 'the plugin'}"
        )
    return True


def register(plugin: Any, name: str) -> pluggy.PluginManager:
    """A manager that holds this plugin alone.

    Raises:
        PluginError: When a hook is misspelt, unmarked or absent.
        pluggy.PluginValidationError: When a hook takes an argument that the contract lacks.
    """
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name)
    known = ", ".join(sorted(hook_names()))
    implemented = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    unknown = sorted(implemented - hook_names())
    if unknown:
        raise PluginError(f"there is no hook {', '.join(unknown)}; hooks: {known}")
    unmarked = sorted(set(unmarked_hooks(plugin)) - implemented)
    if unmarked:
        raise PluginError(f"{', '.join(unmarked)} lacks @hookimpl, so it would never be called")
    if not implemented:
        raise PluginError(f"it implements no hook; hooks: {known}")
    manager.check_pending()
    return manager


def hook_names() -> set[str]:
    """The hooks of the contract."""
    mark = f"{PROJECT_NAME}_spec"
    return {name for name, value in vars(hookspecs).items() if hasattr(value, mark)}


def unmarked_hooks(plugin: Any) -> Iterator[str]:
    """Functions that a plugin defines under the hooks' prefix, marked as hooks or not."""
    for name, value in vars(plugin).items():
        if name.startswith(HOOK_PREFIX) and callable(value):
            yield name
