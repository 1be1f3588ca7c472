"""Compiled decode steps against the decoder they stand in for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from ingle.config import EngineConfig
from ingle.engine.decode_compiler import DecodeCompiler, end_group
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest
from ingle.model.compiled_decoder import CompiledDecoder, segment_shape
from ingle.model.decode_segment import DecodeSegment, example_inputs
from ingle.model.decoder import Decoder
from ingle.model.segment_package import command, load_package, package_path
from ingle.request import SamplingParams


def save_tiny(folder: Path, demo_model_dir: Path, **options: object) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **options,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return folder


def save_family(folder: Path, demo_model_dir: Path, name: str, **options: object) -> Path:
    """A tiny model of transformers' config class ``name``, in bf16."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 256}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, name)(**PLAIN, **sizes, **none, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((demo_model_dir / file).read_bytes())
    return folder


def open_core(folder: Path, **options: object) -> EngineCore:
    return build_engine_core(
        EngineConfig(model=str(folder), device="cpu", block_size=16, **options)  # type: ignore[arg-type]
    )


def step(runner: ModelRunner, token_ids: list[int], start: int) -> torch.Tensor:
    """Logits after ``token_ids[start:]``, the tokens before being in the cache: [T, V]."""
    share = ScheduledRequest(
        request_id="r",
        token_ids=token_ids[start:],
        num_computed_tokens=start,
        block_table=[3, 1, 2, 4],
        params=SamplingParams(),
        seed=0,
        prompt_token_ids=token_ids,
        output_token_ids=[],
        samples=False,
    )
    with torch.inference_mode():
        hidden = runner.model.hidden_states(runner._batch((share,)), runner.caches)
        return runner.model.logits(hidden)


class UncompiledSegment:
    """The segment's function run eagerly: what the compiler is given."""

    def __init__(self, model: Decoder) -> None:
        shape = segment_shape(model)
        assert shape is not None
        self._segment = DecodeSegment(shape)

    def __call__(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self._segment(tuple(inputs[:4]), tuple(inputs[4:]))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_segments_compute_what_the_layers_compute(tmp_path: Path, demo_model_dir: Path) -> None:
    runner = open_core(save_tiny(tmp_path, demo_model_dir)).runner
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    token_ids = list(range(20, 50))
    wanted = step(runner, token_ids, 0)
    runner.model = CompiledDecoder(model, UncompiledSegment(model))  # type: ignore[arg-type]
    found = [step(runner, token_ids[:1], 0)]
    found += [step(runner, token_ids[: at + 1], at) for at in range(1, len(token_ids))]
    assert relative_error(torch.cat(found), wanted) < 1.5e-2


@pytest.mark.parametrize("options", [{"attention_bias": True}, {"mlp_bias": True}])
def test_models_with_biases_are_not_compiled(
    tmp_path: Path, demo_model_dir: Path, options: dict[str, object]
) -> None:
    assert open_core(save_tiny(tmp_path, demo_model_dir, **options)).compiler is None


PLAIN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
UNKNOWN_TO_SEGMENTS: dict[str, tuple[str, dict[str, object]]] = {
    "norms after blocks": ("Olmo2Config", {}),
    "norms around blocks": ("Gemma2Config", {"head_dim": 16}),
    "two rotations": ("Gemma3TextConfig", {"head_dim": 16}),
    "norms of queries and keys": ("Qwen3Config", {"head_dim": 16}),
    "a factor on the residual": ("GraniteConfig", {"residual_multiplier": 0.5}),
    "a factor on the embedding": ("GraniteConfig", {"embedding_multiplier": 3.0}),
    "layers without rotation": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "no rotation at all": ("SmolLM3Config", {"no_rope_layers": [0, 0, 0]}),
    "partial rotation": (
        "Phi3Config",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "experts": ("MixtralConfig", {"num_local_experts": 4}),
    "another activation": ("LlamaConfig", {"hidden_act": "gelu"}),
    "biases": ("Qwen2Config", {}),
}


@pytest.mark.parametrize("case", UNKNOWN_TO_SEGMENTS)
def test_what_segments_do_not_know_is_not_compiled(
    tmp_path: Path, demo_model_dir: Path, case: str
) -> None:
    name, options = UNKNOWN_TO_SEGMENTS[case]
    core = open_core(save_family(tmp_path, demo_model_dir, name, **options))
    assert isinstance(core.runner, ModelRunner)
    assert isinstance(core.runner.model, Decoder)
    assert segment_shape(core.runner.model) is None
    assert core.compiler is None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Phi3Config", {}),
        ("MistralConfig", {"sliding_window": 12}),
        ("GraniteConfig", {"attention_multiplier": 0.1, "logits_scaling": 3.0}),
    ],
)
def test_what_lies_outside_of_segments_may_be_anything(
    tmp_path: Path, demo_model_dir: Path, name: str, options: dict[str, object]
) -> None:
    runner = open_core(save_family(tmp_path, demo_model_dir, name, **options)).runner
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    token_ids = list(range(20, 50))
    wanted = step(runner, token_ids, 0)
    runner.model = CompiledDecoder(model, UncompiledSegment(model))  # type: ignore[arg-type]
    found = [step(runner, token_ids[: at + 1], at) for at in range(len(token_ids))]
    assert relative_error(torch.cat(found), wanted) < 1.5e-2


