"""Puts the parts together: the only place where plugins, checkpoint, model, cache and scheduler
meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.checkpoint.generation_defaults import load_generation_defaults
from ingle.checkpoint.hub import resolve_model
from ingle.checkpoint.load_report import LoadProgress, LoadReport
from ingle.checkpoint.model_config import ModelConfig
from ingle.checkpoint.safetensors import Checkpoint
from ingle.checkpoint.template_source import read_template
from ingle.checkpoint.tokenizer import Tokenizer, load_tokenizer
from ingle.config import EngineConfig
from ingle.engine.attention_choice import AttentionNeeds, BackendMaker, choose_attention
from ingle.engine.block_manager import BlockManager
from ingle.engine.cache_geometry import geometries
from ingle.engine.compile_jobs import background_compiler
from ingle.engine.device import choose_device, choose_dtype
from ingle.engine.draft_start import draft_model, load_draft
from ingle.engine.engine_core import EngineCore
from ingle.engine.fit_inputs import (
    DENSE,
    block_bytes,
    cache_sizes,
    overridden,
    read_model,
    weigh_checkpoint,
)
from ingle.engine.graph_start import begin_running_ahead
from ingle.engine.info import EngineInfo
from ingle.engine.kernel_choice import KernelChooser
from ingle.engine.kv_start import (
    PROMPT,
    PROMPT_TOKENS,
    CacheStart,
    cache_name,
    file_fact,
    load_scales,
    settle_caches,
)
from ingle.engine.memory import (
    Alternatives,
    CachePlan,
    allocate_caches,
    available_bytes,
    held_bytes,
    memory_report,
    plan_cache,
)
from ingle.engine.memory_plan import (
    MemoryPlan,
    cache_limit,
    place_embeddings,
    plan_memory,
    usable_on_card,
)
from ingle.engine.model_runner import ModelRunner
from ingle.engine.offload import choose_offload
from ingle.engine.prompt_lookup import LookupLimits, PromptLookup
from ingle.engine.release import release_memory
from ingle.engine.scheduler import Scheduler, SchedulerLimits
from ingle.engine.speculation import Speculation
from ingle.model.build import build_decoder
from ingle.model.compiled_decoder import CompiledDecoder
from ingle.model.decoder import Model
from ingle.model.streamed_layers import Offload
from ingle.model.weights import WeightSource
from ingle.plugin import CheckpointInfo, DeviceInfo, KVCacheFormat, WeightLoader
from ingle.registry.choose import (
    ChosenFormat,
    choose_kv_cache_formats,
    choose_weight_format,
    find_by_name,
)
from ingle.registry.kernels import KernelSelector
from ingle.registry.loader import load_plugins
from ingle.registry.plugin_registry import PluginRegistry
from ingle.sampling.grammar import GrammarCompiler
from ingle.sampling.sampler import Sampler

logger = logging.getLogger("ingle.engine")


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


def build_engine_core(
    config: EngineConfig,
    on_progress: Callable[[int, int], None] | None = None,
    device: DeviceInfo | None = None,
) -> EngineCore:
    """Loads a model and everything around it.

    Args:
        config: What to load and how.
        on_progress: Called with (bytes read, bytes in all) while weights are read.
        device: Where, in place of what ``config`` says.

    Raises:
        ConfigError: An option cannot work.
        CheckpointError: The model folder cannot be used.
        PluginError: A plugin that is needed failed, or none reads the checkpoint.
        CapacityError: The KV cache does not fit.
    """
    draft = None
    if config.draft_model is not None:
        draft = load_draft(config, partial(build_engine_core, device=device))
    path = resolve_model(config.model, config.revision)
    with LoadProgress(path, on_progress=on_progress) as progress:
        opened = choose_parts(config, path, progress.checkpoint, device)
        tokenizer = load_tokenizer(config.tokenizer or path, read_template(config.chat_template))
        before = held_bytes(opened.device)
        memory, plan = _plan(config, opened)
        model, chooser = _load_model(config, opened, memory, plan)
        grammars = GrammarCompiler(
            tokenizer.to_json, opened.model.vocab_size, opened.model.eos_token_ids
        )
        caches = allocate_caches(
            opened.model, plan, opened.cache_formats, opened.dtype, opened.device
        )
        scaled = load_scales(config, caches, opened.checkpoint)
        runner = _runner(opened, plan, model, caches, grammars)
        report = progress.report()
        progress.checkpoint.close()
    start = _cache_start(config, opened, plan, tokenizer)
    info = replace(
        _info(config, opened, plan, dict(chooser.counts), report),
        kv_cache_report=settle_caches(start, model, caches, scaled),
    )
    core = EngineCore(
        _scheduler(
            config, opened.model, plan, _speculation(config, draft, tokenizer, opened.model)
        ),
        runner,
        tokenizer,
        info,
        max_queue_len=config.max_queue_len,
        seed=config.seed,
    )
    core.grammars, core.draft = grammars, draft
    if not config.enforce_eager:
        core.compiler = background_compiler(runner, model, chooser.functions, opened.device)
    line = begin_running_ahead(config, core, model, opened.device)
    release_memory()
    is_compiled = isinstance(runner.model, CompiledDecoder)
    measured = memory_report(memory, plan, before, held_bytes(opened.device), is_compiled)
    logger.info(measured)
    loaded = "\n".join(filter(None, (core.info.load_report, line)))
    core.info = replace(core.info, memory_report=measured, load_report=loaded)
    return core


def choose_parts(
    config: EngineConfig, path: Path, checkpoint: Checkpoint, device: DeviceInfo | None = None
) -> Opened:
    """Chooses formats, device and dtype for a checkpoint; reads headers only."""
    info = overridden(config, checkpoint.info())
    model = read_model(config, path, info)
    device = device or choose_device(config.device)
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


def _plan(config: EngineConfig, opened: Opened) -> tuple[MemoryPlan, CachePlan]:
    """The memory plan from headers, and the cache that fits what is free now."""
    device, model = opened.device, opened.model
    registry, dtype = opened.registry, opened.dtype
    plan = plan_memory(
        config,
        model,
        weigh_checkpoint(opened.info, model, opened.chosen.format, registry, dtype),
        block_bytes(model, opened.cache_formats, config, dtype),
        dtype.itemsize,
        device.type,
    )
    usable = available_bytes(device)
    if device.type == "cuda":
        # The context is on the card by now, so what is free does not include it.
        plan = replace(plan, context_bytes=0)
        usable = usable_on_card(config, device.total_memory, usable)
        plan = place_embeddings(config, plan, model, usable)
    budget = cache_limit(config, plan, usable, device.type)
    eager = replace(plan, compiled_bytes=0)
    others = Alternatives(
        caches=cache_sizes(model, registry, device, config, dtype),
        eager_budget=cache_limit(config, eager, usable, device.type) if plan.compiled_bytes else 0,
    )
    return plan, plan_cache(config, model, plan, budget, device.type, others)


def _load_model(
    config: EngineConfig, opened: Opened, memory: MemoryPlan, plan: CachePlan
) -> tuple[Model, KernelChooser]:
    """The model, and who chose the kernels of its linears."""
    selector = KernelSelector(
        opened.registry.matmul_kernels(opened.device),
        opened.registry.self_checks,
        opened.chosen.format.max_relative_error,
    )
    max_rows = config.max_num_batched_tokens
    chooser = KernelChooser(selector, opened.device, opened.dtype, max_rows)
    source = WeightSource(
        opened.checkpoint,
        _loaders(opened),
        chooser,
        opened.dtype,
        opened.device,
        embeddings_on_host=memory.embeddings_on_host,
    )
    offload = choose_offload(config, opened.model, opened.device, memory)
    model = _build(opened, source, plan, offload)
    return model, chooser


def _build(opened: Opened, source: WeightSource, plan: CachePlan, offload: Offload | None) -> Model:
    """The model by whoever's code computes it."""
    backend = _backend(opened, plan)
    if opened.model.implementation == "ingle":
        return build_decoder(opened.model, source, backend, plan.max_model_len, offload)
    from ingle.model.transformers_backend.model import build_transformers_model

    where, raw = str(opened.info.path / "config.json"), dict(opened.info.hf_config)
    return build_transformers_model(where, raw, opened.model, source, backend, plan.max_model_len)


