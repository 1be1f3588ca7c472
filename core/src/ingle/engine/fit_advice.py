"""What would make a model fit that does not. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ingle.engine.cards import CARDS
from ingle.engine.fit import Question, Verdict, judge
from ingle.engine.memory_plan import CPU_CACHE_LIMIT, CPU_CACHE_SHARE, GIB, RESERVE

SHORTEST_CONTEXT: Final = 1024
"""A shorter context is no help to anybody, unless an even shorter one was asked for."""
SMALLEST_BITS: Final = 2.0
"""Below this, weights are not worth having."""
HALF_STEP: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One change.

    Attributes:
        change: What kind: ``max_model_len``, ``kv_cache_dtype``, ``max_num_seqs``,
            ``embedding_device``, ``enforce_eager``, ``bits_per_weight``, ``offload_layers``,
            ``gpu`` or ``memory``.
        text: For people.
        flags: To add to the command line; empty when no flag does it.
        available: Whether this version of Ingle can do it.
        total_bytes: What everything on the device then takes.
        tokens_per_second: Expected decode speed then, where it is known.
    """

    change: str
    text: str
    flags: str = ""
    available: bool = True
    total_bytes: int | None = None
    tokens_per_second: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def advise(verdict: Verdict) -> list[Suggestion]:
    """What would make it fit, least painful first; empty when it fits."""
    if verdict.fits:
        return []
    question = verdict.question.with_context(verdict.max_model_len)
    runtime = list(_runtime_changes(question, verdict))
    return [*runtime, *_larger_changes(question, verdict, bool(runtime))]


def _runtime_changes(question: Question, verdict: Verdict) -> Iterator[Suggestion]:
    """Flags: each alone, then together when none is enough alone."""
    yield from _embeddings(question)
    yield from _context(question, verdict)
    caches = _smaller_caches(question)
    fitting = [_cache(changed) for changed in caches if judge(changed).fits]
    yield from fitting
    yield from _sequences(question)
    if not fitting and caches:
        yield from _context(caches[-1], verdict)
    yield from _eager(question, verdict)


def _embeddings(question: Question) -> Iterator[Suggestion]:
    if question.config.embedding_device != "device" or question.target.device_type == "cpu":
        return
    changed = replace(question, config=replace(question.config, embedding_device="host"))
    verdict = judge(changed)
    if verdict.fits:
        yield Suggestion(
            change="embedding_device",
            text="token embeddings in host memory",
            flags="--embedding-device host",
            total_bytes=verdict.total_bytes,
        )


def _context(question: Question, before: Verdict) -> Iterator[Suggestion]:
    """The longest shorter context, on the question's cache format."""
    longest = judge(replace(question, config=replace(question.config, max_model_len="auto")))
    tokens = min(longest.max_model_len, before.max_model_len)
    least = min(SHORTEST_CONTEXT, before.max_model_len)
    if not longest.fits or tokens < least or tokens == before.max_model_len:
        return
    verdict = judge(question.with_context(tokens))
    flags, text = f"--max-model-len {tokens}", f"a context of {tokens:,} tokens"
    if question.cache_format != before.question.cache_format:
        flags = f"--kv-cache-dtype {question.cache_format} {flags}"
        text += f" and a KV cache in {question.cache_format}"
    yield Suggestion(
        change="max_model_len", text=text, flags=flags, total_bytes=verdict.total_bytes
    )


def _smaller_caches(question: Question) -> list[Question]:
    """The question with a smaller cache format, one of each size, the largest of them first."""
    sizes = question.block_bytes
    now = sizes[question.cache_format]
    smaller = {sizes[name]: name for name in sorted(sizes, reverse=True) if sizes[name] < now}
    return [
        replace(question, cache_format=name) for _, name in sorted(smaller.items(), reverse=True)
    ]


def _cache(question: Question) -> Suggestion:
    name = question.cache_format
    return Suggestion(
        change="kv_cache_dtype",
        text=f"a KV cache in {name}",
        flags=f"--kv-cache-dtype {name}",
        total_bytes=judge(question).total_bytes,
    )


def _sequences(question: Question) -> Iterator[Suggestion]:
    for count in range(question.num_sequences - 1, 0, -1):
        verdict = judge(replace(question, num_sequences=count))
        if verdict.fits:
            yield Suggestion(
                change="max_num_seqs",
                text=f"{count} sequences of full length at a time",
                flags=f"--max-num-seqs {count}",
                total_bytes=verdict.total_bytes,
            )
            return


