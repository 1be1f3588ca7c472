"""Whether a folder is an EXL2 checkpoint: every rule of section 5 of the format's description, and
what sections 1, 2, 3 and 6 say of names, types and modules. Shares nothing with the plugin.

    python tests/quantize/exl2_validity.py FOLDER

Letters: N output features, K input features, G groups, R words of 32 bits down a column.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = Mapping[str, torch.Tensor]
TYPES = {
    "q_weight": torch.int32,
    "q_scale": torch.int32,
    "q_scale_max": torch.float16,
    "q_groups": torch.int16,
    "q_invperm": torch.int32,
}
WIDTHS = (8, 6, 5, 4, 3, 2)
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one input: the description says that each such set has one permutation."""
EXPERTS = re.compile(r"(.+)\.experts\.\d+\.(?:w1|w3|gate_proj|up_proj)$")


def problems(folder: Path) -> list[str]:
    """What breaks a rule, in words; empty for a valid folder."""
    found = list(_files(folder))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    linears = sorted(n.removesuffix(".q_weight") for n in tensors if n.endswith(".q_weight"))
    if not linears:
        return [*found, "no tensor ends in .q_weight"]
    for name in linears:
        found += [f"{name}: {problem}" for problem in _linear(name, tensors)]
    found += _dense(tensors, linears)
    found += _model(folder, tensors, linears)
    return found


def _files(folder: Path) -> Iterator[str]:
    """Section 1: names of files, and the config's block."""
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    total = len(names)
    numbered = [f"output-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    if names not in (["output.safetensors"], numbered):
        yield f"the weight files are {names}"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        stale = set(json.loads(index.read_text())["weight_map"].values()) - set(names)
        if stale:
            yield f"the index names {sorted(stale)}, which are not there"
    block = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    kinds = {"quant_method": str, "version": str, "bits": float, "head_bits": int}
    for key, kind in kinds.items():
        if not isinstance(block.get(key), kind):
            yield f"quantization_config.{key} is {block.get(key)!r}"
    if block.get("quant_method") != "exl2":
        yield f"quant_method is {block.get('quant_method')!r}"
    if not isinstance(block.get("calibration"), dict):
        yield "quantization_config.calibration is no object"


def _linear(name: str, tensors: Tensors) -> Iterator[str]:
    """Sections 2, 3 and 5 for one linear."""
    missing = [part for part in TYPES if f"{name}.{part}" not in tensors]
    if missing:
        yield f"lacks {missing}"
        return
    mine = {part: tensors[f"{name}.{part}"] for part in TYPES}
    for part, wanted in TYPES.items():
        if mine[part].dtype != wanted:
            yield f"{part} is {mine[part].dtype}"
    if f"{name}.weight" in tensors:
        yield "is there dense as well"
    words, outputs = mine["q_weight"].shape
    (inputs,), (groups,) = mine["q_invperm"].shape, mine["q_scale_max"].shape
    if tuple(mine["q_scale"].shape) != (groups, outputs // 8):
        yield f"q_scale has shape {list(mine['q_scale'].shape)}"
    if len(mine["q_groups"]) != 2 * groups:
        yield f"q_groups has {len(mine['q_groups'])} numbers for {groups} groups"
        return
    if inputs % 32 or inputs > 65536:
        yield f"K is {inputs}"
    if outputs % 32:
        yield f"N is {outputs}"
    if words > 32767:
        yield f"R is {words}"
    if sorted(mine["q_invperm"].tolist()) != list(range(inputs)):
        yield "q_invperm is no permutation"
    largest = mine["q_scale_max"].float()
    if not bool(largest.isfinite().all()) or bool((largest < 0).any()):
        yield "q_scale_max has values that are no scales"
    pairs = [number & 0xFFFF for number in mine["q_groups"].tolist()]
    yield from _groups(pairs[0::2], pairs[1::2], words, inputs)
    bias = tensors.get(f"{name}.bias")
    if bias is not None and (bias.dtype != torch.float16 or tuple(bias.shape) != (outputs,)):
        yield f"bias is {bias.dtype} {list(bias.shape)}, wanted float16 [{outputs}]"


def _groups(bits: list[int], starts: list[int], words: int, inputs: int) -> Iterator[str]:
    """Widths, offsets and rows of the groups."""
    if not set(bits) <= set(WIDTHS):
        yield f"widths are {sorted(set(bits))}"
        return
    if bits != sorted(bits, reverse=True):
        yield "widths do not descend"
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        yield f"offsets are {starts}"
        return
    rows = [
        (stop - start) * 32 / width
        for width, start, stop in zip(bits, starts, [*starts[1:], words], strict=True)
    ]
    if any(count < 32 or count % 32 for count in rows):
        yield f"groups have {rows} rows"
    if sum(rows) != inputs:
        yield f"groups have {sum(rows)} rows together for {inputs} inputs"


def _dense(tensors: Tensors, linears: list[str]) -> Iterator[str]:
    """Section 6: what is not quantised is float16."""
    owned = {f"{name}.{part}" for name in linears for part in TYPES}
    for name, tensor in tensors.items():
        if name in owned:
            continue
        if name.endswith((".q_perm", ".q_group_map")):
            yield f"{name} follows from other tensors and is never stored"
        elif tensor.dtype != torch.float16:
            yield f"{name} is {tensor.dtype}, wanted float16"
        elif not bool(tensor.isfinite().all()):
            yield f"{name} has values that float16 does not hold"


def _model(folder: Path, tensors: Tensors, linears: list[str]) -> Iterator[str]:
    """Which modules are stored how, and what linears of one input share."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if config["intermediate_size"] % 32:
        yield f"intermediate_size is {config['intermediate_size']}"
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding) != config["vocab_size"]:
        yield "model.embed_tokens.weight has not the original rows"
    if "lm_head" in linears:
        columns = tensors["lm_head.q_weight"].shape[1]
        if columns != config["vocab_size"] + -config["vocab_size"] % 32:
            yield f"lm_head has {columns} columns"
    sets: dict[tuple[str, int], list[str]] = {}
    for name in linears:
        module, _, leaf = name.rpartition(".")
        expert = EXPERTS.match(name)
        place = next((i for i, leaves in enumerate(SHARED) if leaf in leaves), -1)
        if expert:
            sets.setdefault((expert[1], 2), []).append(name)
        elif place >= 0:
            sets.setdefault((module, place), []).append(name)
    for names in sets.values():
        orders = [tensors[f"{name}.q_invperm"] for name in names]
        if not all(torch.equal(orders[0], order) for order in orders[1:]):
            yield f"{names} read one input and have several permutations"
    for name in (n for n in linears if n.endswith(".down_proj")):
        up = name.removesuffix("down_proj") + "up_proj"
        if up in linears and tensors[f"{up}.q_weight"].shape[1] != len(
            tensors[f"{name}.q_invperm"]
        ):
            yield f"{up} has other outputs than {name} has inputs"


def main() -> int:
    """Prints the problems of the folder named; 0 when there are none."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    found = problems(Path(sys.argv[1]))
    print("\n".join(found) if found else f"{sys.argv[1]}: every rule holds.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
