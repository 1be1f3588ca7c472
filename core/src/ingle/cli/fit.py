"""``ingle fit``: whether a model fits, term by term, from headers alone."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ingle.config import Device, DType, EmbeddingDevice, EngineConfig, parse_bytes
from ingle.errors import ConfigError

if TYPE_CHECKING:
    from ingle.engine.fit import Question, Target, Verdict
    from ingle.engine.fit_advice import Suggestion

GIB = 1024**3
SMALLEST_CARD = GIB // 4
"""Less memory than this is a unit that was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """What should fit where.

    Attributes:
        model: A model folder, or a hub id that has been downloaded.
        gpu: A card from the table, such as ``"RTX 4090"``; without it and ``--memory``, this
            machine.
        memory: Memory of a card, all of it: ``24GiB``.
        desktop: A desktop runs on the card too: 1 GiB more is left alone.
        max_model_len: Tokens per sequence: a number, ``8k``, or ``auto`` for the longest that fits.
        max_num_seqs: Sequences that must fit at full length together; without it one, and the
            others share what is left.
        kv_cache_dtype: KV-cache format (``auto``, ``fp8`` …), or one per side: ``k=auto,v=fp8``.
        quantization: Weight format, or ``auto`` to detect it.
        dtype: Activation dtype; ``auto`` takes the checkpoint's.
        device: Where to run, without ``--gpu`` and ``--memory``.
        embedding_device: Where token embeddings live; ``auto`` moves them to host memory when a
            model fits its card only so.
        offload_layers: Of the last layers so many keep their weights in host memory.
        cpu_offload_gb: The same, told in GiB of weights.
        max_num_batched_tokens: Tokens computed in one step at most.
        block_size: Tokens per KV-cache block.
        enforce_eager: No CUDA graphs.
        revision: Branch, tag or commit of a hub id.
        disable_plugin: Plugins not to load, by distribution or entry-point name.
    """

    model: str = ""
    gpu: str | None = None
    memory: str | None = None
    desktop: bool = False
    max_model_len: int | str = "auto"
    max_num_seqs: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str = "auto"
    dtype: DType = "auto"
    device: Device = "auto"
    embedding_device: EmbeddingDevice = "auto"
    offload_layers: int = 0
    cpu_offload_gb: float = 0.0
    max_num_batched_tokens: int = 2048
    block_size: int = 256
    enforce_eager: bool = False
    revision: str | None = None
    disable_plugin: tuple[str, ...] = ()

    def engine_config(self) -> EngineConfig:
        """The same as ``ingle serve`` would take it.

        Raises:
            ConfigError: When an option cannot work.
        """
        if self.gpu is not None and self.memory is not None:
            raise ConfigError("--gpu and --memory say the same thing; give one of them.")
        config = EngineConfig(
            model=self.model,
            revision=self.revision,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            embedding_device=self.embedding_device,
            offload_layers=self.offload_layers,
            cpu_offload_gb=self.cpu_offload_gb,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            enforce_eager=self.enforce_eager,
            disable_plugin=self.disable_plugin,
        )
        if self.max_num_seqs is None:
            return config
        return replace(config, max_num_seqs=self.max_num_seqs)


