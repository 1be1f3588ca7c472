"""Everything the loaded plugins offer, each with the plugin that gave it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ingle.errors import PluginError
from ingle.plugin import DeviceInfo, KVCacheFormat, MatmulKernel, WeightFormat
from ingle.registry.record import Offer, PluginRecord, spelling
from ingle.registry.report import PluginReport, RegistryReport
from ingle.registry.self_check_cache import SelfCheckCache


class PluginRegistry:
    """The loaded plugins. Hooks are called once (once per device); answers are kept.

    Attributes:
        records: Every plugin found, failed and disabled ones included.
        self_checks: What is known about kernels from earlier starts.
    """

    def __init__(
        self,
        records: Sequence[PluginRecord],
        *,
        strict: bool = False,
        cache_folder: Path | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.records = tuple(records)
        self.self_checks = SelfCheckCache(cache_folder and cache_folder / "self_check.json")
        self._strict = strict
        self._notes = tuple(notes)
        self._collected: dict[tuple[str, DeviceInfo | None], list[Any]] = {}

    @property
    def report(self) -> RegistryReport:
        """What became of every plugin so far."""
        plugins = tuple(record.report() for record in self.records)
        return RegistryReport(plugins=plugins, notes=self._notes)

    def weight_formats(self) -> list[Offer[WeightFormat]]:
        """Every weight format.

        Raises:
            PluginError: In strict mode, when any plugin has failed.
        """
        return self._collect("ingle_weight_formats", WeightFormat, None)

    def matmul_kernels(self, device: DeviceInfo) -> list[Offer[MatmulKernel]]:
        """Every kernel for ``device``, highest priority first; a name is taken only once.

        Raises:
            PluginError: In strict mode, when any plugin has failed.
        """
        offers = self._collect("ingle_matmul_kernels", MatmulKernel, device)
        return sorted(offers, key=lambda o: (-o.item.priority, o.record.builtin, o.item.name))

    def kv_cache_formats(self, device: DeviceInfo) -> list[Offer[KVCacheFormat]]:
        """Every cache format for ``device``.

        Raises:
            PluginError: In strict mode, when any plugin has failed.
        """
        return self._collect("ingle_kv_cache_formats", KVCacheFormat, device)

    def _collect(self, hook: str, kind: type, device: DeviceInfo | None) -> list[Offer[Any]]:
        key = (hook, device)
        if key not in self._collected:
            self._collected[key] = self._call_all(hook, kind, device)
            self.raise_if_strict()
        return list(self._collected[key])

    def _call_all(self, hook: str, kind: type, device: DeviceInfo | None) -> list[Offer[Any]]:
        offers: list[Offer[Any]] = []
        for record in self.records:
            if record.hooks is None:
                continue
            call = partial(call_hook, record, hook, kind, device)
            for item in record.attempt("collect", call, item=hook) or ():
                if kind is MatmulKernel and not claim_name(record, item.name, offers):
                    continue
                getattr(record, hook.removeprefix("ingle_"))[item.name] = None
                offers.append(Offer(item, record))
        return offers

    def raise_if_strict(self) -> None:
        """Raises ``PluginError`` naming every failed plugin, when plugins are strict."""
        if self._strict and self.report.failed:
            raise PluginError(
                "--strict-plugins: "
                + "; ".join(f"{p.name} ({p.distribution}) {p.reason}" for p in self.report.failed)
                + "."
                + "".join(f"\n\n{plugin.traceback}" for plugin in self.report.failed)
            )

    def failed_plugin(self, *names: str) -> PluginReport | None:
        """A failed plugin whose name or distribution is one of ``names``, if there is one."""
        wanted = {spelling(name) for name in names}
        for plugin in self.report.failed:
            if wanted & {spelling(plugin.name), spelling(plugin.distribution)}:
                return plugin
        return None


def claim_name(record: PluginRecord, name: str, offers: Sequence[Offer[Any]]) -> bool:
    """Whether a kernel's name is still free; a second kernel of one name is left out."""
    rival = next((offer for offer in offers if offer.item.name == name), None)
    if rival is not None:
        record.fail("collect", f"kernel name taken by {rival.record.label}", item=name)
    return rival is None


def call_hook(record: PluginRecord, hook: str, kind: type, device: DeviceInfo | None) -> list[Any]:
    """What one plugin's hook gives, checked.

    Raises:
        PluginError: When it is not a list of ``kind``, each with a name.
    """
    assert record.hooks is not None
    caller = getattr(record.hooks.hook, hook)
    items: list[Any] = []
    for answer in caller() if device is None else caller(device=device):
        if not isinstance(answer, list | tuple):
            raise PluginError(f"it must return a list, got {type(answer).__name__}")
        items.extend(answer)
    for item in items:
        if not isinstance(item, kind):
            raise PluginError(f"it must return {kind.__name__} objects, got {item!r}")
        name = getattr(item, "name", None)
        if not isinstance(name, str) or not name:
            raise PluginError(f"{type(item).__name__} has no name")
    return items
