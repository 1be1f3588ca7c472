"""The engine's options: one frozen dataclass, validated where it is built.

Field names are the command-line flags with dashes for underscores, spelled as vLLM and Aphrodite
spell them; error messages name the flag as the user types it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from ingle.errors import ConfigError

DType = Literal["auto", "float32", "float16", "half", "bfloat16", "float"]
Device = Literal["auto", "cpu", "cuda"]
NGRAM = "[ngram]"
"""The speculative model that is none: prompt lookup."""
OnMemory = Literal["error", "shrink"]
ModelImpl = Literal["auto", "ingle", "transformers"]
GenerationConfig = Literal["auto", "ingle", "vllm"]
EmbeddingDevice = Literal["auto", "device", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to load a model and run it.

    Attributes:
        model: A model folder, or a Hugging Face hub id such as ``Qwen/Qwen3-8B``.
        revision: Branch, tag or commit on the hub.
        tokenizer: Folder of the tokenizer, when it is not the model's own.
        model_impl: Whose code computes the model: ``ingle``'s own decoder, ``transformers``' model
            on Ingle's linears and cache, or ``auto``: the own one where it knows the family.
        chat_template: A file with the template that conversations are rendered with, or the
            template itself, in place of the model's own.
        generation_config: ``auto`` takes the sampling defaults of generation_config.json; ``ingle``
            (or ``vllm``) ignores them. Its end-of-sequence tokens count in any case.
        hf_overrides: Keys of config.json to replace, as a JSON object:
            ``{"max_position_embeddings": 65536}``.
        rope_scaling: Rotary scaling in place of config.json's, as a JSON object:
            ``{"rope_type": "linear", "factor": 2}``.
        quantization: Weight format, or ``auto`` to detect it.
        kv_cache_dtype: KV-cache format (``auto``, ``fp8`` …), or one per side: ``k=auto,v=fp8``.
        quantization_param_path: JSON file with scales of an fp8 KV cache, as vLLM writes them; they
            count before the checkpoint's.
        calculate_kv_scales: Measure scales of an fp8 KV cache on a fixed prompt where none are
            given; otherwise they are 1.
        dtype: Activation dtype; ``auto`` takes the checkpoint's.
        device: Where to run; ``auto`` takes CUDA when there is a card.
        max_model_len: Tokens per sequence, prompt and output together: a number, ``8k``, or
            ``auto`` for as much as model and memory allow.
        on_memory: When the context asked for does not fit: ``error`` says what would, ``shrink``
            takes the longest that fits and says so.
        embedding_device: Where token embeddings live; ``auto`` moves them to host memory when a
            model fits its card only so.
        offload_layers: Of the last layers so many keep their weights in host memory, from where
            they come over ahead of use, two at a time; needs a card.
        cpu_offload_gb: The same, told in GiB of weights to keep in host memory.
        gpu_memory_utilization: Share of the card's memory to use, 0 to 1; without it everything
            that is free but a reserve of 0.25 GiB.
        kv_cache_memory_bytes: Exact size of the KV cache (``512MiB``, ``4GiB`` or bytes); decides
            the number of blocks instead of ``gpu_memory_utilization``.
        max_num_seqs: Sequences computed together at most.
        max_num_batched_tokens: Tokens computed in one step at most; long prompts are cut into
            chunks of this.
        block_size: Tokens per KV-cache block.
        enable_prefix_caching: Reuse keys and values of equal prompt beginnings.
        seed: Seed for requests that bring none; None draws one at start.
        enforce_eager: No compiled decode steps; for debugging, or where there is no C++ compiler.
        single_user_mode: One sequence at a time, tuned for latency.
        speculative_model: What guesses next tokens, several of which one step then checks:
            ``[ngram]`` is prompt lookup (what followed the same tokens before), ``none`` nothing,
            ``auto`` prompt lookup in single-user mode, and anything else a smaller model with the
            same vocabulary, as a folder or hub id. Answers stay the same.
        num_speculative_tokens: Tokens guessed at most in a step.
        ngram_prompt_lookup_max: Tokens that prompt lookup compares at most.
        ngram_prompt_lookup_min: Tokens at least that must have stood there before.
        strict_plugins: Any plugin failure stops start-up.
        disable_plugin: Plugins not to load, by distribution or entry-point name.
        max_queue_len: Waiting requests at most; more are refused with 429.
    """

    model: str = ""
    revision: str | None = None
    tokenizer: str | None = None
    model_impl: ModelImpl = "auto"
    chat_template: str | None = None
    generation_config: GenerationConfig = "auto"
    hf_overrides: str | None = None
    rope_scaling: str | None = None
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization_param_path: str | None = None
    calculate_kv_scales: bool = True
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | str = "auto"
    on_memory: OnMemory = "error"
    embedding_device: EmbeddingDevice = "auto"
    offload_layers: int = 0
    cpu_offload_gb: float = 0.0
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | str | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    block_size: int = 256
    enable_prefix_caching: bool = True
    seed: int | None = None
    enforce_eager: bool = False
    single_user_mode: bool = False
    speculative_model: str = "auto"
    num_speculative_tokens: int = 12
    ngram_prompt_lookup_max: int = 64
    ngram_prompt_lookup_min: int = 4
    strict_plugins: bool = False
    disable_plugin: tuple[str, ...] = ()
    max_queue_len: int = 1024

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_model_len", parse_length(self.max_model_len))
        if self.kv_cache_memory_bytes is not None:
            value = parse_bytes("--kv-cache-memory-bytes", self.kv_cache_memory_bytes)
            object.__setattr__(self, "kv_cache_memory_bytes", value)
        for name in ("hf_overrides", "rope_scaling"):
            parse_object(f"--{name.replace('_', '-')}", getattr(self, name))
        check_offload(self.offload_layers, self.cpu_offload_gb)
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, got {share}."
            )
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue_len"):
            _require_positive(name, getattr(self, name))
        _check_block_size(self.block_size)
        self._check_speculation()

    def _check_speculation(self) -> None:
        name = self.speculative_model
        if name != NGRAM and (not name or name.startswith("[")):
            raise ConfigError(
                f"--speculative-model must be {NGRAM}, auto, none, a model folder or a hub id, "
                f"got {name!r}."
            )
        for name in ("num_speculative_tokens", "ngram_prompt_lookup_min"):
            _require_positive(name, getattr(self, name))
        if self.ngram_prompt_lookup_max < self.ngram_prompt_lookup_min:
            raise ConfigError(
                f"--ngram-prompt-lookup-max is {self.ngram_prompt_lookup_max} and must be at least "
                f"--ngram-prompt-lookup-min, which is {self.ngram_prompt_lookup_min}."
            )

    @property
    def drafts_from(self) -> str | None:
        """What guesses next tokens: ``[ngram]``, a model, or None."""
        name = self.speculative_model
        if name == "auto":
            return NGRAM if self.single_user_mode else None
        return None if name == "none" else name

    @property
    def draft_model(self) -> str | None:
        """The smaller model that guesses next tokens, if one does."""
        return None if self.drafts_from in (None, NGRAM) else self.drafts_from

    @property
    def max_running(self) -> int:
        """Sequences computed together at most, single-user mode included."""
        return 1 if self.single_user_mode else self.max_num_seqs


