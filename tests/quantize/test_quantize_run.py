"""Whole runs over tiny random models: what is written reads back, and a kill changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError

from ingle.checkpoint.safetensors import open_checkpoint
from ingle.errors import CapacityError, ConfigError
from ingle.plugin import DeviceInfo, LinearSpec
from ingle.quantize import command, tensor_file
from ingle.quantize.command import make_quant
from ingle.quantize.config import CalibrationConfig, QuantizeConfig
from ingle.quantize.run import QuantizeRun
from ingle_quant_awq.format import AwqFormat
from ingle_quant_awq.making.options import AwqOptions
from ingle_quant_gptq.format import GptqFormat
from ingle_quant_gptq.making.options import GptqOptions

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps under some old tree "
SHARED = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2-gqa-tied": (
        transformers.Qwen2Config,
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 8}),
    "olmo2": (transformers.Olmo2Config, {}),
    "phi3": (transformers.Phi3Config, {"pad_token_id": 0, "rms_norm_eps": 1e-5}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "decoder_sparse_step": 1,
        },
    ),
}


def tiny_model(folder: Path, family: str) -> Path:
    """A random model with norms and biases that are not all ones and zeros."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SHARED, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(4)
    model.save_pretrained(folder)
    vocabulary = {chr(i + 32) if i < 95 else f"<{i}>": i for i in range(256)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        "decoder": {"type": "Fuse"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} {WORDS[i % 7 :]}" for i in range(40)))
    return str(path)


FORMATS = {"awq": AwqFormat(), "gptq": GptqFormat()}


@pytest.fixture(autouse=True)
def formats_without_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str, disable_plugin: Any = ()) -> Any:
        return FORMATS[name]

    monkeypatch.setattr(command, "find_format", found)
    monkeypatch.setattr(command, "_report", lambda *args: args[2])


def make(model: Path, out: Path, text: str, options: Any) -> Path:
    name = "awq" if isinstance(options, AwqOptions) else "gptq"
    calibration = CalibrationConfig(calibration=text, calibration_rows=8, calibration_length=32)
    make_quant(str(model), out, QuantizeConfig(format=name, device="cpu"), calibration, options)
    return out


def dense_copy(quant: Path, name: str, folder: Path) -> Any:
    """The quant as a transformers model of plain weights, by the format's own oracle."""
    config = json.loads((quant / "config.json").read_text())
    with open_checkpoint(quant) as checkpoint:
        info = checkpoint.info()
        loader = FORMATS[name].open(info)
        owned = {t for linear in loader.linears() for t in loader.tensor_names(linear)}
        state = {t: checkpoint.get(t).float() for t in checkpoint.names() if t not in owned}
        for linear, (out_features, in_features) in loader.linears().items():
            spec = LinearSpec(
                name=linear,
                in_features=in_features,
                out_features=out_features,
                dtype=torch.float32,
                device=DeviceInfo(type="cpu"),
            )
            state[f"{linear}.weight"] = loader.load_linear(spec, checkpoint).dequantize()
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def divergence(model: Any, reference: Any) -> float:
    """Over text like that of the calibration."""
    sample = [ord(letter) - 32 for letter in f"31 {WORDS}17 {WORDS}"]
    ids = torch.tensor([sample[:48], sample[48:96]])
    with torch.no_grad():
        ours, theirs = (m(ids).logits.float().log_softmax(-1) for m in (model, reference))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [AwqOptions(bits=8, group_size=32), GptqOptions(bits=8, group_size=32)],
    ids=["awq", "gptq"],
)
def test_eight_bits_leave_every_family_as_it_was(
    family: str, options: Any, tmp_path: Path, text: str
) -> None:
    model = tiny_model(tmp_path / "model", family)
    quant = make(model, tmp_path / "quant", text, options)
    (tmp_path / "dense").mkdir()
    name = "awq" if isinstance(options, AwqOptions) else "gptq"
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert divergence(dense_copy(quant, name, tmp_path / "dense"), reference) < 2e-3


