"""Compiled decode steps against the decoder they stand in for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from ingle.config import EngineConfig
from ingle.engine.background_compiler import BackgroundCompiler, end_group
from ingle.engine.decode_compiler import DecodeCompiler
from ingle.engine.engine import build_engine_core
from ingle.engine.engine_core import EngineCore
from ingle.engine.model_runner import ModelRunner
from ingle.engine.step import ScheduledRequest
from ingle.model.decoder import Decoder
from ingle.model.segment_cache import cache_sides
from ingle.model.segment_package import (
    command,
    example_state,
    example_weights,
    load_package,
    package_path,
    segment_module,
)
from ingle.model.segment_plan import (
    SegmentShapes,
    layers_at_once,
    segment_shapes,
    segment_weights,
)
from ingle.model.segment_shape import as_json, read_shape
from ingle.plugin import KVStore
from ingle.request import SamplingParams
from ingle.testing.eager_segments import eager_decoder


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


SCATTERED = [3, 1, 2, 4]
IN_ORDER = [2, 3, 4, 5]


def step(
    runner: ModelRunner, token_ids: list[int], start: int, blocks: list[int] = SCATTERED
) -> torch.Tensor:
    """Logits after ``token_ids[start:]``, the tokens before being in the cache: [T, V]."""
    share = ScheduledRequest(
        request_id="r",
        token_ids=token_ids[start:],
        num_computed_tokens=start,
        block_table=blocks,
        params=SamplingParams(),
        seed=0,
        prompt_token_ids=token_ids,
        output_token_ids=[],
        samples=False,
    )
    with torch.inference_mode():
        hidden = runner.model.hidden_states(runner._batch((share,)), runner.caches)
        return runner.model.logits(hidden)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("blocks", [SCATTERED, IN_ORDER])
def test_segments_compute_what_the_layers_compute(
    tmp_path: Path, demo_model_dir: Path, blocks: list[int]
) -> None:
    runner = open_core(save_tiny(tmp_path, demo_model_dir)).runner
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    token_ids = list(range(20, 50))
    wanted = step(runner, token_ids, 0, blocks)
    runner.model = eager_decoder(runner, model)
    found = [step(runner, token_ids[:1], 0, blocks)]
    found += [step(runner, token_ids[: at + 1], at, blocks) for at in range(1, len(token_ids))]
    assert relative_error(torch.cat(found), wanted) < 1.5e-2


def test_a_segment_writes_the_cache_as_the_layers_do(tmp_path: Path, demo_model_dir: Path) -> None:
    """What a step leaves in the cache is read by later steps, whichever path they take."""
    runner = open_core(save_tiny(tmp_path, demo_model_dir)).runner
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    token_ids = list(range(20, 50))
    for at in range(len(token_ids)):
        step(runner, token_ids[: at + 1], at, IN_ORDER)
    wanted = [store.tensors()["data"].clone() for store in stores(runner)]
    for store in stores(runner):
        store.tensors()["data"].zero_()
    runner.model = eager_decoder(runner, model)
    for at in range(len(token_ids)):
        step(runner, token_ids[: at + 1], at, IN_ORDER)
    for store, before in zip(stores(runner), wanted, strict=True):
        assert relative_error(store.tensors()["data"].float(), before.float()) < 1.5e-2


def test_what_lies_behind_a_sequences_end_reaches_no_logits(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    """A request that failed may have left no numbers in a block that another has now."""
    runner = open_core(save_tiny(tmp_path, demo_model_dir)).runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.model, Decoder)
    runner.model = eager_decoder(runner, runner.model)
    token_ids = list(range(20, 40))

    def answers(left: float) -> torch.Tensor:
        for store in stores(runner):
            store.tensors()["data"].fill_(left)
        return torch.cat([step(runner, token_ids[: at + 1], at) for at in range(len(token_ids))])

    assert torch.equal(answers(torch.nan), answers(0.0))


def stores(runner: ModelRunner) -> list[KVStore]:
    return [store for cache in runner.caches for store in (cache.k_store, cache.v_store)]


PLAIN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
UNKNOWN_TO_SEGMENTS: dict[str, tuple[str, dict[str, object]]] = {
    "norms after blocks": ("Olmo2Config", {}),
    "norms around blocks": ("Gemma2Config", {"head_dim": 16}),
    "two rotations": ("Gemma3TextConfig", {"head_dim": 16}),
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
}


@pytest.mark.parametrize("case", UNKNOWN_TO_SEGMENTS)
def test_what_segments_do_not_know_is_not_compiled(
    tmp_path: Path, demo_model_dir: Path, case: str
) -> None:
    name, options = UNKNOWN_TO_SEGMENTS[case]
    core = open_core(save_family(tmp_path, demo_model_dir, name, **options))
    assert isinstance(core.runner, ModelRunner)
    assert isinstance(core.runner.model, Decoder)
    assert segment_shapes(core.runner.model, 16) is None
    assert core.compiler is not None  # prompts have functions of their own
    assert not any(isinstance(job, DecodeCompiler) for job in core.compiler.jobs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Phi3Config", {}),
        ("MistralConfig", {"sliding_window": 12}),
        ("Qwen2Config", {}),
        ("Qwen3Config", {"head_dim": 32}),
        ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
        ("GraniteConfig", {"attention_multiplier": 0.1, "logits_scaling": 3.0}),
    ],
)
def test_segments_know_windows_biases_head_norms_and_factors(
    tmp_path: Path, demo_model_dir: Path, name: str, options: dict[str, object]
) -> None:
    runner = open_core(save_family(tmp_path, demo_model_dir, name, **options)).runner
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    token_ids = list(range(20, 50))
    wanted = step(runner, token_ids, 0)
    runner.model = eager_decoder(runner, model)
    found = [step(runner, token_ids[: at + 1], at) for at in range(len(token_ids))]
    assert relative_error(torch.cat(found), wanted) < 1.5e-2


def test_float32_and_enforce_eager_compile_nothing(tmp_path: Path, demo_model_dir: Path) -> None:
    folder = save_tiny(tmp_path, demo_model_dir)
    assert open_core(folder, dtype="float32").compiler is None
    assert open_core(folder, enforce_eager=True).compiler is None
    assert open_core(folder).compiler is not None


def wanted_shapes(core: EngineCore) -> SegmentShapes:
    assert isinstance(core.runner, ModelRunner)
    assert isinstance(core.runner.model, Decoder)
    shapes = segment_shapes(core.runner.model, 16, cache_sides(core.runner.caches))
    assert shapes is not None
    return shapes


@pytest.mark.parametrize("num_layers", [2, 3, 16, 24, 28, 30, 32, 36, 61, 80])
def test_few_calls_take_all_the_layers_and_few_of_them_are_compiled(num_layers: int) -> None:
    at_once, at_end = layers_at_once(num_layers)
    calls, rest = divmod(num_layers - at_end, at_once)
    assert rest == 0
    assert calls >= 1
    assert 1 <= at_end <= at_once
    assert at_once + at_end <= 16
    assert calls + 1 <= max(2, -(-num_layers // 5))


def test_a_damaged_package_is_not_used(tmp_path: Path, demo_model_dir: Path) -> None:
    core = open_core(save_tiny(tmp_path, demo_model_dir))
    shape = wanted_shapes(core).head
    weights = segment_weights(core.runner.model).head  # type: ignore[attr-defined]
    path = package_path(tmp_path, shape)
    path.parent.mkdir()
    path.write_bytes(b"no package at all")
    assert load_package(path, shape, weights) is None


@pytest.mark.slow
@pytest.mark.timeout(900)  # four compilations, some 30 s each on a quiet machine
def test_packages_are_built_once_and_give_the_same_logits(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    core = open_core(save_tiny(tmp_path / "model", demo_model_dir))
    runner, shapes = core.runner, wanted_shapes(core)
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    token_ids = list(range(60, 90))
    wanted = step(runner, token_ids, 0)
    compiler = DecodeCompiler(runner, model, shapes, tmp_path)
    assert not compiler.use_packages()
    BackgroundCompiler((compiler,)).compile_now()
    assert compiler.is_compiled
    for blocks in (SCATTERED, IN_ORDER):
        found = [step(runner, token_ids[: at + 1], at, blocks) for at in range(len(token_ids))]
        assert relative_error(torch.cat(found), wanted) < 1.5e-2
    again = DecodeCompiler(runner, model, shapes, tmp_path)
    assert again.use_packages()


def test_examples_are_what_the_functions_take(tmp_path: Path, demo_model_dir: Path) -> None:
    folder = save_family(tmp_path, demo_model_dir, "Qwen3Config", attention_bias=True)
    shapes = wanted_shapes(open_core(folder))
    for shape in (shapes.entry, shapes.layers, shapes.last):
        assert segment_module(shape)(*example_state(shape), example_weights(shape))
    head = shapes.head
    logits = segment_module(head)(*example_state(head), example_weights(head))
    assert logits.shape == (PLAIN["vocab_size"],)


def test_shapes_survive_the_way_to_the_compiler(tmp_path: Path, demo_model_dir: Path) -> None:
    shapes = wanted_shapes(open_core(save_tiny(tmp_path, demo_model_dir)))
    for shape in (shapes.entry, shapes.layers, shapes.last, shapes.head):
        assert read_shape(json.loads(json.dumps(as_json(shape)))) == shape


def test_the_compiler_imports_nothing_from_the_folder_it_is_started_in(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    """A model's folder, say, with a ``random.py`` in it."""
    shape = wanted_shapes(open_core(save_tiny(tmp_path / "model", demo_model_dir))).head
    (tmp_path / "json.py").write_text("raise SystemExit('trapped')")
    program, *flags = command([(tmp_path / "package.pt2", shape)])[:2]
    done = subprocess.run([program, *flags, "-c", "import json"], cwd=tmp_path, check=False)
    assert done.returncode == 0


def test_giving_up_ends_the_compiler_with_its_children(tmp_path: Path) -> None:
    program = "import subprocess as s; s.run(['sleep', '100'])"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, process_group=0
    )
    end_group(process)  # would wait for the child, which holds the pipe, were it left
    assert process.returncode
