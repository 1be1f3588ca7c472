"""``make demo FORMAT=...``: the quant is made once, kept, and finished when it was cut off."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ingle.demo_model.locate import LAYOUT_VERSION
from ingle.quantize import quantize

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def demo(
    tiny_llama: Path, installed_formats: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    """``tools/demo.py`` with a tiny model in place of the demo model, and a cache of its own."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(installed_formats))
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path / "cache"))
    module = importlib.import_module("demo")
    monkeypatch.setattr(module, "default_demo_model", lambda *_: tiny_llama)
    return module


def test_a_quant_of_the_demo_is_made_once_and_kept(
    demo: ModuleType,
    calibration_text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    made: list[str] = []

    def counted(model: str, out: Path, **options: Any) -> Any:
        made.append(options["format"])
        given = {"calibration": calibration_text, "calibration_rows": 8, "calibration_length": 32}
        sized = {"group_size": 32} if "group_size" in options else {"bpw": 4.6}
        return quantize(model, out, **{**options, **given, **sized, "measure_kl": False})

    monkeypatch.setattr(demo, "quantize", counted)
    for form in ("awq", "gptq", "exl2"):
        folder = demo._quant(form)
        assert folder == tmp_path / "cache" / "quants" / f"demo-{LAYOUT_VERSION}-{form}"
        config = json.loads((folder / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == form
        assert demo._quant(form) == folder
    assert made == ["awq", "gptq", "exl2"]


def test_a_quant_cut_off_while_its_card_was_measured_is_finished(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "cache" / "quants" / f"demo-{LAYOUT_VERSION}-gptq"
    (out / ".quantize").mkdir(parents=True)
    (out / "config.json").write_text("{}")
    finished: list[Path] = []
    monkeypatch.setattr(demo, "quantize", lambda _, folder, **__: finished.append(folder))
    assert demo._quant("gptq") == out
    assert finished == [out]
