"""Reads what a plan needs from a model folder and the plugins: headers and JSON, no weights.

Torch takes longer to load than everything else here together, so it stays out where no plugin
brings it."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ingle.checkpoint.architectures import is_known
from ingle.checkpoint.config_overrides import override_config
from ingle.checkpoint.model_config import ModelConfig, load_model_config
from ingle.checkpoint.safetensors import open_checkpoint
from ingle.config import EngineConfig, parse_object
from ingle.engine.cache_geometry import geometries
from ingle.engine.cards import DEFAULT_LINK, Card, card_of_device
from ingle.engine.dtype_choice import SIZES, PlannedDType, choose_dtype_name
from ingle.engine.fit import Question, Target
from ingle.engine.host_memory import (
    available_host_bytes,
    resident_host_bytes,
    total_host_bytes,
)
from ingle.engine.memory_plan import (
    CPU_IMPORTS,
    CUDA_CONTEXT,
    DESKTOP_RESERVE,
    GIB,
    HEADROOM,
    RESERVE,
)
from ingle.engine.speed import Bandwidths
from ingle.engine.weight_sizes import WeightSizes, weigh
from ingle.errors import PluginError
from ingle.plugin.checkpoint import CheckpointInfo
from ingle.plugin.device import DeviceInfo
from ingle.plugin.kv_cache import KVCacheFormat
from ingle.plugin.linear import WeightFormat
from ingle.registry.choose import choose_kv_cache_formats, choose_weight_format
from ingle.registry.plugin_registry import PluginRegistry

if TYPE_CHECKING:
    import torch

DENSE = "dense"
CARD_FILES: Final = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
"""What a Linux system with a card has, by the driver of NVIDIA, Jetson, WSL or AMD."""


def ask(
    config: EngineConfig, path: Path, registry: PluginRegistry, target: Target, num_sequences: int
) -> Question:
    """The question of whether the model at ``path`` fits ``target``.

    Raises:
        ConfigError: An option cannot work.
        CheckpointError: The folder cannot be used.
        PluginError: No plugin reads it, or one that is needed failed.
    """
    with open_checkpoint(path) as checkpoint:
        info = overridden(config, checkpoint.info())
    model = read_model(config, path, info)
    device = device_of(target)
    dtype = planned_dtype(choose_dtype_name(config.dtype, model.dtype, device))
    chosen = choose_weight_format(registry, info, config.quantization)
    k_format, v_format = choose_kv_cache_formats(registry, config.kv_cache_dtype, info, device)
    name = k_format.name if k_format is v_format else f"k={k_format.name},v={v_format.name}"
    chosen_bytes = {name: block_bytes(model, (k_format, v_format), config, dtype)}
    return Question(
        config=config,
        model=model,
        format_name=chosen.format.name,
        weights=weigh_checkpoint(info, model, chosen.format, registry, dtype),
        block_bytes={**cache_sizes(model, registry, device, config, dtype), **chosen_bytes},
        cache_format=name,
        itemsize=dtype.itemsize,
        target=target,
        num_sequences=num_sequences,
    )


def planned_dtype(name: str) -> torch.dtype | PlannedDType:
    """torch's type of that name where torch is loaded, since a plugin that brings torch may ask it
    for more than its size; else the size alone."""
    loaded = sys.modules.get("torch")
    if loaded is None:
        return PlannedDType(name, SIZES[name])
    dtype: torch.dtype = getattr(loaded, name)
    return dtype


def cache_sizes(
    model: ModelConfig,
    registry: PluginRegistry,
    device: DeviceInfo,
    config: EngineConfig,
    dtype: torch.dtype | PlannedDType,
) -> dict[str, int]:
    """Bytes of a block by cache format, of every format that can store this model's cache."""
    sizes = {}
    for offer in registry.kv_cache_formats(device):
        form = offer.item
        with contextlib.suppress(PluginError):
            sizes[form.name] = block_bytes(model, (form, form), config, dtype)
    return sizes


