"""Puts the parts together: the only place where plugins, checkpoint, model, cache and scheduler
meet."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ingle.checkpoint.config_overrides import override_config
from ingle.checkpoint.generation_defaults import load_generation_defaults
from ingle.checkpoint.hub import resolve_model
from ingle.checkpoint.load_report import LoadProgress, LoadReport
from ingle.checkpoint.model_config import ModelConfig, load_model_config
from ingle.checkpoint.safetensors import Checkpoint
from ingle.checkpoint.tokenizer import load_tokenizer
from ingle.config import EngineConfig, parse_object
from ingle.engine.attention_choice import AttentionNeeds, BackendMaker, choose_attention
from ingle.engine.block_manager import BlockManager
from ingle.engine.decode_compiler import decode_compiler
from ingle.engine.device import choose_device, choose_dtype
from ingle.engine.engine_core import EngineCore
from ingle.engine.info import EngineInfo
from ingle.engine.kernel_choice import KernelChooser
from ingle.engine.memory import (
    CachePlan,
    allocate_caches,
    available_bytes,
    cache_budget,
    geometries,
    load_cache_scales,
    plan_cache,
)
from ingle.engine.model_runner import ModelRunner
from ingle.engine.scheduler import Scheduler, SchedulerLimits
from ingle.model.build import build_decoder
from ingle.model.decoder import Decoder
from ingle.model.weights import WeightSource
from ingle.plugin import CheckpointInfo, DeviceInfo, KVCacheFormat, WeightLoader
from ingle.registry.choose import ChosenFormat, choose_kv_cache_formats, choose_weight_format
from ingle.registry.kernels import KernelSelector
from ingle.registry.loader import load_plugins
from ingle.registry.plugin_registry import PluginRegistry
from ingle.sampling.grammar import GrammarCompiler
from ingle.sampling.sampler import Sampler

DENSE = "dense"
"""Core's own format: it also reads what a quantised checkpoint leaves unquantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint with everything decided about it before a weight is read."""

    checkpoint: Checkpoint
    info: CheckpointInfo
    model: ModelConfig
    device: DeviceInfo
    dtype: torch.dtype
    registry: PluginRegistry
    chosen: ChosenFormat
    cache_formats: tuple[KVCacheFormat, KVCacheFormat]


def build_engine_core(config: EngineConfig) -> EngineCore:
    """Loads a model and everything around it.

    Raises:
        ConfigError: An option cannot work.
        CheckpointError: The model folder cannot be used.
        PluginError: A plugin that is needed failed, or none reads the checkpoint.
        CapacityError: The KV cache does not fit.
    """
    path = resolve_model(config.model, config.revision)
    with LoadProgress(path) as progress:
        opened = choose_parts(config, path, progress.checkpoint)
        tokenizer = load_tokenizer(config.tokenizer or path)
        plan = _plan_cache(config, opened)
        model, kernels = _load_model(opened, plan, config.max_num_batched_tokens)
        grammars = GrammarCompiler(
            tokenizer.to_json, opened.model.vocab_size, opened.model.eos_token_ids
        )
        runner = _runner(opened, plan, model, grammars)
        report = progress.report()
        progress.checkpoint.close()
    info = _info(config, opened, plan, kernels, report)
    core = EngineCore(
        _scheduler(config, opened.model, plan),
        runner,
        tokenizer,
        info,
        max_queue_len=config.max_queue_len,
        seed=config.seed,
    )
    core.grammars = grammars
    if not config.enforce_eager:
        core.compiler = decode_compiler(runner, model, opened.device)
    return core


def choose_parts(config: EngineConfig, path: Path, checkpoint: Checkpoint) -> Opened:
    """Chooses formats, device and dtype for a checkpoint; reads headers only."""
    info = _overridden(config, checkpoint.info())
    model = load_model_config(path, info)
    device = choose_device(config.device)
    registry = load_plugins(config.disable_plugin, config.strict_plugins)
    return Opened(
        checkpoint=checkpoint,
        info=info,
        model=model,
        device=device,
        dtype=choose_dtype(config.dtype, model.dtype, device),
        registry=registry,
        chosen=choose_weight_format(registry, info, config.quantization),
        cache_formats=choose_kv_cache_formats(registry, config.kv_cache_dtype, info, device),
    )


def _overridden(config: EngineConfig, info: CheckpointInfo) -> CheckpointInfo:
    """``info`` with what the user says in place of config.json."""
    changes = parse_object("--hf-overrides", config.hf_overrides)
    scaling = parse_object("--rope-scaling", config.rope_scaling)
    return replace(info, hf_config=override_config(info.hf_config, changes, scaling))