@pytest.mark.parametrize(
    "options",
    [
        AwqOptions(group_size=32),
        GptqOptions(group_size=32),
        GptqOptions(group_size=32, sym=False, desc_act=True, bits=3),
    ],
    ids=["awq", "gptq", "gptq-3-bits-act-order"],
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    options: Any, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    undisturbed = make(model, tmp_path / "undisturbed", text, options)
    quantize = QuantizeRun._quantize

    def killed(self: QuantizeRun, block: Any) -> None:
        if block.index == 1:
            raise KeyboardInterrupt
        quantize(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(QuantizeRun, "_quantize", killed)
        with pytest.raises(KeyboardInterrupt):
            make(model, tmp_path / "killed", text, options)
    assert not (tmp_path / "killed" / "config.json").exists()
    resumed = make(model, tmp_path / "killed", text, options)
    files = sorted(p.name for p in undisturbed.iterdir())
    assert files == sorted(p.name for p in resumed.iterdir())
    for file in files:
        assert (undisturbed / file).read_bytes() == (resumed / file).read_bytes(), file


def test_a_run_killed_while_it_measures_goes_on_to_its_card(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    options = GptqOptions(group_size=32)
    undisturbed = make(model, tmp_path / "undisturbed", text, options)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "_report", killed)
        with pytest.raises(KeyboardInterrupt):
            make(model, tmp_path / "killed", text, options)
    resumed = make(model, tmp_path / "killed", text, options)
    files = sorted(p.name for p in undisturbed.iterdir())
    assert files == sorted(p.name for p in resumed.iterdir())
    for file in files:
        assert (undisturbed / file).read_bytes() == (resumed / file).read_bytes(), file


def test_an_interrupted_run_of_other_options_is_refused(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path / "model", "llama")

    def killed(self: QuantizeRun, block: Any) -> None:
        self.progress.finish_block(None, {})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(QuantizeRun, "_quantize", killed)
        with pytest.raises(KeyboardInterrupt):
            make(model, tmp_path / "out", text, GptqOptions(group_size=32))
    with pytest.raises(ConfigError, match="differs in options"):
        make(model, tmp_path / "out", text, GptqOptions(group_size=64))


def test_calibrated_quants_beat_rounding_to_nearest(tmp_path: Path, text: str) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = {}
    for method in ("gptq", "rtn"):
        options = GptqOptions(bits=3, group_size=32, method=method)
        quant = make(model, tmp_path / method, text, options)
        (tmp_path / f"{method}-dense").mkdir()
        dense = dense_copy(quant, "gptq", tmp_path / f"{method}-dense")
        found[method] = divergence(dense, reference)
    assert found["gptq"] < found["rtn"]


def test_what_readers_want_is_in_the_folder(tmp_path: Path, text: str) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    options = GptqOptions(
        group_size=32, dynamic='{"-:.*v_proj": {}, ".*down_proj": {"bits": 8}}', lm_head=True
    )
    quant = make(model, tmp_path / "quant", text, options)
    config = json.loads((quant / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq"
    assert (config["bits"], config["group_size"], config["sym"]) == (4, 32, True)
    assert (config["checkpoint_format"], config["lm_head"]) == ("gptq", True)
    assert config["meta"]["calibration"]["rows"] == 8
    assert config["meta"]["calibration"]["length"] == 32
    assert config["meta"]["calibration"]["seed"] == 0
    index = json.loads((quant / "model.safetensors.index.json").read_text())["weight_map"]
    with open_checkpoint(quant) as checkpoint:
        names = checkpoint.names()
        shape = checkpoint.info().tensor_shapes["model.layers.1.mlp.down_proj.qweight"]
    assert set(index) == set(names)
    assert "model.layers.0.self_attn.v_proj.weight" in names
    assert "lm_head.qweight" in names
    assert shape == (128 * 8 // 32, 64)
    assert (quant / "tokenizer.json").is_file()
    assert (quant / "quantize_config.json").is_file()


def test_a_group_size_that_does_not_divide_is_refused_with_one_that_does(
    tmp_path: Path, text: str
) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    with pytest.raises(ConfigError, match=r"--group-size 48 .*64"):
        make(model, tmp_path / "quant", text, AwqOptions(group_size=48))


def test_a_text_that_is_too_short_is_refused_by_its_rows(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    (tmp_path / "short.txt").write_text("short " * 10)
    with pytest.raises(ConfigError, match="different rows of 32 tokens; 8 are wanted"):
        make(model, tmp_path / "quant", str(tmp_path / "short.txt"), GptqOptions(group_size=32))


def test_a_full_disk_is_said_and_the_run_goes_on_to_the_same_bytes(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path / "model", "llama")
    options = GptqOptions(group_size=32)
    undisturbed = make(model, tmp_path / "undisturbed", text, options)
    save = tensor_file.save_file

    def full(tensors: Any, path: Path, **more: Any) -> None:
        if "00002" in path.name:
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "save_file", full)
        with pytest.raises(CapacityError, match=r"is full\. Make room and repeat the command"):
            make(model, tmp_path / "full", text, options)
    assert not list((tmp_path / "full").glob(".*.part"))
    resumed = make(model, tmp_path / "full", text, options)
    for file in sorted(p.name for p in undisturbed.iterdir()):
        assert (undisturbed / file).read_bytes() == (resumed / file).read_bytes(), file
