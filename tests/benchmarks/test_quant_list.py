"""What ``make bench-quants`` claims: each claim is made of figures, and fails when they say so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def quant_list() -> ModuleType:
    path = Path(__file__).with_name("quant_list.py")
    spec = importlib.util.spec_from_file_location("quant_list", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("quant_list", module)
    spec.loader.exec_module(module)
    return module


def figures(kl: float, bits: float = 4.0) -> dict[str, Any]:
    return {
        "kl": kl,
        "kl_interval": (0.9 * kl, 1.1 * kl),
        "bits_per_weight": bits,
        "head_bits_per_weight": 16.0,
        "bytes": 1_000_000,
        "top1": 0.9,
        "perplexity": 12.0,
    }


def test_the_list_has_every_quant_that_is_asked_for(quant_list: ModuleType) -> None:
    names = {item.name for item in quant_list.wanted_quants()}
    assert {"awq-4", "awq-4-rtn"} <= names
    kinds = ("sym", "asym", "act-order")
    assert {f"gptq-{bits}-{kind}" for bits in (3, 4, 8) for kind in kinds} <= names
    assert {f"exl2-{bits}" for bits in (2.5, 3.0, 4.0, 4.3, 5.0, 6.0)} <= names
    assert all(i.baseline in names for i in quant_list.wanted_quants() if i.baseline)
    order = [item.name for item in quant_list.wanted_quants()]
    # The bits of an EXL2 twin are read from a GPTQ quant that has been made.
    for item in quant_list.wanted_quants():
        assert not item.bits_of or order.index(item.bits_of) < order.index(item.name)


@pytest.mark.parametrize(
    ("results", "held"),
    [
        ({"awq-4": 0.1, "awq-4-rtn": 0.2}, [True]),
        ({"awq-4": 0.2, "awq-4-rtn": 0.1}, [False]),
        ({"gptq-8-sym": 0.0105, "gptq-8-sym-rtn": 0.01}, [True]),
        ({"gptq-8-sym": 0.0115, "gptq-8-sym-rtn": 0.01}, [False]),
        ({"exl2-2.5": 0.5, "exl2-3.0": 0.3, "exl2-4.0": 0.31}, [True, False]),
        ({"exl2-like-gptq-4": 0.2, "gptq-4-sym": 0.25, "gptq-4-act-order": 0.19}, [True, False]),
    ],
)
def test_a_claim_holds_as_its_figures_do(
    quant_list: ModuleType, results: dict[str, float], held: list[bool]
) -> None:
    found = list(quant_list.checks({name: figures(kl) for name, kl in results.items()}))
    assert [holds for holds, _ in found] == held


def test_the_table_has_a_row_for_what_was_measured(quant_list: ModuleType) -> None:
    table = quant_list.markdown({"exl2-4.3": figures(0.1, 4.3)}, {"exl2-4.3": 61.4})
    assert table.splitlines()[2:] == [
        "| exl2-4.3 | 4.300 | 16.00 | 1.0 | 0.10000 (0.09000 to 0.11000) | 90.0 % | 12.000 | 61 |"
    ]