def test_float32_and_enforce_eager_compile_nothing(tmp_path: Path, demo_model_dir: Path) -> None:
    folder = save_tiny(tmp_path, demo_model_dir)
    assert open_core(folder, dtype="float32").compiler is None
    assert open_core(folder, enforce_eager=True).compiler is None
    assert open_core(folder).compiler is not None


def test_a_damaged_package_is_not_used(tmp_path: Path, demo_model_dir: Path) -> None:
    core = open_core(save_tiny(tmp_path, demo_model_dir))
    assert isinstance(core.runner, ModelRunner)
    shape = segment_shape(core.runner.model)  # type: ignore[arg-type]
    assert shape is not None
    path = package_path(tmp_path, shape, torch.bfloat16)
    path.parent.mkdir()
    path.write_bytes(b"no package at all")
    assert load_package(path, shape, torch.bfloat16) is None


@pytest.mark.slow
def test_a_compiled_package_is_built_once_and_gives_the_same_logits(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    runner = open_core(save_tiny(tmp_path / "model", demo_model_dir)).runner
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    shape = segment_shape(model)
    assert shape is not None
    token_ids = list(range(60, 90))
    wanted = step(runner, token_ids, 0)
    compiler = DecodeCompiler(runner, model, shape, tmp_path)
    assert not compiler.use_package()
    compiler.compile_now()
    assert compiler.is_compiled
    found = [step(runner, token_ids[: at + 1], at) for at in range(len(token_ids))]
    assert relative_error(torch.cat(found), wanted) < 1.5e-2
    again = DecodeCompiler(runner, model, shape, tmp_path)
    assert again.use_package()


def test_example_inputs_are_the_same_every_time(tmp_path: Path, demo_model_dir: Path) -> None:
    core = open_core(save_tiny(tmp_path, demo_model_dir))
    shape = segment_shape(core.runner.model)  # type: ignore[attr-defined]
    assert shape is not None
    one, other = example_inputs(shape, torch.bfloat16), example_inputs(shape, torch.bfloat16)
    pairs = zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_compiler_imports_nothing_from_the_folder_it_is_started_in(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    """A model's folder, say, with a ``random.py`` in it."""
    core = open_core(save_tiny(tmp_path / "model", demo_model_dir))
    shape = segment_shape(core.runner.model)  # type: ignore[attr-defined]
    assert shape is not None
    (tmp_path / "json.py").write_text("raise SystemExit('trapped')")
    program, *flags = command(tmp_path / "package.pt2", shape, torch.bfloat16)[:2]
    done = subprocess.run([program, *flags, "-c", "import json"], cwd=tmp_path, check=False)
    assert done.returncode == 0


def test_giving_up_ends_the_compiler_with_its_children(tmp_path: Path) -> None:
    program = "import subprocess as s; s.run(['sleep', '100'])"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0
    )
    end_group(process)  # would wait for the child, which holds the pipe, were it left
    assert process.returncode
