"""Plugins that fail in every way they can: each is named, and the sound ones still serve."""

from __future__ import annotations

import pytest

from ingle.errors import ConfigError, PluginError

BROKEN = {
    "import_error": ("import", "ingle_package_that_is_not_installed"),
    "exits": ("import", "SystemExit: no licence"),
    "wrong_version": ("api_version", "plugin API 0.99"),
    "no_version": ("api_version", "got None"),
    "misspelt_hook": ("register", "there is no hook ingle_weight_format;"),
    "unmarked_hook": ("register", "ingle_weight_formats lacks @hookimpl"),
    "unknown_argument": ("register", "engine"),
    "raising_hook": ("collect", "RuntimeError: the table of formats is gone"),
    "wrong_type": ("collect", "must return WeightFormat objects, got 'a format'"),
}


@pytest.mark.parametrize(("name", "stage", "reason"), [(n, *why) for n, why in BROKEN.items()])
def test_a_broken_plugin_is_reported_with_stage_and_reason(
    site, reported, name, stage, reason
) -> None:
    site.install(name)
    plugin = reported(site.load(), name)
    assert (plugin.status, plugin.stage) == ("failed", stage)
    assert reason in plugin.reason
    assert plugin.failures[0].stage == stage
    assert plugin.distribution == f"ingle-quant-{name.replace('_', '-')}"
    assert plugin.version == "1.2"


def test_a_traceback_is_the_plugins_own(site, reported) -> None:
    site.install("import_error", "raising_hook")
    registry = site.load()
    assert "ingle_test_import_error.py" in reported(registry, "import_error").traceback
    assert "the table of formats is gone" in reported(registry, "raising_hook").traceback


def test_all_broken_together_leave_the_good_one_and_core_whole(site, reported, cpu) -> None:
    site.install("good", *BROKEN, "wrong_kernel", "raising_kernel")
    registry = site.load()
    assert {"dense", "good"} <= {offer.item.name for offer in registry.weight_formats()}
    kernels = {offer.item.name for offer in registry.matmul_kernels(cpu)}
    assert {"good_kernel", "dense_torch", "dequantize"} <= kernels
    caches = {offer.item.name for offer in registry.kv_cache_formats(cpu)}
    assert {"good_cache", "auto"} <= caches
    good = reported(registry, "good")
    assert (good.status, good.stage, good.failures) == ("ok", "collect", ())
    assert good.weight_formats == ("good",)
    assert good.matmul_kernels == ("good_kernel",)
    assert good.kv_cache_formats == ("good_cache",)
    assert {plugin.name for plugin in registry.report.failed} >= set(BROKEN)


def test_a_plugin_keeps_what_its_sound_hooks_gave(site, reported, cpu) -> None:
    site.install("raising_hook")
    registry = site.load()
    names = {offer.item.name for offer in registry.matmul_kernels(cpu)}
    assert "kernel_beside_a_raising_hook" in names
    assert reported(registry, "raising_hook").status == "failed"


def test_every_offer_remembers_the_plugin_that_gave_it(site) -> None:
    site.install("good")
    offers = {offer.item.name: offer.plugin for offer in site.load().weight_formats()}
    assert offers["good"] == "good"
    assert offers["dense"] == "dense"


def test_unreadable_metadata_of_one_package_hides_no_other(site, reported) -> None:
    site.install("good")
    site.describe("garbled", "[ingle.plugins]\nthis line is no entry point\n")
    registry = site.load()
    assert reported(registry, "good").status == "ok"
    garbled = reported(registry, "ingle-quant-garbled")
    assert (garbled.status, garbled.stage) == ("failed", "discover")


def test_a_kernel_name_is_taken_once_and_the_second_is_reported(site, reported, cpu) -> None:
    site.install("good", "rival")
    registry = site.load()
    named = [o.plugin for o in registry.matmul_kernels(cpu) if o.item.name == "good_kernel"]
    assert named == ["good"]
    assert "kernel name taken by good" in reported(registry, "rival").reason


def test_hooks_are_called_once_per_device(site, cpu) -> None:
    site.install("good")
    registry = site.load()
    first = {id(offer.item) for offer in registry.matmul_kernels(cpu)}
    assert {id(offer.item) for offer in registry.matmul_kernels(cpu)} == first


@pytest.mark.parametrize("spelled", ["good", "ingle-quant-good", "Ingle_Quant.Good"])
def test_a_disabled_plugin_is_not_imported(site, reported, spelled) -> None:
    site.install("good", "exits")
    registry = site.load(spelled, "exits")
    for name in ("good", "exits"):
        plugin = reported(registry, name)
        assert (plugin.status, plugin.stage, plugin.gives) == ("disabled", "discover", ())
    assert "good" not in {offer.item.name for offer in registry.weight_formats()}


def test_disabling_what_is_not_there_is_noted(site) -> None:
    notes = site.load("no_such_plugin").report.notes
    assert any("no_such_plugin" in note for note in notes)


@pytest.mark.parametrize("name", ["dense", "kv_native", "ingle"])
def test_core_parts_that_everything_needs_cannot_be_disabled(site, name) -> None:
    with pytest.raises(ConfigError, match=f"--disable-plugin {name}"):
        site.load(name)


def test_strict_plugins_makes_every_failure_fatal_and_names_all(site) -> None:
    site.install("good", "import_error", "misspelt_hook", "raising_hook")
    with pytest.raises(PluginError, match="--strict-plugins") as caught:
        site.load(strict=True)
    message = str(caught.value)
    for name in ("import_error", "misspelt_hook", "raising_hook"):
        assert name in message
    assert "Traceback" in message


def test_strict_plugins_leaves_disabled_ones_alone(site) -> None:
    site.install("good", "import_error")
    registry = site.load("import_error", strict=True)
    assert registry.report.failed == ()


def test_strict_plugins_covers_hooks_that_are_called_later(site, cpu) -> None:
    site.install("good", "rival")
    registry = site.load(strict=True)
    with pytest.raises(PluginError, match="rival"):
        registry.matmul_kernels(cpu)


def test_the_table_has_a_line_for_every_plugin_and_failure(site) -> None:
    site.install("good", "misspelt_hook")
    table = site.load("nobody").report.format_table()
    assert "ingle-quant-good 1.2" in table
    assert "register: there is no hook ingle_weight_format" in table
    assert table.splitlines()[-1].startswith("note: --disable-plugin nobody")


def test_plain_data_holds_tracebacks_only_when_asked(site) -> None:
    site.install("import_error")
    report = site.load().report

    def failure(tracebacks: bool) -> dict[str, str]:
        plugins = report.to_dict(tracebacks=tracebacks)["plugins"]
        found = next(plugin for plugin in plugins if plugin["name"] == "import_error")
        return found["failures"][0]

    assert "traceback" not in failure(False)
    assert "ingle_test_import_error" in failure(True)["traceback"]
