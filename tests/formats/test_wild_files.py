"""Files of every documented layout, random in shape, seed and option, through ``ingle dequantize``:
float32 to the last bit, float16 and bfloat16 as that rounded once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

ROUNDS = int(os.environ.get("INGLE_FUZZ_ROUNDS", "2"))
"""Rounds over all kinds; ``make fuzz-formats`` does many more."""
KINDS = (
    "gptq", "gptq_v2", "gptq_p", "gptq act", "gptq static", "gptq odd", "gptq words", "gptq legacy",
    "gptq marlin", "auto_round", "auto_round auto_gptq", "auto_round gptqmodel", "auto_round awq",
    "awq", "awq bits", "awq gemv", "awq gemv_fast", "llm-awq", "awq marlin", "exl2",
    "exl2 identity",
)  # fmt: skip


class Case:
    """One random checkpoint: tensors, config and what its linears are."""

    def __init__(self, wild: Any, kind: str, seed: int) -> None:
        self.wild = wild
        self.rng = np.random.default_rng([seed, KINDS.index(kind)])
        self.tensors: dict[str, torch.Tensor] = {}
        self.expected: dict[str, torch.Tensor] = {}
        self.config: dict[str, Any] = {}
        family = kind.split()[0]
        maker = {"gptq": self.gptq, "gptq_v2": self.gptq, "gptq_p": self.gptq}.get(family)
        if maker is None:
            maker = getattr(self, kind.replace(" ", "_").replace("-", "_"), self.auto_round)
        for name in self.names():
            self.add(name, maker(kind))
        self.tensors["model.norm.weight"] = torch.ones(8, dtype=torch.bfloat16)

    def names(self) -> Iterator[str]:
        yield "model.layers.0.self_attn.q_proj"
        if self.coin():
            yield "model.layers.11.mlp.experts.3.down_proj"
        if self.coin():
            yield "lm_head"

    def add(self, name: str, packed: Any) -> None:
        self.tensors |= packed.named(name)
        self.expected[f"{name}.weight"] = packed.weight
        if self.coin():
            self.tensors[f"{name}.bias"] = torch.randn(len(packed.weight)).half()

    def coin(self) -> bool:
        return bool(self.rng.integers(2))

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def size(self, multiple: int, most: int = 6) -> int:
        return multiple * int(self.rng.integers(1, most))

    def state(self, **config: Any) -> None:
        self.config = {**config, **self.config}

    def gptq(self, kind: str) -> Any:
        family, _, variant = kind.partition(" ")
        if variant == "marlin":
            group = self.pick(-1, 128)
            self.state(quant_method="gptq", bits=4, group_size=group, is_marlin_format=True)
            n, k = 256 * self.size(1, 3), 128 * self.size(1, 4)
            return self.wild.marlin(self.rng, n, k, group=group, names=("B", "s"))
        bits = self.config.get("bits") or self.pick(2, 3, 4, 5, 6, 7, 8)
        group = self.config.get("group_size") or self.pick(-1, 16, 32, 64, 128, 256)
        sym = self.config.get("sym", self.coin())
        options = {"bits": bits, "group": group, "sym": sym}
        n, k = self.size(32), self.size(32, 12)
        if family == "gptq_p":
            options |= {"planar": bits in (3, 5, 6, 7), "zeros": "v2"}
        if family == "gptq_v2":
            options["zeros"] = "v2"
        if variant == "act":
            options["g_idx"] = self.pick("act", "act int64")
        if variant == "static":
            options["g_idx"] = self.pick("sequential", "all zero", "absent", "sequential int64")
        if variant == "odd":
            n, k = int(self.rng.integers(1, 100)), int(self.rng.integers(1, 300))
        if variant == "words":
            width = self.config.get("pack_dtype") or f"int{self.pick(8, 16, 32, 64)}"
            self.state(pack_dtype=width)
            options["word_bits"] = int(width[3:])
            n, k = self.size(64), self.size(64)
        if variant == "legacy":
            bits = options["bits"] = 3
            options["zeros"] = "legacy"
            self.state(meta={"quantizer": self.pick(["gptqmodel:5.1.0"], "gptqmodel:4.2.5")})
        options["scales"] = self.pick(torch.float16, torch.bfloat16, torch.float32)
        if family != "gptq" or self.coin():
            self.state(checkpoint_format=family)
        self.state(quant_method="gptq", bits=bits, group_size=group, sym=sym)
        self.state(desc_act=self.coin())
        return self.wild.Gptq(**options).pack(self.rng, n, k)

    def auto_round(self, kind: str) -> Any:
        variant = kind.partition(" ")[2]
        bits = self.config.get("bits") or self.pick(2, 3, 4, 5, 6, 7, 8)
        group = self.config.get("group_size") or self.pick(-1, 32, 64, 128)
        layout = f"auto_round:{variant}" if variant else "auto_round"
        zeros = "v1" if variant == "auto_gptq" else "v2"
        g_idx = "sequential" if variant == "gptqmodel" else "absent"
        self.state(quant_method="auto-round", packing_format=layout, bits=bits, group_size=group)
        self.state(sym=False, autoround_version="0.16.1", data_type="int")
        return self.wild.Gptq(bits=bits, group=group, zeros=zeros, g_idx=g_idx).pack(
            self.rng, self.size(32), self.size(32, 12)
        )

    def auto_round_awq(self, kind: str) -> Any:
        bits = self.config.get("bits") or self.pick(4, 5, 6, 7)
        self.state(quant_method="auto-round", packing_format="auto_round:auto_awq", bits=bits)
        self.state(sym=False, group_size=32, autoround_version="0.16.1")
        return self.wild.awq_gemm(self.rng, self.size(32), self.size(32), bits=bits)

    def awq(self, kind: str) -> Any:
        group = self.config.get("group_size") or self.pick(-1, 16, 32, 64, 128, 256)
        self.state(quant_method="awq", bits=4, group_size=group, version=self.pick("gemm", "GEMM"))
        self.state(zero_point=self.coin())
        scales = self.pick(torch.float16, torch.bfloat16, torch.float32)
        sym = not self.config["zero_point"]
        return self.wild.awq_gemm(
            self.rng, self.size(8, 20), self.size(32, 12), group=group, sym=sym, scales=scales
        )

    def awq_bits(self, kind: str) -> Any:
        bits = self.config.get("bits") or self.pick(2, 3, 5, 6, 7, 8)
        self.state(quant_method="awq", bits=bits, group_size=64, version="gemm", zero_point=True)
        self.state(meta={"quantizer": ["gptqmodel:7.7.0"]})
        n, k = self.size(32), self.size(32)
        return self.wild.awq_gemm(self.rng, n, k, bits=bits, group=64, interleave=False)

    def awq_gemv(self, kind: str) -> Any:
        group = self.config.get("group_size") or self.pick(-1, 32, 64, 128)
        self.state(quant_method="awq", bits=4, group_size=group, version="gemv", zero_point=True)
        return self.wild.awq_gemv(self.rng, self.size(8), self.size(128), group=group)

    def awq_gemv_fast(self, kind: str) -> Any:
        group = self.config.get("group_size") or self.pick(32, 64, 128)
        self.state(quant_method="awq", bits=4, group_size=group, version="gemv_fast")
        return self.wild.awq_gemv_fast(self.rng, self.size(4), self.size(128, 3), group=group)

    def llm_awq(self, kind: str) -> Any:
        self.state(quant_method="awq", bits=4, group_size=128, backend="llm-awq")
        return self.wild.awq_gemv_fast(self.rng, self.size(4), self.size(128, 3), llm_awq=True)

    def awq_marlin(self, kind: str) -> Any:
        group = self.config.get("group_size") or self.pick(-1, 128)
        self.state(quant_method="awq", bits=4, group_size=group, version="marlin")
        n, k = 256 * self.size(1, 3), 128 * self.size(1, 4)
        return self.wild.marlin(self.rng, n, k, group=group, names=("qweight", "scales"))

    def exl2(self, kind: str) -> Any:
        widths = [b for b in (8, 6, 5, 4, 3, 2) if self.coin()] or [4]
        groups = [
            (bits, 32 * int(self.rng.integers(1, 5)))
            for bits in widths
            for _ in range(int(self.rng.integers(1, 4)))
        ]
        if self.coin():
            self.state(quant_method="exl2", version="0.3.2", bits=4.0)
        return self.wild.exl2(self.rng, self.size(32), groups, identity="identity" in kind)

    exl2_identity = exl2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_random_file_is_read_to_the_last_bit(
    kind: str, seed: int, wild: Any, dequantize: Callable[..., Any]
) -> None:
    case = Case(wild, kind, seed)
    where = case.pick("config.json", "quantize_config.json", "quant_config.json")
    files: dict[str, Any] = {"config.json": {"model_type": "llama"}}
    if where == "config.json":
        files["config.json"]["quantization_config"] = case.config
    else:
        files[where] = case.config
    dtype = case.pick("float32", "float16", "bfloat16")
    found = dequantize(case.tensors, files, "--dtype", dtype)
    assert case.expected.keys() <= found.keys()
    for name, wanted in case.expected.items():
        assert torch.equal(found[name], wanted.to(getattr(torch, dtype))), (name, case.config)
    for name in found.keys() - case.expected.keys():
        assert torch.equal(found[name], case.tensors[name])


@pytest.mark.parametrize("kind", ["gptq", "gptq act", "awq", "awq gemv"])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_what_a_config_leaves_out_follows_from_the_tensors(
    kind: str, seed: int, wild: Any, dequantize: Callable[..., Any]
) -> None:
    rng = np.random.default_rng([7, seed, len(kind)])
    bits, group = int(rng.choice([2, 3, 4, 8])), int(rng.choice([32, 64, 128]))
    n, k = 32 * int(rng.integers(1, 5)), 256 * int(rng.integers(1, 4))
    if kind.startswith("gptq"):
        g_idx = "act" if "act" in kind else "absent"
        packed = wild.Gptq(bits=bits, group=group, g_idx=g_idx).pack(rng, n, k)
    elif kind == "awq":
        bits, packed = 4, wild.awq_gemm(rng, n, k, group=group)
    else:
        bits, packed = 4, wild.awq_gemv(rng, n, k, group=group)
    stated = {
        "quant_method": kind.split()[0],
        "bits": bits,
        "group_size": group,
        "version": kind.split()[-1],
    }
    if kind.startswith("gptq"):
        stated |= {"sym": False, "desc_act": False}
    config = {key: value for key, value in stated.items() if rng.integers(3) == 0}
    found = dequantize(
        packed.named("model.layers.0.mlp.up_proj"),
        {"config.json": {"quantization_config": config}},
        "--dtype",
        "float32",
    )
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], packed.weight), config