def _plan_cache(config: EngineConfig, opened: Opened) -> CachePlan:
    pairs = zip(
        opened.cache_formats,
        geometries(opened.model, config.block_size, opened.dtype),
        strict=True,
    )
    layer_bytes = sum(form.bytes_per_block(geometry) for form, geometry in pairs)
    free = available_bytes(opened.device) - opened.checkpoint.total_bytes
    budget = cache_budget(config, opened.device, free)
    block_bytes = layer_bytes * opened.model.num_layers
    return plan_cache(config, opened.model, opened.device, block_bytes, budget)


def _load_model(opened: Opened, plan: CachePlan, max_rows: int) -> tuple[Decoder, dict[str, int]]:
    """The model, and how many linears each kernel serves."""
    selector = KernelSelector(
        opened.registry.matmul_kernels(opened.device),
        opened.registry.self_checks,
        opened.chosen.format.max_relative_error,
    )
    chooser = KernelChooser(selector, opened.device, opened.dtype, max_rows)
    source = WeightSource(opened.checkpoint, _loaders(opened), chooser, opened.dtype, opened.device)
    model = build_decoder(opened.model, source, _backend(opened, plan), plan.max_model_len)
    return model, dict(chooser.counts)


def _loaders(opened: Opened) -> list[WeightLoader]:
    """The chosen format's loader, and after it the dense one for what is left unquantised."""
    loaders = [opened.chosen.format.open(opened.info)]
    if opened.chosen.format.name != DENSE:
        dense = next(o for o in opened.registry.weight_formats() if o.item.name == DENSE)
        loaders.append(dense.item.open(opened.info))
    return loaders


def _runner(
    opened: Opened, plan: CachePlan, model: Decoder, grammars: GrammarCompiler
) -> ModelRunner:
    caches = allocate_caches(opened.model, plan, opened.cache_formats, opened.dtype, opened.device)
    load_cache_scales(caches, opened.checkpoint)
    sampler = Sampler(opened.model.eos_token_ids, grammars)
    device = torch.device(opened.device.torch_device)
    return ModelRunner(model, caches, sampler, plan.block_size, device)


def _backend(opened: Opened, plan: CachePlan) -> BackendMaker:
    scales = opened.model.scales
    needs = AttentionNeeds(
        device=opened.device,
        dtype=opened.dtype,
        num_heads=opened.model.num_heads,
        geometry=geometries(opened.model, plan.block_size, opened.dtype),
        formats=opened.cache_formats,
        scale=scales.attention_scale,
        softcap=scales.attention_softcap,
    )
    with torch.inference_mode():
        return choose_attention(needs)


def _scheduler(config: EngineConfig, model: ModelConfig, plan: CachePlan) -> Scheduler:
    blocks = BlockManager(
        plan.num_blocks, plan.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    limits = SchedulerLimits(
        max_num_seqs=config.max_running,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
    )
    return Scheduler(blocks, limits, model.eos_token_ids)


def _info(
    config: EngineConfig,
    opened: Opened,
    plan: CachePlan,
    kernels: dict[str, int],
    report: LoadReport,
) -> EngineInfo:
    k_format, v_format = opened.cache_formats
    cache = k_format.name if k_format is v_format else f"k={k_format.name},v={v_format.name}"
    path = opened.info.path
    defaults = asdict(load_generation_defaults(path))
    return EngineInfo(
        model=config.model,
        max_model_len=plan.max_model_len,
        vocab_size=opened.model.vocab_size,
        model_path=str(path),
        eos_token_ids=opened.model.eos_token_ids,
        dtype=str(opened.dtype).removeprefix("torch."),
        device=opened.device.torch_device,
        quantization=opened.chosen.format.name,
        kv_cache_dtype=cache,
        plugin_report={
            **opened.registry.report.to_dict(),
            "chosen": _choice(opened.chosen, kernels),
        },
        generation_defaults={k: v for k, v in defaults.items() if v is not None},
        load_report=report.text(),
        load_seconds=report.seconds,
    )


def _choice(chosen: ChosenFormat, kernels: dict[str, int]) -> dict[str, object]:
    """Which format reads the checkpoint and why, and how many linears each kernel serves."""
    return {
        "format": chosen.format.name,
        "plugin": chosen.plugin,
        "distribution": chosen.distribution,
        "version": chosen.version,
        "reason": chosen.reason,
        "linears_per_kernel": kernels,
    }