def read_model(config: EngineConfig, path: Path, info: CheckpointInfo) -> ModelConfig:
    """The model's configuration, and whose code will compute it.

    Raises:
        CheckpointError: When nobody's can.
    """
    if config.model_impl == "ingle" or (config.model_impl == "auto" and is_known(info.hf_config)):
        return load_model_config(path, info)
    from ingle.model.transformers_backend.config import load_transformers_config

    return load_transformers_config(path, info)


def overridden(config: EngineConfig, info: CheckpointInfo) -> CheckpointInfo:
    """``info`` with what the user says in place of config.json."""
    changes = parse_object("--hf-overrides", config.hf_overrides)
    scaling = parse_object("--rope-scaling", config.rope_scaling)
    return replace(info, hf_config=override_config(info.hf_config, changes, scaling))


def weigh_checkpoint(
    info: CheckpointInfo,
    model: ModelConfig,
    chosen: WeightFormat,
    registry: PluginRegistry,
    dtype: torch.dtype | PlannedDType,
) -> WeightSizes:
    """The sizes of a checkpoint's weights, read by ``chosen`` and the dense format."""
    dense = next(o.item for o in registry.weight_formats() if o.item.name == DENSE)
    packed = None if chosen.name == DENSE else chosen.open(info)
    return weigh(info, model, packed, dense.open(info), dtype.itemsize)


def block_bytes(
    model: ModelConfig,
    formats: tuple[KVCacheFormat, KVCacheFormat],
    config: EngineConfig,
    dtype: torch.dtype | PlannedDType,
) -> int:
    """One cache block over all layers and both sides, as the formats count it."""
    sides = zip(formats, geometries(model, config.block_size, dtype), strict=True)
    return model.num_layers * sum(form.bytes_per_block(geometry) for form, geometry in sides)


def device_of(target: Target) -> DeviceInfo:
    """The target as plugins see it. Nobody asks a planned card for kernels, so its compute
    capability only has to be one that every format accepts."""
    return DeviceInfo(
        type=target.device_type,
        capability=(8, 0) if target.device_type == "cuda" else None,
        total_memory=target.total_bytes,
        name=target.name,
    )


def planned_card(card: Card | None, memory: int | None, desktop: bool) -> Target:
    """A card that need not be here: from the table, or by its memory alone."""
    total = memory if memory is not None else 0 if card is None else card.memory_bytes
    name = f"a card of {total / GIB:.4g} GiB" if card is None else card.name
    bandwidths = (
        Bandwidths(link=DEFAULT_LINK)
        if card is None
        else Bandwidths(memory=card.bandwidth_gb * 1e9, link=card.link_gb * 1e9)
    )
    return Target(
        name=name,
        device_type="cuda",
        total_bytes=total,
        reserve_bytes=DESKTOP_RESERVE if desktop else RESERVE,
        bandwidths=bandwidths,
    )


def this_machine(requested: str) -> Target:
    """The card that is here, else the processor and the memory that is free now.

    Raises:
        ConfigError: When CUDA was asked for and there is none.
    """
    if requested == "cpu" or (requested == "auto" and not has_card()):
        return _this_cpu()
    import torch

    from ingle.engine.device import choose_device

    device = choose_device(requested)
    if device.type == "cpu":
        return _this_cpu()
    free = int(torch.cuda.mem_get_info(device.index)[0])
    card = card_of_device(device.name)
    # Asking has already brought CUDA's context onto the card, and the plan counts it as a term.
    others = device.total_memory - free - CUDA_CONTEXT
    return Target(
        name=device.name,
        device_type="cuda",
        total_bytes=device.total_memory,
        reserve_bytes=HEADROOM + max(0, others),
        bandwidths=planned_card(card, None, False).bandwidths,
    )


def has_card(root: Path = Path("/")) -> bool:
    """Whether this system may have a card that torch can use; asks no driver.

    Args:
        root: Where ``dev`` is mounted.
    """
    if sys.platform != "linux":
        return True
    return any((root / name.lstrip("/")).exists() for name in CARD_FILES)


def _this_cpu() -> Target:
    total, free = total_host_bytes(), available_host_bytes()
    imports = max(0, CPU_IMPORTS - (resident_host_bytes() or 0))
    total, free = max(total, free), max(0, free - imports)
    return Target(name="this CPU", device_type="cpu", total_bytes=total, reserve_bytes=total - free)