def check_offload(layers: int, gigabytes: float) -> None:
    """Raises ``ConfigError`` when --offload-layers and --cpu-offload-gb cannot both be meant."""
    if layers < 0 or gigabytes < 0:
        raise ConfigError(
            f"--offload-layers and --cpu-offload-gb must be 0 or more, got {layers} and "
            f"{gigabytes:g}."
        )
    if layers and gigabytes:
        raise ConfigError("--offload-layers and --cpu-offload-gb say the same; give one of them.")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")


def _check_block_size(size: int) -> None:
    if size < 8 or size > 1024 or size & (size - 1):
        raise ConfigError(f"--block-size must be a power of two from 8 to 1024, got {size}.")


def parse_object(option: str, value: str | None) -> dict[str, Any]:
    """A JSON object written as text; None is an empty one.

    Raises:
        ConfigError: Naming ``option`` when it is no JSON object.
    """
    try:
        parsed = {} if value is None else json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} is no JSON ({error}); got {value!r}.") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{option} must be a JSON object such as {{}}; got {value!r}.")
    return parsed


def parse_length(value: int | str) -> int | str:
    """A token count: 8192, ``"8192"``, ``"8k"`` (8,192) or ``"auto"``.

    Raises:
        ConfigError: When it is none of these or below 1.
    """
    text = str(value).strip().lower()
    if text in ("auto", "-1"):
        return "auto"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m)?", text)
    if not match:
        raise ConfigError(
            f"--max-model-len must be a number, such as 8192 or 8k, or auto; got {value!r}."
        )
    length = int(float(match[1]) * {"": 1, "k": 1024, "m": 1024**2}[match[2] or ""])
    _require_positive("max_model_len", length)
    return length


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


def parse_bytes(option: str, value: int | str) -> int:
    """A number of bytes: 1073741824, ``"1GiB"``, ``"4GB"``, ``"512M"``.

    Raises:
        ConfigError: Naming ``option`` when it is not a size above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", str(value).strip().lower())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ConfigError(f"{option} must be a size such as 4GiB, 512MiB or bytes; got {value!r}.")
    return size
