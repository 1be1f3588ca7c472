"""EXL2 folders as the command writes them, against a checker written from the description alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingle.errors import CheckpointError
from ingle.quantize import command
from ingle.quantize.command import make_quant
from ingle.quantize.config import CalibrationConfig, QuantizeConfig
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_exl2.making.settings import Exl2Options

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def make_exl2(calibration_text: str) -> Callable[[Path, Path, Exl2Options], Path]:
    """Makes a quant through the driver, without measuring it."""

    def make(model: Path, out: Path, options: Exl2Options) -> Path:
        calibration = CalibrationConfig(
            calibration=calibration_text, calibration_rows=8, calibration_length=32
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "find_format", lambda *_: Exl2Format())
            patch.setattr(command, "_report", lambda *args: args[2])
            make_quant(
                str(model), out, QuantizeConfig(format="exl2", device="cpu"), calibration, options
            )
        return out

    return make


@pytest.fixture(scope="module")
def quant(
    make_exl2: Callable[..., Path], tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Made once, with biases, padding and a head of its own."""
    return make_exl2(tiny_qwen, tmp_path_factory.mktemp("exl2") / "out", Exl2Options(bpw=4.6))


def read(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("head_bits", [6, 16])
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_every_rule_holds_for_what_the_command_writes(
    head_bits: int,
    method: Any,
    make_exl2: Callable[..., Path],
    tiny_qwen: Path,
    tmp_path: Path,
    exl2_validity: ModuleType,
) -> None:
    options = Exl2Options(bpw=4.6, head_bits=head_bits, method=method)
    out = make_exl2(tiny_qwen, tmp_path / "out", options)
    assert exl2_validity.problems(out) == []
    assert ("lm_head.q_weight" in read(out)) == (head_bits == 6)


def test_norms_and_embeddings_are_the_originals_in_float16(quant: Path, tiny_qwen: Path) -> None:
    ours, originals = read(quant), read(tiny_qwen)
    dense = [name for name in ours if name.endswith((".weight", "norm.weight"))]
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(dense)
    for name in dense:
        assert originals[name].dtype == torch.bfloat16
        assert torch.equal(ours[name], originals[name].half())


def test_biases_are_padded_with_zeros_like_the_outputs(quant: Path, tiny_qwen: Path) -> None:
    ours, originals = read(quant), read(tiny_qwen)
    name = "model.layers.0.self_attn.k_proj.bias"
    assert ours[name].shape == (32,)
    assert torch.equal(ours[name][:24], originals[name].half())
    assert not ours[name][24:].any()


def test_a_norm_that_float16_cannot_hold_is_refused_by_name(
    make_exl2: Callable[..., Path], tiny_qwen: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_qwen.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = read(tiny_qwen)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1e5)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values up to"):
        make_exl2(folder, tmp_path / "out", Exl2Options(bpw=4.6, method="rtn"))


V = "model.layers.0.self_attn.v_proj"


def set_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return apply


def swap_widths(tensors: Tensors) -> None:
    """Exchanges the widths of the first and last group of a linear that has several."""
    mixed = [n for n, t in tensors.items() if n.endswith(".q_groups") and t[0] != t[-2]]
    pairs = tensors[mixed[0]]
    pairs[[0, -2]] = pairs[[-2, 0]]


BREAKS: Mapping[str, tuple[Callable[[Tensors], None], str]] = {
    "a norm in bfloat16": (
        set_tensor("model.norm.weight", lambda t: t.bfloat16()),
        "wanted float16",
    ),
    "a width of 7": (
        set_tensor(f"{V}.q_groups", lambda t: torch.cat([t.new_tensor([7]), t[1:]])),
        "widths are",
    ),
    "widths that ascend": (swap_widths, "widths do not descend"),
    "offsets that do not begin at 0": (
        set_tensor(f"{V}.q_groups", lambda t: torch.cat([t[:1], t.new_tensor([1]), t[2:]])),
        "offsets are",
    ),
    "a word too few": (set_tensor(f"{V}.q_weight", lambda t: t[:-1]), "rows"),
    "an input twice": (
        set_tensor(f"{V}.q_invperm", lambda t: torch.cat([t[1:2], t[1:]])),
        "no permutation",
    ),
    "an order of its own": (
        set_tensor(f"{V}.q_invperm", lambda t: t.roll(1)),
        "several permutations",
    ),
    "a scale that is infinite": (
        set_tensor(f"{V}.q_scale_max", lambda t: torch.full_like(t, torch.inf)),
        "no scales",
    ),
    "scales of fewer outputs": (
        set_tensor(f"{V}.q_scale", lambda t: t[:, :-1]),
        "q_scale has shape",
    ),
    "outputs that do not fill 32": (
        set_tensor(f"{V}.q_weight", lambda t: t[:, :24]),
        "N is 24",
    ),
    "a stored q_perm": (
        lambda tensors: tensors.update({f"{V}.q_perm": tensors[f"{V}.q_invperm"].clone()}),
        "never stored",
    ),
    "a missing tensor": (lambda tensors: tensors.__delitem__(f"{V}.q_scale_max"), "lacks"),
    "a bias that is not padded": (
        set_tensor("model.layers.1.self_attn.k_proj.bias", lambda t: t[:24]),
        "bias is",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_the_checker_finds_each_kind_of_break(
    case: str, quant: Path, tmp_path: Path, exl2_validity: ModuleType
) -> None:
    change, message = BREAKS[case]
    tensors = read(quant)
    change(tensors)
    save_file(tensors, tmp_path / "output.safetensors")
    config = json.loads((quant / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any(message in problem for problem in exl2_validity.problems(tmp_path))
