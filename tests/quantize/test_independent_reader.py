"""AWQ and GPTQ folders as the command writes them, read by a reader written from the formats'
description alone: the weights it finds are those that Ingle computes with."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from ingle.checkpoint.safetensors import open_checkpoint
from ingle.plugin import DeviceInfo, LinearSpec
from ingle.quantize import command
from ingle.quantize.command import make_quant
from ingle.quantize.config import CalibrationConfig, QuantizeConfig
from ingle_quant_awq.format import AwqFormat
from ingle_quant_awq.making.options import AwqOptions
from ingle_quant_gptq.format import GptqFormat
from ingle_quant_gptq.making.options import GptqOptions

OPTIONS: dict[str, Any] = {
    "awq": AwqOptions(group_size=32),
    "awq symmetric": AwqOptions(group_size=32, sym=True),
    "awq 3 bits": AwqOptions(bits=3, group_size=32),
    "awq one group": AwqOptions(bits=8, group_size=-1),
    "gptq": GptqOptions(group_size=32),
    "gptq asymmetric": GptqOptions(group_size=32, sym=False),
    "gptq act-order": GptqOptions(group_size=32, desc_act=True),
    "gptq 3 bits": GptqOptions(bits=3, group_size=32),
    "gptq 3 bits asymmetric act-order": GptqOptions(
        bits=3, group_size=32, sym=False, desc_act=True
    ),
    "gptq 2 bits": GptqOptions(bits=2, group_size=32),
    "gptq 8 bits, a short last group": GptqOptions(bits=8, group_size=48),
    "gptq one group, head": GptqOptions(group_size=-1, lm_head=True),
    "gptq dynamic": GptqOptions(
        group_size=32, dynamic='{"-:.*v_proj": {}, ".*down_proj": {"bits": 8}}'
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_reader_of_the_description_finds_the_weights_that_ingle_finds(
    case: str,
    tiny_llama: Path,
    calibration_text: str,
    tmp_path: Path,
    packed_reader: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = OPTIONS[case]
    form = AwqFormat() if isinstance(options, AwqOptions) else GptqFormat()
    monkeypatch.setattr(command, "find_format", lambda *_: form)
    monkeypatch.setattr(command, "_report", lambda *args: args[2])
    calibration = CalibrationConfig(
        calibration=calibration_text, calibration_rows=8, calibration_length=32
    )
    config = QuantizeConfig(format=form.name, device="cpu")
    make_quant(str(tiny_llama), tmp_path / "out", config, calibration, options)
    state = packed_reader.dense_state(tmp_path / "out")
    ours = linears_as_ingle_reads_them(tmp_path / "out", form)
    assert len(ours) == (15 if options == OPTIONS["gptq one group, head"] else 14) - 2 * (
        "dynamic" in case
    )
    for name, weight in ours.items():
        assert torch.equal(weight, state[f"{name}.weight"]), name
    # Logits of weights that were read wrongly are unrelated: 1.4 away.
    assert distance(state, tiny_llama) < {2: 1.2, 8: 0.05}.get(options.bits, 0.9)


def linears_as_ingle_reads_them(folder: Path, form: Any) -> dict[str, torch.Tensor]:
    """float32 [N, K] by name."""
    with open_checkpoint(folder) as checkpoint:
        loader = form.open(checkpoint.info())
        found = {}
        for name, (outputs, inputs) in loader.linears().items():
            spec = LinearSpec(
                name=name,
                in_features=inputs,
                out_features=outputs,
                dtype=torch.float32,
                device=DeviceInfo(type="cpu"),
            )
            found[name] = loader.load_linear(spec, checkpoint).dequantize()
        return found


def distance(state: dict[str, torch.Tensor], original: Path) -> float:
    """Relative error of transformers' logits with the weights read, against the original's."""
    reference, read = (
        transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
        for _ in range(2)
    )
    read.load_state_dict(state, strict=False)
    ids = torch.arange(2, 50).reshape(2, 24)
    with torch.no_grad():
        wanted, found = reference(ids).logits, read(ids).logits
    return float((found - wanted).norm() / wanted.norm())
