"""Header-only models, and the format plugins found as installed ones are."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ingle.config import EngineConfig
from ingle.engine.cards import find_card
from ingle.engine.fit import Verdict, judge
from ingle.engine.fit_inputs import ask, planned_card
from ingle.registry.loader import load_plugins

PLUGINS = {
    "ingle-quant-awq": "awq = ingle_quant_awq.plugin",
    "ingle-quant-gptq": "gptq = ingle_quant_gptq.plugin",
    "ingle-quant-exl2": "exl2 = ingle_quant_exl2.plugin",
    "ingle-kv-fp8": "kv_fp8 = ingle_kv_fp8.plugin",
}


@pytest.fixture(scope="session")
def header_models() -> ModuleType:
    """``header_models.py``."""
    path = Path(__file__).with_name("header_models.py")
    spec = importlib.util.spec_from_file_location("header_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def header_folders(
    header_models: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Folders of Llama-3-8B in bf16, Llama-3-70B in AWQ, GPTQ and EXL2 2.4, and Qwen3-30B-A3B
    in bf16 and in AWQ."""
    m, base = header_models, tmp_path_factory.mktemp("headers")
    packed = {**m.LLAMA_3_70B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    act_order = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    ordered = {**m.LLAMA_3_70B, "quantization_config": act_order}
    kinds: dict[str, tuple[Any, ...]] = {
        "8b": (m.LLAMA_3_8B, m.dense, m.dense, "model.safetensors"),
        "70b-awq": (packed, m.awq, m.dense, "model.safetensors"),
        "70b-gptq": (ordered, m.gptq, m.dense, "model.safetensors"),
        "70b-exl2": (m.LLAMA_3_70B, m.exl2(2.4), m.exl2(6.03125), "output.safetensors"),
    }
    folders = {
        name: m.write_folder(base / name, config, m.llama_tensors(config, linear, head), file)
        for name, (config, linear, head, file) in kinds.items()
    }
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    for name, extra, linear in (("30b-moe", {}, m.dense), ("30b-moe-awq", awq, m.awq)):
        config = {**m.QWEN3_30B_A3B, **extra}
        tensors = m.qwen3_moe_tensors(config, linear, m.dense)
        folders[name] = m.write_folder(base / name, config, tensors, "model.safetensors")
    return folders


@pytest.fixture
def installed_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path that declares the format packages, as their wheels would."""
    for name, entry_point in PLUGINS.items():
        folder = tmp_path / f"{name.replace('-', '_')}-0.1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (folder / "entry_points.txt").write_text(f"[ingle.plugins]\n{entry_point}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def fit(installed_plugins: Path, header_folders: dict[str, Path]) -> Callable[..., Verdict]:
    """``fit("70b-awq", "RTX 4090", num_sequences=1, **options)``: the verdict."""

    def ask_fit(model: str, gpu: str, num_sequences: int = 1, **options: Any) -> Verdict:
        config = EngineConfig(model=model, **options)
        target = planned_card(find_card(gpu), None, False)
        return judge(ask(config, header_folders[model], load_plugins(), target, num_sequences))

    return ask_fit