def fit(
    what: FitConfig,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Say whether a model fits a card, with every term, and what would fit when it does not.

    Reads headers only and needs no card.

    Args:
        json: Print JSON instead of a table.
    """
    from ingle.engine.fit import judge
    from ingle.engine.fit_advice import advise

    verdict = judge(_question(what))
    suggestions = advise(verdict)
    if json:
        listed = [suggestion.to_dict() for suggestion in suggestions]
        print(json_module.dumps({**verdict.to_dict(), "suggestions": listed}, indent=2))
    else:
        print("\n".join(fit_lines(verdict, suggestions)))


def _question(what: FitConfig) -> Question:
    from ingle.checkpoint.hub import find_model
    from ingle.cli.demo_model import or_demo_model
    from ingle.engine.fit_inputs import ask
    from ingle.registry.loader import load_plugins

    target = _target(what)
    config = or_demo_model(what.engine_config())
    path = find_model(config.model, config.revision)
    registry = load_plugins(config.disable_plugin)
    return ask(config, path, registry, target, what.max_num_seqs or 1)


def _target(what: FitConfig) -> Target:
    from ingle.engine.cards import find_card
    from ingle.engine.fit_inputs import planned_card, this_machine

    if what.gpu is not None:
        return planned_card(find_card(what.gpu), None, what.desktop)
    if what.memory is not None:
        return planned_card(None, _card_memory(what.memory), what.desktop)
    return this_machine(what.device)


def _card_memory(text: str) -> int:
    """The bytes of ``--memory``.

    Raises:
        ConfigError: When it is no size, or one that no card has.
    """
    size = parse_bytes("--memory", text)
    if size < SMALLEST_CARD:
        raise ConfigError(
            f"--memory {text} is {size:,} bytes, less than any card has; give it with a unit, such "
            "as --memory 24GiB."
        )
    return size


def fit_lines(verdict: Verdict, suggestions: list[Suggestion]) -> list[str]:
    """The answer for people: the terms, the sum, the verdict, and what would fit."""
    plan, question, target = verdict.plan, verdict.question, verdict.target
    lines = [f"{question.config.model} on {target.name}", ""]
    lines += [_row(*term) for term in _terms(verdict)]
    lines += [
        "-" * 48,
        _row("needed", verdict.total_bytes, ""),
        _row("budget", verdict.budget_bytes, _budget_note(verdict)),
        "",
        _verdict_line(verdict),
    ]
    if verdict.fits:
        spare = plan.longest(verdict.cache_limit)
        lines.append(f"The cache can hold {spare:,} tokens, shared by all sequences.")
        speed = verdict.tokens_per_second
        if speed is not None:
            pace = f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"
            lines.append(f"Expected: about {pace} tokens/s, one sequence at full context.")
    if suggestions:
        lines += ["", "What would fit:"]
        lines += [f"- {_advice_line(suggestion)}" for suggestion in suggestions]
    return lines


def _terms(verdict: Verdict) -> list[tuple[str, int, str]]:
    plan, question = verdict.plan, verdict.question
    weights = plan.weights
    per_token = plan.bytes_per_token / 1024
    sequences = question.num_sequences
    held = f"{verdict.max_model_len:,} tokens" + (f" x {sequences}" if sequences > 1 else "")
    on_host = plan.embeddings_on_host
    return [
        (
            "weights",
            plan.weights_bytes - (0 if on_host else weights.embeddings_bytes),
            _weights_note(verdict),
        ),
        (
            "token embeddings",
            0 if on_host else weights.embeddings_bytes,
            f"{weights.embeddings_bytes / GIB:.2f} GiB, in host memory" if on_host else "",
        ),
        (
            "KV cache",
            verdict.kv_cache_bytes,
            f"{held} of {per_token:,.1f} KiB, {question.cache_format}",
        ),
        (
            "activations",
            plan.activation_bytes,
            f"chunks of {question.config.max_num_batched_tokens:,} tokens",
        ),
        ("workspace", plan.workspace_bytes, "kernels' scratch, rotary tables"),
        *_terms_of_kind(verdict),
    ]


def _terms_of_kind(verdict: Verdict) -> list[tuple[str, int, str]]:
    """The terms that only a card, or only a CPU, has."""
    plan = verdict.plan
    if verdict.target.device_type == "cpu":
        note = "plain matrices beside the packed ones" if plan.compiled_bytes else ""
        return [
            ("compiled decode", plan.compiled_bytes, note),
            ("runtime", plan.context_bytes, "tokenizer, code, what the allocator keeps"),
        ]
    return [("graphs", plan.graphs_bytes, ""), ("runtime context", plan.context_bytes, "")]


def _weights_note(verdict: Verdict) -> str:
    weights = verdict.plan.weights
    head = f"head {weights.head_bytes / GIB:.2f} GiB"
    plan, name = verdict.plan, verdict.question.format_name
    note = f"{name}, {weights.bits_per_weight:.2f} bits per weight, {head}"
    if plan.offloaded_layers:
        note += (
            f"; {plan.offloaded_layers} layers ({plan.offloaded_bytes / GIB:.2f} GiB) in host "
            f"memory, {plan.buffer_bytes / GIB:.2f} to stream into"
        )
    return note


def _budget_note(verdict: Verdict) -> str:
    target = verdict.target
    note = f"{target.total_bytes / GIB:.2f} less {target.reserve_bytes / GIB:.2f} reserved"
    if target.device_type == "cpu":
        note += "; the cache takes 4 GiB or 40 % at most"
    return note


def _row(name: str, size: int, note: str) -> str:
    return f"{name:18}{size / GIB:8.2f} GiB   {note}".rstrip()


def _verdict_line(verdict: Verdict) -> str:
    margin = abs(verdict.margin_bytes) / GIB
    context = f"{verdict.max_model_len:,} tokens"
    if verdict.fits:
        longest = verdict.question.model.max_position_embeddings
        if verdict.question.config.max_model_len == "auto" and verdict.max_model_len < longest:
            context += f" (the model could take {longest:,})"
        return f"FITS with a context of {context}; {margin:.2f} GiB to spare."
    return f"DOES NOT FIT with a context of {context}; {margin:.2f} GiB are missing."


def _advice_line(suggestion: Suggestion) -> str:
    flags = f": {suggestion.flags}" if suggestion.flags else ""
    return f"{suggestion.text}{flags}"
