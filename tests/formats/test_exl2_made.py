"""A whole model made into EXL2: the files obey the format, and compute what was decided."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ingle import ConfigError
from ingle.checkpoint.model_config import load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.plugin import DeviceInfo
from ingle.quantize.block import BlockShape, HeadBlock, LayerBlock
from ingle_quant_exl2.format import Exl2Format
from ingle_quant_exl2.making.measure import _relative
from ingle_quant_exl2.making.quantizer import Exl2Quantizer
from ingle_quant_exl2.making.settings import Exl2Options

CPU = DeviceInfo(type="cpu")
ROWS, LENGTH, VOCABULARY = 8, 32, 100


def bits_per_weight(tensors: Mapping[str, torch.Tensor]) -> float:
    """Stored bits of the layers' linears, counted from the tensors themselves."""
    total = weights = 0
    for name, tensor in tensors.items():
        if ".layers." in name and ".q_" in name:
            total += 8 * tensor.numel() * tensor.element_size()
        if ".layers." in name and name.endswith(".q_weight"):
            weights += tensor.shape[1] * len(tensors[name.replace("q_weight", "q_invperm")])
    return total / weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tied head whose vocabulary is no multiple of 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=1,
        bos_token_id=0,
    )
    folder = tmp_path_factory.mktemp("exl2") / "original"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def blocks(model: Path) -> list[LayerBlock | HeadBlock]:
    checkpoint = open_checkpoint(model)
    config = load_model_config(model, checkpoint.info())
    shape = BlockShape(config=config, device=CPU, row_length=LENGTH)
    layers = [LayerBlock(checkpoint, i, shape) for i in range(config.num_layers)]
    return [*layers, HeadBlock(checkpoint, shape)]


def make(model: Path, out: Path, options: Exl2Options) -> SimpleNamespace:
    """What core's driver does with a quantizer, without progress on disk."""
    quantizer = Exl2Quantizer(options)
    torch.manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (ROWS * LENGTH,))
    hidden = load_file(model / "model.safetensors")["model.embed_tokens.weight"][ids].float()
    measured, tensors, decided = [], {}, {}
    if quantizer.measures:
        state = hidden
        for block in blocks(model):
            block.hidden = state if quantizer.calibrated else None
            measured.append(quantizer.measure_block(block))
            state = block.outputs if block.outputs is not None else state
    quantizer.plan(measured)
    for block in blocks(model):
        block.hidden = hidden if quantizer.calibrated else None
        head = isinstance(block, HeadBlock)
        packed = quantizer.quantize_head(block) if head else quantizer.quantize_block(block)
        hidden = block.compute() if quantizer.calibrated and not head else hidden
        for name, parts in packed.items():
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in parts.items()}
            decided[f"{name}.weight"] = block.weight(name)
        left = block.tensors().items()
        kept = {n: t for n, t in left if n.removesuffix(".weight") not in packed}
        tensors |= {name: tensor.half() for name, tensor in kept.items()}
    original = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"] = original["model.embed_tokens.weight"].half()
    out.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "output.safetensors")
    config = json.loads((model / "config.json").read_text())
    settings = {**config, "quantization_config": quantizer.config()}
    (out / "config.json").write_text(json.dumps(settings))
    return SimpleNamespace(out=out, decided=decided, files=quantizer.files(), tensors=tensors)


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[float, SimpleNamespace]:
    folder = tmp_path_factory.mktemp("made")
    measurement = str(folder / "measurement.json")
    return {
        bits: make(model, folder / f"{bits}", Exl2Options(bpw=bits, measurement=measurement))
        for bits in (3.0, 4.3, 6.0)
    }


