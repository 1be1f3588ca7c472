"""What an engine says about itself: constant once it is built. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The loaded model and how it runs.

    Attributes:
        model: The model as the operator gave it: a folder or a hub id.
        max_model_len: Tokens per sequence, prompt and output together; the one number that
            admission, the cache and ``/v1/models`` share.
        vocab_size: Rows of the output layer; every token id of a request is below it.
        model_path: The folder it was read from.
        eos_token_ids: Tokens that end a sequence.
        dtype: Activation dtype, such as ``bfloat16``.
        device: Where it runs, such as ``cpu`` or ``cuda:0``.
        quantization: Name of the weight format.
        kv_cache_dtype: Name of the KV-cache format, or one per side.
        plugin_report: What every plugin offers, what was chosen and why, as plain data.
        generation_defaults: Sampling parameters from ``generation_config.json``.
        load_report: What was loaded, in how many seconds, at how many GB/s.
        load_seconds: How long loading took, or None.
        memory_report: What was predicted to be taken by weights and cache, and what was.
        kv_cache_report: What a KV cache that is not exact costs, measured at start.
    """

    model: str
    max_model_len: int
    vocab_size: int
    model_path: str = ""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "auto"
    device: str = "cpu"
    quantization: str = "dense"
    kv_cache_dtype: str = "auto"
    plugin_report: Mapping[str, Any] = field(default_factory=dict)
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    load_report: str = ""
    load_seconds: float | None = None
    memory_report: str = ""
    kv_cache_report: str = ""
