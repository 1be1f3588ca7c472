"""Flags of vLLM, Aphrodite and TabbyAPI that ask for what Ingle lacks: refused, with the reason.

Ignoring one would change answers, limits or who may come in, so start-up ends and says what to do.
A flag that a command has itself, one day, is no longer looked for here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

OFF: Final = frozenset({"", "0", "0.0", "1", "auto", "false", "none", "null", "{}", "[]"})
"""Values that ask for nothing: "--kv-offloading-size 0"."""

_LORA: Final = "LoRA adapters are not supported yet. Merge the adapter into the model first."
_PROMPT_ADAPTERS: Final = "prompt adapters are not supported."
_MEDIA: Final = "the models read text only; images, audio and video are refused in requests too."
_PARALLEL: Final = "Ingle runs on one device. A quantised model or --max-model-len may make it fit."
_NODES: Final = "Ingle runs in one process on one machine."
_DRAFTS: Final = "give --speculative-model (a folder, a hub id or '[ngram]') and its siblings."
_OFFLOAD: Final = "only weights go to host memory, by layers (--offload-layers, --cpu-offload-gb)."
_POOLING: Final = "any model gives embeddings: ask /v1/embeddings with pooling mean or last."
_DEFAULTS: Final = "set it in the request, or in the model's generation_config.json."
_PER_REQUEST: Final = "it is asked for per request, in the field of the same name."
_MODULES: Final = "the server loads no code by name; a weight format is a plugin (ingle plugins)."
_TRANSFER: Final = "caches are not moved between servers."
_TLS: Final = "put a proxy in front that checks certificates of clients, or renews the server's."
_CORS: Final = "browsers get GET, POST, DELETE and the headers they need, and never credentials."
_TRACES: Final = "there are no traces; /metrics has figures, the log a line per request."
_EXPERTS: Final = "experts stay on the one device."
_HUB: Final = "--revision holds for code, weights and tokenizer together."
_KV: Final = "--kv-cache-memory-bytes sets the size of the cache, --kv-cache-dtype its format."

GROUPS: Final[tuple[tuple[str, str], ...]] = (
    (
        _LORA,
        "enable-lora enable-lora-bias lora-modules lora-dtype lora-dir lora-extra-vocab-size "
        "max-loras max-lora-rank max-cpu-loras fully-sharded-loras default-mm-loras loras "
        "long-lora-scaling-factors qlora-adapter-name-or-path lora-target-modules",
    ),
    (
        _PROMPT_ADAPTERS,
        "enable-prompt-adapter prompt-adapters max-prompt-adapters max-prompt-adapter-token",
    ),
    (
        _MEDIA,
        "limit-mm-per-prompt media-io-kwargs mm-processor-kwargs mm-processor-cache-gb "
        "mm-encoder-tp-mode interleave-mm-strings allowed-local-media-path allowed-media-domains "
        "enable-mm-embeds video-pruning-rate vision image-input-type image-token-id "
        "image-input-shape image-feature-size",
    ),
    (
        _PARALLEL,
        "gpu-split gpu-split-auto tensor-parallel tensor-parallel-backend autosplit-reserve "
        "decode-context-parallel-size prefill-context-parallel-size",
    ),
    (
        _NODES,
        "nnodes node-rank master-addr master-port headless data-parallel-rank "
        "data-parallel-address data-parallel-rpc-port data-parallel-size-local "
        "data-parallel-start-rank data-parallel-hybrid-lb data-parallel-external-lb",
    ),
    (
        _DRAFTS,
        "speculative-config draft-model-name draft-model-dir draft-model "
        "speculative-draft-tensor-parallel-size speculative-disable-by-batch-size "
        "speculative-max-model-len speculative-model-quantization draft-gpu-split",
    ),
    (_OFFLOAD, "kv-offloading-size kv-offloading-backend offload-group-size"),
    (_POOLING, "override-pooler-config pooler-config embedding-model-name"),
    (
        _DEFAULTS,
        "override-generation-config override-preset default-chat-template-kwargs "
        "num-experts-per-token",
    ),
    (_PER_REQUEST, "return-tokens-as-token-ids enable-force-include-usage"),
    (
        _MODULES,
        "middleware logits-processors logits-processor-pattern tool-parser-plugin "
        "reasoning-parser-plugin io-processor-plugin worker-cls worker-extension-cls "
        "scheduler-cls tool-server plugin",
    ),
    (_TRANSFER, "kv-transfer-config kv-events-config ec-transfer-config"),
    (_TLS, "ssl-ca-certs ssl-cert-reqs enable-ssl-refresh"),
    (_CORS, "allow-credentials allowed-methods allowed-headers"),
    (_TRACES, "otlp-traces-endpoint collect-detailed-traces"),
    (_EXPERTS, "enable-expert-parallel enable-eplb num-redundant-experts eplb-config"),
    (_HUB, "code-revision tokenizer-revision hf-config-path"),
    (_KV, "num-gpu-blocks-override cache-size cache-mode"),
    (
        "the server sets no template that comes with a request; give --chat-template.",
        "trust-request-chat-template",
    ),
    ("a request's prompt is text or token ids, never tensors.", "enable-prompt-embeds"),
    ("a server needs the tokenizer.", "skip-tokenizer-init"),
    ("the windows of a model's layers are part of it.", "disable-sliding-window"),
    ("use --idle-unload SECONDS, or /v1/model/unload.", "enable-sleep-mode"),
    ("give --hf-overrides '{\"rope_theta\": N}'.", "rope-theta rope-alpha rope-scale"),
    ("the server listens on --host and --port.", "uds"),
    ("start without --api-key, and only on 127.0.0.1.", "disable-auth"),
    (
        "quantise beforehand: `ingle quantize`.",
        "load-in-4bit load-in-8bit load-in-smooth quant-llm-fp-bits deepspeed-fp-bits",
    ),
    ("--log-level and --disable-access-log are what there is.", "log-config-file"),
)


def _spread() -> Iterator[tuple[str, str]]:
    for why, names in GROUPS:
        for name in names.split():
            yield f"--{name}", why


LACKING: Final[Mapping[str, str]] = MappingProxyType(dict(_spread()))
"""By flag: why it is refused and what to do instead."""


def refusal(flag: str, value: str | None) -> str | None:
    """What to say of ``flag``; None when it is not refused, or asks for nothing with ``value``."""
    why = LACKING.get(flag)
    if why is None or (value is not None and value.strip().lower() in OFF):
        return None
    return f"{flag} cannot be done: {why}"
