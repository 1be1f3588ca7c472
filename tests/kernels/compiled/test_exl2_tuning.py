"""The tuner of EXL2 products, with a timer that is made up: what it measures, and what a load makes
of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingle.plugin import DeviceInfo
from ingle_quant_exl2.cuda import Exl2CudaKernel
from ingle_quant_exl2.layout import parse_layout
from ingle_quant_exl2.packing import pack_codes, pack_scale_codes
from ingle_quant_exl2.planes import plan_splits
from ingle_quant_exl2.tuning import Exl2Launch, exl2_launches, matrix_key
from ingle_quant_exl2.weight import StoredExl2Weight

CARD = DeviceInfo(
    type="cuda", capability=(8, 6), name="NVIDIA GeForce RTX 3090", multi_processors=82
)
GROUPS = [(5, 32)] * 2 + [(4, 128)] * 16


def stored(outputs: int = 64) -> StoredExl2Weight:
    words, pairs = [], []
    for bits, size in GROUPS:
        pairs += [bits, sum(len(part) for part in words)]
        words.append(pack_codes(torch.zeros(size, outputs, dtype=torch.int64), bits))
    rows = sum(size for _, size in GROUPS)
    return StoredExl2Weight(
        in_features=rows,
        out_features=outputs,
        stored_out_features=outputs,
        dtype=torch.float16,
        layout=parse_layout("lin", pairs, sum(len(part) for part in words), rows),
        q_scale=pack_scale_codes(torch.zeros(len(GROUPS), outputs, dtype=torch.int64)),
        q_scale_max=torch.ones(len(GROUPS)).half(),
        q_weight=torch.cat(words),
    )


def test_launches_are_such_as_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path))
    weight: Any = Exl2CudaKernel(CARD).prepare(stored())
    found = exl2_launches(weight.packed, 82)
    assert found[0] == weight.launch
    assert found[0].block_n == 32
    dealt = [(one.block_n, plan_splits(weight.packed, one.splits).splits) for one in found]
    assert len(set(dealt)) == len(dealt)
    assert {block for block, _ in dealt} == {16, 32}
    # two sections, of which one has a single chunk and the other eight
    assert {splits for _, splits in dealt} >= {2, 9}
    assert max(splits for _, splits in dealt) == 9


def test_a_load_reads_what_was_measured_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGLE_CACHE", str(tmp_path))
    kernel = Exl2CudaKernel(CARD)
    weight: Any = kernel.prepare(stored())
    wanted = next(one for one in exl2_launches(weight.packed, 82) if one != weight.launch)
    product = SimpleNamespace(seconds=lambda launch: 1e-6 if launch == wanted else 2e-6)
    where = "ingle_quant_exl2.cuda.exl2_product"
    monkeypatch.setattr(where, lambda packed, device, dtype, default: product)
    line = kernel.tune(weight, torch.float16)
    assert line.startswith("exl2 v1 64 64x5g32+2048x4g128: Exl2Launch(")
    assert line.endswith(", 1.0 us")
    monkeypatch.setattr(where, None)
    again: Any = Exl2CudaKernel(CARD).prepare(stored())
    assert again.launch == wanted
    assert again.packed.splits == plan_splits(weight.packed, wanted.splits).splits
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert kernel.tune(stored(), torch.float16) == ""
    assert matrix_key(again.packed) == matrix_key(weight.packed)
    assert wanted.config.block_n == wanted.block_n
    assert Exl2Launch() != wanted
