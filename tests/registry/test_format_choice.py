"""Formats: detected or asked for, with an error that says what to do."""

from __future__ import annotations

import pytest
import torch

from ingle.errors import ConfigError, PluginError
from ingle.registry.choose import choose_kv_cache_formats, choose_weight_format, parse_sides
from ingle.testing import memory_checkpoint
from ingle.testing.foreign import FOREIGN_CHECKPOINTS

DENSE = FOREIGN_CHECKPOINTS["dense"]


def packed(quant_method: str | None = "good", **files):
    config = None if quant_method is None else {"quant_method": quant_method, "bits": 4}
    tensors = {"model.layers.0.mlp.up_proj.goodies": torch.zeros(4, 4, dtype=torch.int32)}
    return memory_checkpoint(tensors, quantization_config=config, config_files=files).info


def test_an_unquantised_checkpoint_is_dense(site) -> None:
    chosen = choose_weight_format(site.load(), DENSE, "auto")
    assert (chosen.format.name, chosen.plugin, chosen.distribution) == ("dense", "dense", "ingle")
    assert chosen.reason


@pytest.mark.parametrize("alias", ["dense", "none", "Unquantized"])
def test_dense_goes_by_its_aliases(site, alias) -> None:
    assert choose_weight_format(site.load(), DENSE, alias).format.name == "dense"


@pytest.mark.parametrize("requested", ["auto", "good", "good_marlin", "GOOD-Marlin"])
def test_a_plugins_checkpoint_is_read_by_the_plugin(site, requested) -> None:
    site.install("good")
    chosen = choose_weight_format(site.load(), packed(), requested)
    assert (chosen.format.name, chosen.distribution) == ("good", "ingle-quant-good")
    assert (chosen.version, chosen.reason) == ("1.2", "it says good")


@pytest.mark.parametrize("kind", sorted(set(FOREIGN_CHECKPOINTS) - {"dense"}))
def test_dense_claims_no_packed_checkpoint(site, kind) -> None:
    dense = next(o.item for o in site.load().weight_formats() if o.item.name == "dense")
    assert dense.detect(FOREIGN_CHECKPOINTS[kind]) is None


def test_a_checkpoint_nobody_reads_names_the_package_to_install(site) -> None:
    with pytest.raises(PluginError, match=r"(?m)^pip install ingle-quant-very-new$") as caught:
        choose_weight_format(site.load(), packed("Very_New"), "auto")
    assert "quant_method 'Very_New'" in str(caught.value)


def test_a_sidecar_file_names_the_method_too(site) -> None:
    info = packed(None, **{"quantize_config.json": {"quant_method": "new"}})
    with pytest.raises(PluginError, match="pip install ingle-quant-new"):
        choose_weight_format(site.load(), info, "auto")


def test_an_unnamed_packed_checkpoint_is_described_by_its_tensors(site) -> None:
    with pytest.raises(PluginError, match="whose tensors are 1 goodies"):
        choose_weight_format(site.load(), packed(None), "auto")


def test_a_method_name_that_is_no_package_name_is_not_pasted_into_a_command(site) -> None:
    with pytest.raises(PluginError) as caught:
        choose_weight_format(site.load(), packed("x; rm -rf ~"), "auto")
    assert "pip install" not in str(caught.value)


def test_a_tie_names_both_and_the_way_out(site) -> None:
    site.install("good", "rival")
    with pytest.raises(PluginError) as caught:
        choose_weight_format(site.load(), packed(), "auto")
    message = str(caught.value)
    assert "good of good (ingle-quant-good 1.2)" in message
    assert "rival of rival (ingle-quant-rival 1.2)" in message
    assert "--quantization" in message


def test_an_alias_that_two_plugins_offer_is_an_error_naming_both(site) -> None:
    site.install("good", "rival")
    with pytest.raises(PluginError, match=r"good \(.*\) and rival \(.*\) both offer it"):
        choose_weight_format(site.load(), packed(), "good_marlin")


def test_naming_one_settles_a_tie(site) -> None:
    site.install("good", "rival")
    assert choose_weight_format(site.load(), packed(), "good").format.name == "good"


def test_a_format_that_cannot_read_it_says_what_the_checkpoint_is(site) -> None:
    site.install("good")
    with pytest.raises(PluginError, match=r"dense cannot read .* quant_method 'good'") as caught:
        choose_weight_format(site.load(), packed(), "dense")
    assert "--quantization good reads it" in str(caught.value)


def test_an_unknown_format_lists_what_there_is(site) -> None:
    site.install("good")
    with pytest.raises(PluginError, match=r"Offered: .*dense.* good") as caught:
        choose_weight_format(site.load(), DENSE, "nonsense")
    assert "pip install ingle-quant-nonsense" in str(caught.value)


@pytest.mark.parametrize("requested", ["import_error", "import-error", "ingle-quant-import-error"])
def test_asking_for_a_plugin_that_failed_shows_its_own_traceback(site, requested) -> None:
    site.install("import_error")
    with pytest.raises(PluginError, match="failed at import") as caught:
        choose_weight_format(site.load(), DENSE, requested)
    assert "ingle_test_import_error.py" in str(caught.value)


def test_a_checkpoint_of_a_plugin_that_failed_shows_its_traceback(site) -> None:
    site.install("import_error")
    with pytest.raises(PluginError, match="ModuleNotFoundError"):
        choose_weight_format(site.load(), packed("import_error"), "auto")


def test_a_disabled_plugin_that_would_read_it_is_named(site) -> None:
    site.install("good")
    with pytest.raises(PluginError, match="ingle-quant-good is installed but disabled") as caught:
        choose_weight_format(site.load("good"), packed(), "auto")
    assert "pip install" not in str(caught.value)


def test_a_detect_that_raises_claims_nothing_and_stops_nobody(site, reported) -> None:
    site.install("good", "raising_detect")
    registry = site.load()
    assert choose_weight_format(registry, packed(), "auto").format.name == "good"
    assert "supports: blind.detect: TypeError" in reported(registry, "raising_detect").reason


def test_asking_for_a_format_whose_detect_raises_shows_its_traceback(site) -> None:
    site.install("raising_detect")
    with pytest.raises(PluginError, match="cannot read this config"):
        choose_weight_format(site.load(), DENSE, "blind")


@pytest.mark.parametrize("requested", ["auto", "bfloat16", "native", "k=auto", "k=fp16,v=bf16"])
def test_the_native_cache_goes_by_its_names(site, cpu, requested) -> None:
    k, v = choose_kv_cache_formats(site.load(), requested, DENSE, cpu)
    assert k.name == v.name == "auto"


def test_keys_and_values_may_differ(site, cpu) -> None:
    site.install("good")
    k, v = choose_kv_cache_formats(site.load(), "k=gc, v=auto", DENSE, cpu)
    assert (k.name, v.name) == ("good_cache", "auto")


def test_one_object_serves_both_sides(site, cpu) -> None:
    site.install("good")
    k, v = choose_kv_cache_formats(site.load(), "good_cache", DENSE, cpu)
    assert k is v


@pytest.mark.parametrize("requested", ["q=auto", "k=", "k=auto,k=auto", "auto,k=auto", "=auto"])
def test_a_cache_option_that_makes_no_sense_is_refused(requested) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype must be a name or k=NAME,v=NAME"):
        parse_sides(requested)


def test_an_unknown_cache_lists_what_there_is(site, cpu) -> None:
    with pytest.raises(PluginError, match=r"--kv-cache-dtype fp7: .*Offered: .*auto"):
        choose_kv_cache_formats(site.load(), "fp7", DENSE, cpu)