def logits(weights: Mapping[str, torch.Tensor], model: Path) -> torch.Tensor:
    """transformers' logits for random tokens with some weights replaced."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.config.tie_word_embeddings = False
    loaded.lm_head.weight = torch.nn.Parameter(loaded.lm_head.weight.detach().clone())
    missing = loaded.load_state_dict(dict(weights), strict=False)
    assert not missing.unexpected_keys
    torch.manual_seed(2)
    with torch.no_grad():
        return loaded(torch.randint(2, VOCABULARY, (4, 48))).logits


def divergence(found: torch.Tensor, reference: torch.Tensor) -> float:
    p, q = reference.log_softmax(-1), found.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("bits", [3.0, 4.3, 6.0])
def test_the_files_obey_every_rule_and_the_target_is_met(
    made: dict[float, SimpleNamespace], bits: float, exl2_validity: ModuleType
) -> None:
    assert exl2_validity.problems(made[bits].out) == []
    found = bits_per_weight(made[bits].tensors)
    # Two layers have few layouts to choose from; a real model comes within 0.02.
    assert bits - 0.2 <= found <= bits


def test_ingle_reads_back_exactly_the_weights_that_were_decided(
    made: dict[float, SimpleNamespace],
) -> None:
    for quant in made.values():
        with open_checkpoint(quant.out) as checkpoint:
            info = checkpoint.info()
            form = Exl2Format()
            assert form.detect(info) is not None
            loader = form.open(info)
            assert set(loader.linears()) == {n.removesuffix(".weight") for n in quant.decided}
            for name, weight in quant.decided.items():
                spec = linear_spec(name.removesuffix(".weight"), weight)
                read = loader.load_linear(spec, checkpoint).dequantize()[: len(weight)]
                assert torch.equal(read.float(), weight)


def linear_spec(name: str, weight: torch.Tensor) -> object:
    from ingle.plugin import LinearSpec

    outputs, inputs = weight.shape
    return LinearSpec(
        name=name, in_features=inputs, out_features=outputs, dtype=torch.float32, device=CPU
    )


def test_more_bits_are_nearer_to_the_original(
    made: dict[float, SimpleNamespace], model: Path
) -> None:
    reference = logits({}, model)
    distances = [divergence(logits(quant.decided, model), reference) for quant in made.values()]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.05 * distances[0]


def test_calibrated_is_nearer_than_rounding_to_nearest(
    made: dict[float, SimpleNamespace], model: Path, tmp_path: Path, exl2_validity: ModuleType
) -> None:
    plain = make(model, tmp_path / "rtn", Exl2Options(bpw=3.0, method="rtn"))
    assert exl2_validity.problems(plain.out) == []
    reference = logits({}, model)
    found = [divergence(logits(q.decided, model), reference) for q in (made[3.0], plain)]
    assert found[0] < found[1]


def test_a_measurement_is_made_once_and_gives_the_same_bytes(
    made: dict[float, SimpleNamespace], model: Path, tmp_path: Path
) -> None:
    again = make(model, tmp_path / "again", Exl2Options(bpw=4.3))
    assert again.files["measurement.json"] == made[4.3].files["measurement.json"]
    first, second = ((q / "output.safetensors").read_bytes() for q in (again.out, made[4.3].out))
    assert first == second


def test_a_tied_head_becomes_one_of_its_own_and_padding_is_exactly_zero(
    made: dict[float, SimpleNamespace],
) -> None:
    quant = made[4.3]
    assert quant.tensors["lm_head.q_weight"].shape[1] == 128
    with open_checkpoint(quant.out) as checkpoint:
        loader = Exl2Format().open(checkpoint.info())
        spec = linear_spec("lm_head", quant.decided["lm_head.weight"])
        padded = loader.load_linear(spec, checkpoint).dequantize()  # type: ignore[arg-type]
    assert not padded[VOCABULARY:].any()


def test_one_huge_token_does_not_hide_the_errors_of_the_others() -> None:
    torch.manual_seed(4)
    reference = torch.randn(64, 32)
    reference[0] *= 10_000
    found = reference + 0.1 * torch.randn(64, 32)
    assert _relative(found, reference) == pytest.approx(0.1, rel=0.1)


def test_a_measurement_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"measurement": {}}')
    with pytest.raises(ConfigError, match=r"--measurement .*m\.json is no measurement"):
        Exl2Quantizer(Exl2Options(measurement=str(tmp_path / "m.json")))


def test_a_measurement_of_another_model_with_as_many_blocks_is_refused(
    made: dict[float, SimpleNamespace], model: Path, tmp_path: Path
) -> None:
    record = json.loads(made[3.0].files["measurement.json"])
    record["blocks"][0]["attention"]["weights"] += 32
    (tmp_path / "m.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="it is of another model"):
        make(model, tmp_path / "out", Exl2Options(bpw=3.0, measurement=str(tmp_path / "m.json")))


def test_a_measurement_that_could_not_be_kept_is_refused_before_minutes_of_work(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"--measurement .*: there is no folder"):
        Exl2Quantizer(Exl2Options(measurement=str(tmp_path / "missing" / "m.json")))


@pytest.mark.parametrize(("field", "value"), [("bpw", 1.5), ("bpw", 9.0), ("head_bits", 7)])
def test_options_that_cannot_work_are_refused_by_the_name_of_the_flag(
    field: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}"):
        Exl2Options(**{field: value})  # type: ignore[arg-type]


def test_a_target_below_the_smallest_layouts_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--bpw"):
        make(model, tmp_path / "small", Exl2Options(bpw=2.05))
    shutil.rmtree(tmp_path / "small", ignore_errors=True)