def _loaders(opened: Opened) -> list[WeightLoader]:
    """The chosen format's loader, and after it the dense one for what is left unquantised."""
    loaders = [opened.chosen.format.open(opened.info)]
    if opened.chosen.format.name != DENSE:
        dense = next(o for o in opened.registry.weight_formats() if o.item.name == DENSE)
        loaders.append(dense.item.open(opened.info))
    return loaders


def _runner(
    opened: Opened,
    plan: CachePlan,
    model: Model,
    caches: Sequence[LayerCache],
    grammars: GrammarCompiler,
) -> ModelRunner:
    sampler = Sampler(opened.model.eos_token_ids, grammars)
    device = torch.device(opened.device.torch_device)
    return ModelRunner(model, caches, sampler, plan.block_size, device)


def _cache_start(
    config: EngineConfig, opened: Opened, plan: CachePlan, tokenizer: Tokenizer
) -> CacheStart:
    exact = find_by_name(
        opened.registry,
        opened.registry.kv_cache_formats(opened.device),
        "native",
        "--kv-cache-dtype",
    ).item
    usable = (plan.num_blocks - 1) * plan.block_size
    longest = min(PROMPT_TOKENS, usable, plan.max_model_len)
    prompt = [i for i in tokenizer.encode(PROMPT) if i < opened.model.vocab_size]
    facts: dict[str, object] = {
        "cache": cache_name(opened.cache_formats),
        "plugins": sorted(
            f"{plugin.distribution} {plugin.version}" for plugin in opened.registry.report.plugins
        ),
        "dtype": str(opened.dtype),
        "device": opened.device.name,
        "tokens": longest,
        "measured": config.calculate_kv_scales,
        "scales": file_fact(config.quantization_param_path),
        "overrides": [config.hf_overrides, config.rope_scaling, config.quantization],
    }
    return CacheStart(
        config=config,
        info=opened.info,
        name=cache_name(opened.cache_formats),
        exact=exact,
        device=opened.device,
        prompt=prompt[:longest],
        facts=facts,
    )


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