def _eager(question: Question, before: Verdict) -> Iterator[Suggestion]:
    """On a CPU: without the matrices that compiled decode steps read; with a shorter context where
    neither is enough alone."""
    if question.target.device_type != "cpu" or question.config.enforce_eager:
        return
    changed = replace(question, config=replace(question.config, enforce_eager=True))
    verdict = judge(changed)
    if verdict.fits:
        yield Suggestion(
            change="enforce_eager",
            text="decode steps uncompiled, and slower",
            flags="--enforce-eager",
            total_bytes=verdict.total_bytes,
        )
    elif not any(_context(question, before)):
        for shorter in _context(changed, before):
            flags, text = f"--enforce-eager {shorter.flags}", f"{shorter.text}, steps uncompiled"
            yield replace(shorter, flags=flags, text=text)


def _larger_changes(
    question: Question, verdict: Verdict, runtime_helps: bool
) -> Iterator[Suggestion]:
    """Other files, other places, other cards."""
    on_card = question.target.device_type == "cuda"
    bits = _bits_that_fit(verdict)
    if bits >= SMALLEST_BITS:
        yield Suggestion(
            change="bits_per_weight",
            text=f"a version of the model at {bits:.2f} bits per weight or less "
            f"(this one has {verdict.plan.weights.bits_per_weight:.2f})",
            total_bytes=verdict.budget_bytes,
        )
    if on_card and not runtime_helps:
        yield from _offload(question)
    yield from _card(question) if on_card else _machine(verdict)


def _bits_that_fit(verdict: Verdict) -> float:
    """Bits per weight at which everything else stays as it is, cut to a step of 0.05."""
    weights = verdict.plan.weights
    left = weights.linear_bytes + verdict.margin_bytes
    bits = 8 * left / max(1, weights.linear_values)
    return int(bits / HALF_STEP) * HALF_STEP


def _offload(question: Question) -> Iterator[Suggestion]:
    """The fewest layers in host memory that make room for the rest."""
    layers = question.model.num_layers
    for count in range(question.config.offload_layers + 1, layers + 1):
        config = replace(question.config, offload_layers=count, cpu_offload_gb=0.0)
        verdict = judge(replace(question, config=config))
        if verdict.fits:
            speed = verdict.tokens_per_second
            pace = f", about {speed:.1f} tokens/s" if speed else ""
            yield Suggestion(
                change="offload_layers",
                text=f"{count} of {layers} layers in host memory "
                f"({verdict.plan.offloaded_bytes / GIB:.1f} GiB){pace}",
                flags=f"--offload-layers {count}",
                total_bytes=verdict.total_bytes,
                tokens_per_second=speed,
            )
            return


def _machine(verdict: Verdict) -> Iterator[Suggestion]:
    """How much memory would do on a CPU, where the cache may only take a share."""
    plan = verdict.plan
    if verdict.kv_cache_bytes > CPU_CACHE_LIMIT:
        return
    share = plan.weights_bytes + verdict.kv_cache_bytes / CPU_CACHE_SHARE
    need = max(share, verdict.total_bytes)
    yield Suggestion(
        change="memory",
        text=f"a machine with {need / GIB:.1f} GiB of memory free",
        total_bytes=verdict.total_bytes,
    )


def _card(question: Question) -> Iterator[Suggestion]:
    """The smallest known cards that would do, with as much left alone."""
    reserve = max(RESERVE, question.target.reserve_bytes)
    names: list[str] = []
    smallest = total = 0
    for card in sorted(CARDS, key=lambda known: known.memory_gib):
        if names and card.memory_bytes > smallest:
            break
        target = replace(
            question.target, name=card.name, total_bytes=card.memory_bytes, reserve_bytes=reserve
        )
        verdict = judge(replace(question, target=target))
        if verdict.fits:
            names.append(card.name)
            smallest, total = card.memory_bytes, verdict.total_bytes
    if names:
        yield Suggestion(
            change="gpu",
            text=f"a card of {(total + reserve) / GIB:.1f} GiB or more: {', '.join(names)}",
            total_bytes=total,
        )
