"""Two formats that core has never heard of, as packages of a stranger's: found by entry point,
held to the conformance kit, and read by ``ingle dequantize``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ingle.testing import WeightFormatConformance, WeightSample, memory_checkpoint

FOLDER = Path(__file__).parent / "stranger"
sys.path.insert(0, str(FOLDER))
NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 64}}},
}


def stream(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    """Nibbles [R, n] as int32 words [R, n / 8], first lowest."""
    places = codes.reshape(len(codes), -1, 8).astype(np.uint32) << (4 * np.arange(8))
    return torch.from_numpy(places.sum(-1).astype(np.uint32).view(np.int32).copy())


def ct_linear(name: str, symmetric: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rng = np.random.default_rng(len(name) + symmetric)
    n, k, groups = 64, 256, 4
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, groups))
    zeros = np.full_like(zeros, 8) if symmetric else zeros
    scales = torch.rand(n, groups).bfloat16()
    steps = torch.from_numpy(codes - zeros.repeat(64, 1)).float()
    tensors = {
        "weight_packed": stream(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = stream(zeros.T).T.contiguous()
    named = {f"{name}.{role}": tensor for role, tensor in tensors.items()}
    return named, steps * scales.float().repeat_interleave(64, 1)


def nf4_linear(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    from ingle_quant_nf4_format import CODEBOOK

    codes = torch.randint(0, 16, (64, 128))
    absmax = torch.rand(64, 2).half()
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    wanted = torch.tensor([[CODEBOOK[code] for code in row] for row in codes.tolist()])
    named = {f"{name}.nf4_codes": packed, f"{name}.nf4_absmax": absmax}
    return named, wanted * absmax.float().repeat_interleave(64, 1)


class TestCompressedTensors(WeightFormatConformance):
    plugin_module: ClassVar[str] = "ingle_quant_ct"
    format_name: ClassVar[str] = "compressed-tensors"
    reads: ClassVar[frozenset[str]] = frozenset({"compressed-tensors"})

    def samples(self) -> Sequence[WeightSample]:
        found = []
        for symmetric in (True, False):
            parts = {name: ct_linear(name, symmetric) for name in NAMES}
            tensors = {n: t for named, _ in parts.values() for n, t in named.items()}
            checkpoint = memory_checkpoint(tensors, quantization_config=CT)
            expected = {name: weight for name, (_, weight) in parts.items()}
            found.append(WeightSample(checkpoint=checkpoint, expected=expected, fuse=NAMES))
        return found


class TestNf4Blocks(WeightFormatConformance):
    plugin_module: ClassVar[str] = "ingle_quant_nf4"
    format_name: ClassVar[str] = "nf4-blocks"
    reads: ClassVar[frozenset[str]] = frozenset()

    def samples(self) -> Sequence[WeightSample]:
        tensors, weight = nf4_linear(NAMES[0])
        return [WeightSample(checkpoint=memory_checkpoint(tensors), expected={NAMES[0]: weight})]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both count as installed packages."""
    for name in ("ct", "nf4"):
        info = tmp_path / f"ingle_quant_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: ingle-quant-{name}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[ingle.plugins]\n{name} = ingle_quant_{name}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", ["ct", "nf4"])
def test_a_strangers_checkpoint_is_dequantised(kind: str, dequantize: Any) -> None:
    tensors, weight = ct_linear("a", False) if kind == "ct" else nf4_linear("a")
    config = {"quantization_config": CT} if kind == "ct" else {}
    found = dequantize(tensors, {"config.json": config}, "--dtype", "float32")
    assert json.dumps(sorted(found)) == '["a.weight"]'
    assert torch.equal(found["a.weight"], weight)