def _scheduler(
    config: EngineConfig, model: ModelConfig, plan: CachePlan, speculation: Speculation | None
) -> Scheduler:
    blocks = BlockManager(
        plan.num_blocks, plan.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    limits = SchedulerLimits(
        max_num_seqs=config.max_running,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
    )
    return Scheduler(blocks, limits, model.eos_token_ids, speculation)


def _speculation(
    config: EngineConfig, draft: EngineCore | None, tokenizer: Tokenizer, model: ModelConfig
) -> Speculation | None:
    num_tokens = config.num_speculative_tokens
    if draft is not None:
        guesser = draft_model(draft, str(config.draft_model), tokenizer, model.vocab_size)
        return Speculation(drafter=guesser.drafter, num_tokens=num_tokens)
    if config.drafts_from is None:
        return None
    limits = LookupLimits(
        shortest=config.ngram_prompt_lookup_min,
        longest=config.ngram_prompt_lookup_max,
        num_tokens=num_tokens,
    )
    return Speculation(drafter=partial(PromptLookup, limits), num_tokens=num_tokens)


def _info(
    config: EngineConfig,
    opened: Opened,
    plan: CachePlan,
    kernels: dict[str, int],
    report: LoadReport,
) -> EngineInfo:
    path = opened.info.path
    ignored = config.generation_config != "auto"
    defaults = {} if ignored else asdict(load_generation_defaults(path))
    return EngineInfo(
        model=config.model,
        max_model_len=plan.max_model_len,
        vocab_size=opened.model.vocab_size,
        model_path=str(path),
        eos_token_ids=opened.model.eos_token_ids,
        dtype=str(opened.dtype).removeprefix("torch."),
        device=opened.device.torch_device,
        quantization=opened.chosen.format.name,
        kv_cache_dtype=cache_name(opened.cache_formats),
        plugin_report={
            **opened.registry.report.to_dict(),
            "chosen": {
                **_choice(opened.chosen, kernels),
                "implementation": opened.model.implementation,
            },
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
