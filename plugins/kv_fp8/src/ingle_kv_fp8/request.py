"""How a checkpoint's config asks for an fp8 cache. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingle.plugin import CheckpointInfo

MODELOPT_FILE = "hf_quant_config.json"
STRATEGIES = ("tensor", "attn_head")
"""One scale per layer and side, or one per head."""


def fp8_request(info: CheckpointInfo) -> str | None:
    """Why this checkpoint wants an fp8 cache, or None when it does not say so."""
    config = info.quantization_config or {}
    if _is_fp8_scheme(config.get("kv_cache_scheme")):
        return "quantization_config.kv_cache_scheme is 8-bit float"
    modelopt = info.config_files.get(MODELOPT_FILE, {}).get("quantization")
    sources = {"quantization_config": config, f"{MODELOPT_FILE} quantization": modelopt}
    for source, entry in sources.items():
        if isinstance(entry, Mapping) and _is_fp8_name(entry.get("kv_cache_quant_algo")):
            return f"{source}.kv_cache_quant_algo is FP8"
    return None


def _is_fp8_scheme(scheme: Any) -> bool:
    """compressed-tensors' block, which ModelOpt writes too, with fewer entries."""
    return (
        isinstance(scheme, Mapping)
        and scheme.get("num_bits") == 8
        and scheme.get("type") == "float"
        and scheme.get("symmetric", True) is True
        and scheme.get("strategy", "tensor") in STRATEGIES
    )


def _is_fp8_name(name: Any) -> bool:
    return isinstance(name, str) and name.upper() == "FP8"
