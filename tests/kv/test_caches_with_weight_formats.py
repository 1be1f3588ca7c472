"""An fp8 cache under every weight format: chunks, prefix hits, preemption and company change no
answer. Greedy tokens of a tiny random model in float32, against each prompt alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ingle.request import SamplingParams

PACKER = Path(__file__).parents[1] / "formats" / "round_to_nearest.py"
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
METHODS = ("dense", "awq", "gptq", "exl2")
BLOCK = 16
NEW_TOKENS = 10


def install(folder: Path, package: str, name: str, module: str) -> None:
    """As ``conftest`` does it."""
    info = folder / f"{package.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[ingle.plugins]\n{name} = {module}\n")


def packed(tools: Any, method: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    parts: dict[str, torch.Tensor]
    if method == "awq":
        parts = tools.pack_awq_gemm(weight, 32)
    elif method == "gptq":
        parts = tools.pack_gptq(weight, 4, 32, False, torch.randperm(weight.shape[1]))
    else:
        parts = tools.pack_exl2(weight, ((6, 64, 32), (4, -1, 32)), torch.randperm(weight.shape[1]))
    return parts


@pytest.fixture(scope="module", params=METHODS)
def model(
    request: pytest.FixtureRequest, demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A random Llama of two layers whose linears are stored in one of the formats."""
    spec = importlib.util.spec_from_file_location("round_to_nearest", PACKER)
    assert spec is not None
    assert spec.loader is not None
    tools: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tools)
    torch.manual_seed(0)
    llama, method = LlamaForCausalLM(LlamaConfig(**SHAPE)), request.param
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in llama.named_parameters():
        linear = name.removesuffix(".weight")
        is_packed = linear.endswith(("_proj", "lm_head") if method == "exl2" else "_proj")
        if method == "dense" or not is_packed:
            tensors[name] = parameter.detach().float()
            continue
        parts = packed(tools, method, parameter.detach())
        tensors |= {f"{linear}.{role}": part.contiguous() for role, part in parts.items()}
    folder = tmp_path_factory.mktemp(str(method))
    save_file(tensors, folder / "model.safetensors")
    config = llama.config.to_dict() | {"torch_dtype": "float32"}
    config |= {"architectures": ["LlamaForCausalLM"]}
    if method != "dense":
        how = {"quant_method": method, "bits": 4, "group_size": 32, "zero_point": True}
        config["quantization_config"] = how
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return folder


def prompts() -> list[list[int]]:
    """Sixteen that share 40 tokens, of 41 to 116 tokens."""
    shared = torch.randint(1, 9000, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    return [[*shared, 100 + i, *range(7, 7 + 5 * i)] for i in range(16)]


class Engine:
    """An ``LLM`` with an fp8 cache."""

    def __init__(self, model: Path, cache: str, **options: Any) -> None:
        from ingle.llm import LLM

        given = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "block_size": BLOCK}
        self.llm = LLM(str(model), kv_cache_dtype=cache, **{**given, **options})

    def answers(self, asked: list[list[int]]) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        self.outputs = self.llm.generate(asked, params)
        return [list(out.outputs[0].token_ids) for out in self.outputs]

    @property
    def preemptions(self) -> int:
        return int(self.llm._core.stats().num_preemptions_total)

    @property
    def block_bytes(self) -> int:
        """Of all layers and both sides."""
        runner: Any = self.llm._core.runner
        return sum(
            form.bytes_per_block(store.geometry)
            for cache in runner.caches
            for form, store in ((cache.k_format, cache.k_store), (cache.v_format, cache.v_store))
        )


CACHES = [
    "fp8",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("fp8_e5m2", "int8", "int4")),
]


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_every_way_to_be_served_gives_the_answers_of_being_alone(
    site: Path, model: Path, cache: str
) -> None:
    for name in ("awq", "gptq", "exl2"):
        install(site, f"ingle-quant-{name}", name, f"ingle_quant_{name}.plugin")
    asked = prompts()
    lone = Engine(model, cache, enable_prefix_caching=False, max_num_batched_tokens=2048)
    alone = [lone.answers([prompt])[0] for prompt in asked]
    assert len({tuple(answer) for answer in alone}) > 8, "answers that tell prompts apart"

    small_chunks = Engine(model, cache, max_num_batched_tokens=16, enable_prefix_caching=False)
    assert small_chunks.answers(asked[:4]) == alone[:4]

    batch = Engine(model, cache, max_num_batched_tokens=2048, max_num_seqs=16)
    assert batch.answers(asked) == alone
    assert batch.answers(asked[:4]) == alone[:4]
    assert all(output.num_cached_tokens >= 32 for output in batch.outputs), "prefix hits"

    room = 24 * lone.block_bytes
    cramped = Engine(model, cache, kv_cache_memory_bytes=room, max_model_len=144)
    assert cramped.answers(asked) == alone
    assert cramped.preemptions > 0
