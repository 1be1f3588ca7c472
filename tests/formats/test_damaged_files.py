"""Packed files that are cut short, mistyped or lack a tensor: one error that names the tensor,
with a config and without, never a traceback and never weights made of other bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ingle.cli import main

NAME = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]

MAKERS: dict[str, Callable[[Any, np.random.Generator], Any]] = {
    "gptq": lambda wild, rng: wild.Gptq(bits=4, group=128).pack(rng, 256, 256),
    "awq": lambda wild, rng: wild.awq_gemm(rng, 256, 256),
    "gemv": lambda wild, rng: wild.awq_gemv(rng, 256, 256),
    "gemv_fast": lambda wild, rng: wild.awq_gemv_fast(rng, 256, 256),
    "awq marlin": lambda wild, rng: wild.marlin(
        rng, 256, 256, group=128, names=("qweight", "scales")
    ),
    "gptq marlin": lambda wild, rng: wild.marlin(rng, 256, 256, group=128, names=("B", "s")),
}


def as_type(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    damaged = tensor.clone()
    damaged[0, 1] = float("nan")
    return damaged


DAMAGE: list[tuple[str, str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    *((kind, "qweight", "empty", lambda t: t[:0]) for kind in MAKERS if kind != "gptq marlin"),
    *((kind, "scales", "nan", with_nan) for kind in MAKERS if kind != "gptq marlin"),
    *((kind, "scales", "I32", as_type(torch.int32)) for kind in MAKERS if kind != "gptq marlin"),
    *((kind, "qweight", "F16", as_type(torch.float16)) for kind in MAKERS if kind != "gptq marlin"),
    ("gptq marlin", "B", "empty", lambda t: t[:0]),
    ("gptq marlin", "B", "I64", as_type(torch.int64)),
    ("gptq marlin", "B", "a row short", lambda t: t[:-1]),
    ("gptq marlin", "s", "nan", with_nan),
    ("gptq marlin", "s", "a column short", lambda t: t[:, :-1]),
    ("awq marlin", "qweight", "a row short", lambda t: t[:-1]),
    ("gemv", "qweight", "I8", as_type(torch.int8)),
    ("gemv", "qzeros", "I64", as_type(torch.int64)),
    ("gemv_fast", "qweight", "I32", as_type(torch.int32)),
    ("gemv_fast", "qweight", "a column more", lambda t: torch.cat((t, t[:, :1]), 1)),
    ("gemv_fast", "qzeros", "nan", with_nan),
    ("gptq", "qzeros", "U32", lambda t: t.view(torch.uint32)),
    ("gptq", "g_idx", "F16", as_type(torch.float16)),
    ("gptq", "scales", "a row more", lambda t: torch.cat((t, t[:1]))),
    ("awq", "scales", "two rows more", lambda t: torch.cat((t, t, t[:1]))),
]


def refused(tensors: Tensors, config: dict[str, Any], tmp_path: Path) -> int:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({f"{NAME}.{k}": v.contiguous() for k, v in tensors.items()}, folder / "m.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return main(["dequantize", str(folder), str(tmp_path / "out")])


@pytest.fixture
def packed(wild: Any, plugin_site: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(plugin_site))
    return lambda kind: MAKERS[kind](wild, np.random.default_rng(5)).tensors


def stated(kind: str, **more: Any) -> dict[str, Any]:
    method = "gptq" if kind.startswith("gptq") else "awq"
    return {"quantization_config": {"quant_method": method, "bits": 4, **more}}


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize(("kind", "role", "what", "damage"), DAMAGE, ids=lambda v: str(v)[:12])
def test_a_damaged_tensor_is_named(
    kind: str,
    role: str,
    what: str,
    damage: Callable[[torch.Tensor], torch.Tensor],
    named: bool,
    packed: Callable[[str], Tensors],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = packed(kind)
    tensors[role] = damage(tensors[role])
    assert refused(tensors, stated(kind) if named else {}, tmp_path) == 1
    assert NAME in capsys.readouterr().err


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize(
    ("kind", "role"),
    [("gptq", "qweight"), ("gptq", "scales"), ("awq", "qweight"), ("awq", "scales")],
)
def test_a_missing_tensor_is_told_by_what_lies_beside_it(
    kind: str,
    role: str,
    named: bool,
    packed: Callable[[str], Tensors],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = packed(kind)
    del tensors[role]
    assert refused(tensors, stated(kind) if named else {}, tmp_path) == 1
    assert f"{NAME}.qweight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "said"), [("gptq", {"sym": False}), ("awq", {"zero_point": True})]
)
def test_zeros_that_the_config_promises_are_not_made_up(
    kind: str,
    said: dict[str, bool],
    packed: Callable[[str], Tensors],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = packed(kind)
    del tensors["qzeros"]
    assert refused(tensors, stated(kind, **said), tmp_path) == 1
    assert f"tensor {NAME}.qzeros is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bits", "group", "inputs"), [(3, -1, 72), (3, 16, 48), (5, 256, 40), (6, 32, 72), (7, 16, 48)]
)
def test_inputs_that_do_not_fill_their_words_are_counted_without_a_group_index(
    bits: int, group: int, inputs: int, wild: Any, dequantize: Callable[..., Any]
) -> None:
    packer = wild.Gptq(bits=bits, group=group, g_idx="absent", zeros="v2", sym=False)
    packed = packer.pack(np.random.default_rng(9), 64, inputs)
    config = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": bits}
    config |= {"group_size": group, "sym": False}
    files = {"config.json": {"quantization_config": config}}
    found = dequantize(packed.named(NAME), files, "--dtype", "float32")
    assert torch.equal(found[f"{NAME}.weight"], packed.weight)
