"""What every plugin must be, whatever it offers: cheap, versioned, and spelled right."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from ingle.plugin import DeviceInfo, KVCacheFormat, MatmulKernel, WeightFormat
from ingle.registry.loader import check_api_version, register
from ingle.registry.plugin_registry import call_hook
from ingle.registry.record import PluginRecord

MIN_REASON = 10


class PluginConformance:
    """Tests of a plugin's module. The other classes of the kit inherit them.

    Attributes:
        plugin_module: The module the entry point names: ``"ingle_quant_awq.plugin"``.
        device: What the hooks are asked about.
        silenced: Inherited tests that a subclass sets to None: name -> why. A test set to None
            without a reason here makes ``test_no_inherited_test_is_silenced_without_a_reason``
            fail.
    """

    plugin_module: ClassVar[str]
    device: ClassVar[DeviceInfo] = DeviceInfo(type="cpu", total_memory=2**33, name="conformance")
    silenced: ClassVar[Mapping[str, str]] = {}

    def test_importing_the_plugin_loads_neither_torch_nor_triton(self) -> None:
        code = (
            f"import sys, {self.plugin_module}; "
            "print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
        )
        path = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=path, check=False
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == "[]", "import heavy packages inside functions"

    def test_the_plugin_states_an_api_version_that_core_keeps(self) -> None:
        assert check_api_version(import_module(self.plugin_module))

    def test_every_hook_is_spelled_marked_and_typed_right(self) -> None:
        record = self.record()
        for hook, kind, device in (
            ("ingle_weight_formats", WeightFormat, None),
            ("ingle_matmul_kernels", MatmulKernel, self.device),
            ("ingle_kv_cache_formats", KVCacheFormat, self.device),
        ):
            names = [item.name for item in call_hook(record, hook, kind, device)]
            assert len(set(names)) == len(names), f"{hook} gives a name twice: {names}"

    def test_no_inherited_test_is_silenced_without_a_reason(self) -> None:
        for name in inherited_tests(type(self)):
            if not callable(getattr(type(self), name)):
                reason = self.silenced.get(name, "")
                assert len(reason) >= MIN_REASON, f"{name} is silenced: say why in `silenced`"
        for name in self.silenced:
            assert name in inherited_tests(type(self)), f"silenced names no inherited test: {name}"

    def record(self) -> PluginRecord:
        """The plugin, registered alone."""
        name = self.plugin_module
        record = PluginRecord(name=name, module=name, distribution="?", version="?")
        record.hooks = register(import_module(name), name)
        return record

    def offered(self, hook: str, kind: type) -> list[Any]:
        """What the plugin's hook gives for ``device``."""
        device = None if hook == "ingle_weight_formats" else self.device
        return call_hook(self.record(), hook, kind, device)


def inherited_tests(cls: type) -> set[str]:
    """Names of all tests that ``cls`` has from the kit."""
    kit = [base for base in inspect.getmro(cls) if base.__module__.startswith("ingle.testing")]
    return {name for base in kit for name in vars(base) if name.startswith("test_")}
