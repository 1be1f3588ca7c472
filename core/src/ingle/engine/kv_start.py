"""What a KV cache that is not exact goes through before it serves: its scales are read or measured,
and what it costs is checked and said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ingle.attention.layer_cache import LayerCache
from ingle.config import EngineConfig
from ingle.engine.kv_check import CACHE_FILE, CacheCheck, check_key, compare, recall, remember
from ingle.engine.kv_exact import (
    FIRST_BLOCK,
    WatchedCache,
    batches,
    measures,
    watched_caches,
)
from ingle.engine.kv_scale_file import ScaleFile
from ingle.model.decoder import Model
from ingle.plugin import CheckpointInfo, DeviceInfo, KVCacheFormat, KVStore
from ingle.plugin.cache_folder import default_cache_folder
from ingle.plugin.checkpoint import TensorReader

logger = logging.getLogger("ingle.engine")

PROMPT_TOKENS = 128
PROMPT = """The lighthouse keeper wrote everything down: the weather at dawn, the ships that passed,
the price of oil (4.75 a can), and on 17 March 1893 a single line, "Nobody came." His daughter read
it aloud a hundred years later. She laughed; then she asked what 2,048 divided by 16 was.
def keep(log: list[str], *, limit: int = 128) -> dict[str, int]:
    return {line.strip(): len(line) for line in log[:limit] if line}
Le gardien ferme la porte à clé. Der Leuchtturm steht noch. 灯塔还在。 Маяк стоит.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStart:
    """Everything that is needed to prepare a cache.

    Attributes:
        config: The engine's options.
        info: The checkpoint.
        name: What the cache is called: a format, or one per side.
        exact: The format that keeps what it is given.
        device: Where the model is.
        prompt: Token ids of ``PROMPT``.
        facts: What besides the model's files the figures depend on.
    """

    config: EngineConfig
    info: CheckpointInfo
    name: str
    exact: KVCacheFormat
    device: DeviceInfo
    prompt: Sequence[int]
    facts: dict[str, object]


def cache_name(formats: tuple[KVCacheFormat, KVCacheFormat]) -> str:
    """A format's name, or one per side."""
    k, v = formats
    return k.name if k is v else f"k={k.name},v={v.name}"


def file_fact(path: str | None) -> list[object]:
    """What tells one version of a file from another; empty without a file."""
    if path is None or not Path(path).is_file():
        return []
    found = Path(path).stat()
    return [path, found.st_size, found.st_mtime_ns]


def load_scales(
    config: EngineConfig, caches: Sequence[LayerCache], checkpoint: TensorReader
) -> set[int]:
    """Gives every side the scale from ``--quantization-param-path``, or from the checkpoint.

    Returns:
        ``id`` of the stores that got one.
    """
    readers: list[TensorReader] = [checkpoint]
    if config.quantization_param_path is not None:
        readers.insert(0, ScaleFile(config.quantization_param_path, len(caches)))
    found: set[int] = set()
    for index, cache in enumerate(caches):
        name = f"model.layers.{index}.self_attn"
        for form, store in _sides(cache):
            if any(form.load_scales(store, name, reader) for reader in readers):
                found.add(id(store))
    return found


def settle_caches(
    start: CacheStart, model: Model, caches: Sequence[LayerCache], scaled: set[int]
) -> str:
    """Measures missing scales, then checks the caches; what came of it, in one line.

    Nothing is done for caches that keep everything exactly, nor on a card that is absent.
    """
    forms = {id(form): form for cache in caches for form, _ in _sides(cache)}.values()
    if all(form is start.exact for form in forms) or not start.prompt or start.device.is_absent:
        return ""
    wanting = _wanting(caches, scaled)
    measure = bool(wanting) and start.config.calculate_kv_scales
    _report_scales(start, caches, len(wanting), measure)
    file = default_cache_folder() / CACHE_FILE
    key = check_key(start.info.path, start.facts)
    known = recall(file, key)
    if known is not None and not measure:
        return _say(start, known, wanting and not measure)
    with torch.inference_mode():
        exact = _exact_run(start, model, caches, measure)
        if known is None:
            known = _chosen_run(start, model, caches, exact)
            remember(file, key, known)
    return _say(start, known, bool(wanting) and not measure)


def _sides(cache: LayerCache) -> tuple[tuple[KVCacheFormat, KVStore], ...]:
    return (cache.k_format, cache.k_store), (cache.v_format, cache.v_store)


def _wanting(caches: Sequence[LayerCache], scaled: set[int]) -> list[KVStore]:
    """The stores whose format measures scales, and that were given none."""
    sides = (side for cache in caches for side in _sides(cache))
    return [store for form, store in sides if measures(form) and id(store) not in scaled]


def _report_scales(
    start: CacheStart, caches: Sequence[LayerCache], num_wanting: int, measure: bool
) -> None:
    if not num_wanting:
        return
    total = sum(measures(form) for cache in caches for form, _ in _sides(cache))
    what = (
        "the model's files hold no scales for the KV cache"
        if num_wanting == total
        else f"SCALES FOR ONLY {total - num_wanting} of {total} sides of the KV cache were found"
    )
    does = (
        f"measured over {len(start.prompt)} tokens" if measure else "1.0 (--no-calculate-kv-scales)"
    )
    level = logging.INFO if measure and num_wanting == total else logging.WARNING
    logger.log(level, "%s: %s; the missing are %s.", start.name, what, does)


def _exact_run(
    start: CacheStart, model: Model, caches: Sequence[LayerCache], measure: bool
) -> torch.Tensor:
    """Hidden states [T, E] with an exact cache, which shows the others what there is to measure."""
    size = caches[0].k_store.geometry.block_size
    num_blocks = FIRST_BLOCK - (-len(start.prompt) // size)
    watched = watched_caches(caches, start.exact, num_blocks, start.device, measure)
    hidden = _run(start, model, watched, size)
    for cache in watched:
        for form, _ in _sides(cache):
            assert isinstance(form, WatchedCache)
            form.show()
    return hidden


def _chosen_run(
    start: CacheStart, model: Model, caches: Sequence[LayerCache], exact: torch.Tensor
) -> CacheCheck:
    """The figures of ``caches``; what is written to them lies in blocks that are free."""
    size = caches[0].k_store.geometry.block_size
    return compare(exact, _run(start, model, caches, size), model.logits)


def _run(start: CacheStart, model: Model, caches: Sequence[LayerCache], size: int) -> torch.Tensor:
    """In steps as long as the engine's, so that its kernels serve them."""
    device = torch.device(start.device.torch_device)
    chunk = start.config.max_num_batched_tokens
    steps = batches(start.prompt, size, chunk, device)
    return torch.cat([model.hidden_states(batch, caches) for batch in steps])


def _say(start: CacheStart, check: CacheCheck, is_unscaled: object) -> str:
    text = check.text(start.name)
    if check.is_good:
        logger.info("%s.", text)
        return f"{text}."
    remedy = "--kv-cache-dtype k=auto,v=fp8, int8 or auto"
    if is_unscaled:
        remedy = f"measured scales (--calculate-kv-scales), or {remedy}"
    text = f"{text}: THIS MODEL SUFFERS FROM ITS KV CACHE. Use {remedy}."
    logger.warning("%s", text)
    return text
