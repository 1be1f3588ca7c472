"""How far a quantised model is from its reference: perplexity, KL divergence, top-1 agreement.

Each model is loaded by Ingle's own engine, one at a time, and reads the same windows of text. Of
the reference only its last hidden states stay in memory, [T, E], and its output head.

Letters: T predicted tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingle.config import Device, DType
from ingle.errors import ConfigError

if TYPE_CHECKING:
    from ingle.quantize.divergence import Divergence
    from ingle.quantize.teacher_forcing import ForcedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """What models are compared with, and over which text.

    Attributes:
        reference: The model the others are compared with, a folder or a hub id; without it the
            first of them.
        text: A UTF-8 text file to read; without it the reference pages that come with Python
            (the module `pydoc_data.topics`), which no calibration here uses.
        max_tokens: Tokens of the text to read at most.
        window: Tokens a model sees at once, at most as many as the reference takes; every window
            starts without a past. All but the first token of a window are predicted.
        dtype: Activation dtype; `auto` is float32 on a CPU, so that nothing but weights and cache
            differs, and the checkpoint's own on a card.
        device: Where to run; `auto` takes CUDA when there is a card.
    """

    reference: str = ""
    text: str | None = None
    max_tokens: int = 8192
    window: int = 512
    dtype: DType = "auto"
    device: Device = "auto"

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("max_tokens", 2)):
            value = getattr(self, name)
            if value < least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be at least {least}, got {value}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One model with one cache type against the reference.

    Attributes:
        model: As it was named.
        bits_per_weight: Stored bits of the layers' linears, scales, zero points, orders and
            whatever else a format keeps for them included, per weight. Embeddings, norms, biases
            and the output head are not in it.
        bytes: Bytes of all tensors in the model's files.
        perplexity: Exponential of the mean negative log-likelihood of a predicted token.
        kl: Mean KL(reference || model) of a predicted token, in nats.
        top1: Share of predicted tokens for which both find the same token likeliest.
        kl_interval: Where ``kl`` lies with 95 %: bootstrap over runs of 64 tokens, seed 0.
        top1_interval: The same for ``top1``.
        reference: The reference, as it was named.
        reference_perplexity: Its perplexity over the same windows.
        format: The weight format, as Ingle names it.
        kv_cache_dtype: The cache type asked for.
        dtype: The activation dtype it was computed in.
        head_bits_per_weight: Stored bits per weight of the output head.
        num_tokens: Predicted tokens.
        text: Where the text came from.
    """

    model: str
    bits_per_weight: float
    bytes: int
    perplexity: float
    kl: float
    top1: float
    kl_interval: tuple[float, float]
    top1_interval: tuple[float, float]
    reference: str
    reference_perplexity: float
    format: str
    kv_cache_dtype: str
    dtype: str
    head_bits_per_weight: float
    num_tokens: int
    text: str


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """The reference and the windows, while models are compared with it."""

    config: EvaluationConfig
    source: str
    windows: list[list[int]] = field(default_factory=list)
    forced: ForcedModel | None = None
    itself: Divergence | None = None


def evaluate(
    models: Sequence[str], kv_cache_dtypes: Sequence[str] = ("auto",), **options: Any
) -> list[Evaluation]:
    """Every model with every cache type against a reference, in that order.

    Example:
        >>> evaluate(["quant"], reference="original", text="held_out.txt")[0].kl

    Args:
        models: Folders or hub ids, quantised or not.
        kv_cache_dtypes: Cache types; the reference always has ``auto``.
        **options: Fields of ``EvaluationConfig``.

    Raises:
        ConfigError: An option cannot work, or the models do not share a vocabulary.
        CheckpointError, PluginError, CapacityError: A model cannot be loaded or computes nonsense.
    """
    known = {item.name for item in fields(EvaluationConfig)}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(f"evaluate has no option {', '.join(unknown)}; it takes {sorted(known)}.")
    return list(evaluations(models, kv_cache_dtypes, EvaluationConfig(**options)))


def evaluations(
    models: Sequence[str], kv_cache_dtypes: Sequence[str], config: EvaluationConfig
) -> Iterator[Evaluation]:
    """As ``evaluate``, each as soon as it is known."""
    from ingle.quantize.evaluation_text import text_source

    if not models:
        raise ConfigError("eval needs the folder or hub id of at least one model.")
    config = _settled(config, str(models[0]))
    comparison = _Comparison(config=config, source=text_source(config.text))
    _read_reference(comparison)
    for model in models:
        for cache in kv_cache_dtypes:
            yield _compare(comparison, str(model), cache)


def _settled(config: EvaluationConfig, first_model: str) -> EvaluationConfig:
    """With a reference, and windows that it can take."""
    from ingle.checkpoint.hub import resolve_model
    from ingle.checkpoint.model_config import load_model_config

    reference = config.reference or first_model
    longest = load_model_config(resolve_model(reference)).longest_context
    return replace(config, reference=reference, window=min(config.window, longest))


def _read_reference(comparison: _Comparison) -> None:
    from ingle.quantize.divergence import diverge
    from ingle.quantize.evaluation_text import text_windows

    config = comparison.config
    with _loaded(config, config.reference, "auto") as forced:
        windows = text_windows(config, forced.tokenizer)
        forced.read(windows)
        comparison.windows, comparison.forced = windows, forced.head_only()
    comparison.itself = diverge(comparison.forced, comparison.forced, windows)


def _compare(comparison: _Comparison, model: str, cache: str) -> Evaluation:
    from ingle.quantize.divergence import diverge
    from ingle.quantize.stored_bits import stored_bits

    reference, itself = comparison.forced, comparison.itself
    assert reference is not None
    assert itself is not None
    config = comparison.config
    with _loaded(config, model, cache) as forced:
        _check_vocabulary(reference, forced, comparison)
        forced.read(comparison.windows)
        found = diverge(reference, forced, comparison.windows)
        stored = stored_bits(Path(forced.info.model_path), forced.info.quantization)
        return Evaluation(
            model=model,
            bits_per_weight=stored.bits_per_weight,
            bytes=stored.total_bytes,
            perplexity=found.perplexity,
            kl=found.kl,
            top1=found.top1,
            kl_interval=found.kl_interval,
            top1_interval=found.top1_interval,
            reference=config.reference,
            reference_perplexity=itself.perplexity,
            format=forced.info.quantization,
            kv_cache_dtype=cache,
            dtype=forced.info.dtype,
            head_bits_per_weight=stored.head_bits_per_weight,
            num_tokens=found.num_tokens,
            text=comparison.source,
        )


@contextmanager
def _loaded(config: EvaluationConfig, model: str, cache: str) -> Iterator[ForcedModel]:
    from ingle.quantize.teacher_forcing import load_forced

    forced = load_forced(config, model, cache)
    try:
        yield forced
    finally:
        forced.close()


def _check_vocabulary(reference: ForcedModel, forced: ForcedModel, comparison: _Comparison) -> None:
    """Distributions over different tokens have no divergence."""
    ours, theirs = reference.info.vocab_size, forced.info.vocab_size
    sample = comparison.windows[0]
    text = reference.tokenizer.decode(sample, skip_special_tokens=False)
    spelled = [
        loaded.tokenizer.encode(text, add_special_tokens=False) for loaded in (reference, forced)
    ]
    if ours != theirs or spelled[0] != spelled[1]:
        raise ConfigError(
            f"{forced.info.model} has {theirs} tokens and {reference.info.model} has {ours}, or "
            "they spell the text differently; only models with one vocabulary can be compared."
        )
