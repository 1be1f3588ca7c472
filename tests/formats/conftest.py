"""Cases of ``tests/data/vectors/awq_gptq`` as real model folders, for the affine formats' tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingle.builtin.affine_cpu import ingle_matmul_kernels
from ingle.checkpoint.safetensors import Checkpoint, open_checkpoint
from ingle.cli import main
from ingle.plugin import (
    CheckpointInfo,
    DeviceInfo,
    KernelUse,
    LinearSpec,
    LinearWeight,
    MatmulKernel,
    Shard,
    WeightFormat,
    WeightLoader,
)

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors" / "awq_gptq"
TEST_PREFIX = "__test__."


@dataclass
class Folder:
    """A model folder opened as the engine opens one."""

    checkpoint: Checkpoint
    info: CheckpointInfo
    expected: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def open(self, weight_format: WeightFormat) -> WeightLoader:
        """Its loader, once the format claims it."""
        assert weight_format.detect(self.info) is not None
        return weight_format.open(self.info)

    def load(self, loader: WeightLoader, module: Mapping[str, Any], **changes: Any) -> Any:
        """One linear of the index, loaded for float32 on the CPU."""
        spec = {
            "name": module["prefix"],
            "in_features": module["in_features"],
            "out_features": module["out_features"],
            "dtype": torch.float32,
            "device": DeviceInfo(type="cpu"),
            "shard": Shard(),
        }
        return loader.load_linear(LinearSpec(**{**spec, **changes}), self.checkpoint)


def product_with(kernel: MatmulKernel, weight: LinearWeight, x: torch.Tensor) -> torch.Tensor:
    """The product as core computes it: scaled, gathered, multiplied, in the dtype of ``x``."""
    if weight.input_scale is not None:
        x = x * weight.input_scale.to(x.dtype)
    if weight.input_order is not None:
        x = x[:, weight.input_order]
    return kernel.matmul(x, weight)


@pytest.fixture(scope="session")
def cpu_product() -> Callable[..., torch.Tensor]:
    """``cpu_product(weight, x)``: prepares the best CPU kernel and multiplies."""
    device = DeviceInfo(type="cpu")
    kernels = sorted(ingle_matmul_kernels(device), key=lambda k: -k.priority)

    def multiply(weight: LinearWeight, x: torch.Tensor) -> torch.Tensor:
        use = KernelUse(device=device, dtype=x.dtype, rows=range(1, 1 << 30))
        kernel = next(k for k in kernels if k.supports(weight, use))
        return product_with(kernel, kernel.prepare(weight), x)

    return multiply


Import = Callable[[Path], ModuleType]
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def round_to_nearest(import_file: Import) -> ModuleType:
    """The packer beside this file."""
    return import_file(HERE / "round_to_nearest.py")


@pytest.fixture(scope="session")
def wild(import_file: Import) -> ModuleType:
    """Packers of every layout, ``wild_packers.py``."""
    return import_file(HERE / "wild_packers.py")


@pytest.fixture(scope="session")
def card(import_file: Import) -> DeviceInfo:
    """A CUDA card as plugins see it, whose tensors lie on the CPU."""
    module = import_file(HERE.parent / "kernels/interpreted_device.py")
    found: DeviceInfo = module.CARD
    return found


WriteFolder = Callable[..., Folder]


@pytest.fixture
def write_folder(tmp_path: Path) -> Iterator[WriteFolder]:
    """Writes a model folder from tensors and JSON objects, and opens it."""
    opened: list[Checkpoint] = []

    def write(
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, Any] | None = None,
    ) -> Folder:
        folder = tmp_path / f"model{len(opened)}"
        folder.mkdir()
        stored = {n: t.contiguous() for n, t in tensors.items() if not n.startswith(TEST_PREFIX)}
        save_file(stored, folder / "model.safetensors")
        hf_config = {"quantization_config": config} if config else {}
        for name, content in {"config.json": hf_config, **(files or {})}.items():
            (folder / name).write_text(json.dumps(content))
        checkpoint = open_checkpoint(folder)
        opened.append(checkpoint)
        expected = {n: t for n, t in tensors.items() if n.startswith(TEST_PREFIX)}
        return Folder(checkpoint, checkpoint.info(), expected)

    yield write
    for checkpoint in opened:
        checkpoint.close()


@pytest.fixture
def open_case(write_folder: WriteFolder) -> Callable[[Mapping[str, Any]], Folder]:
    """The model folder of one case of ``index.json``."""

    def open_one(case: Mapping[str, Any]) -> Folder:
        tensors = load_file(VECTORS / case["file"])
        return write_folder(tensors, case["config"], case["extra_files"])

    return open_one


Run = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture(scope="session")
def plugin_site(tmp_path_factory: pytest.TempPathFactory, import_file: Import) -> Path:
    """A folder that makes this checkout's plugins count as installed."""
    live_server = import_file(HERE.parent / "end_to_end/live_server.py")
    site = tmp_path_factory.mktemp("site")
    live_server.environment(site)
    return site


@pytest.fixture
def dequantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin_site: Path) -> Run:
    """Runs ``ingle dequantize`` on a folder of these tensors and JSON files; what it wrote."""
    monkeypatch.syspath_prepend(str(plugin_site))
    runs = count()

    def run(
        tensors: Mapping[str, torch.Tensor], files: Mapping[str, Any], *flags: str
    ) -> dict[str, torch.Tensor]:
        number = next(runs)
        source, out = tmp_path / f"source{number}", tmp_path / f"out{number}"
        source.mkdir()
        save_file({k: v.contiguous() for k, v in tensors.items()}, source / "model.safetensors")
        for name, content in files.items():
            (source / name).write_text(json.dumps(content))
        assert main(["dequantize", str(source), str(out), *flags]) == 0
        return load_file(out / "model.safetensors")

    return run
