"""What a client asks for and what it gets back. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from ingle.sampling_checks import check_sampling, refuse

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["mean", "last"]
"""How the hidden states of a prompt become one vector."""

MIN_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing logits by less overflows float32."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like, as plain data.

    Attributes:
        kind: ``json``: a JSON Schema; ``regex``; ``choice``: one of several texts; ``grammar``:
            GBNF or Lark, whichever it is; ``lark``.
        text: The grammar; for ``json`` and ``choice`` as JSON text.
    """

    kind: Literal["json", "regex", "choice", "grammar", "lark"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Validated where it is built.

    Attributes:
        n: Completions per prompt, 1 to 128.
        temperature: 0 (or below 1e-5) is greedy.
        top_k: Keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches p.
        min_p: Keep tokens at least this share of the likeliest one's probability.
        presence_penalty: Subtracted once from every token generated before, -2 to 2.
        frequency_penalty: Subtracted per earlier generation of the token, -2 to 2.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in
            prompt or output; 1 is off.
        logit_bias: Added to logits, by token id, -100 to 100.
        seed: Same seed, same draws, whatever else is in the batch; None draws one. In float32 that
            means the same tokens; in 16 bits the size of a batch can tip logits that are nearly
            equal.
        max_tokens: Tokens to generate; None goes on to the end of the context.
        min_tokens: End-of-sequence and stop tokens are barred before this many.
        stop: Strings that end generation; not part of the text.
        stop_token_ids: Token ids that end generation.
        ignore_eos: Goes on past the end-of-sequence token.
        include_stop_str_in_output: Leaves the stop string in the text.
        skip_special_tokens: Leaves special tokens out of the text.
        logprobs: Number of likeliest tokens reported per position, 0 to 20; None reports none.
        prompt_logprobs: The same for every token of the prompt but the first, 0 to 20; None
            reports none.
        pooling: Reports the prompt's hidden states as one vector; with ``max_tokens`` 0 nothing
            is generated.
        cache_salt: Requests with different salts never share cached blocks.
        structured: The grammar that the answer follows; None leaves it free.
        top_a, tfs, typical_p, eta_cutoff, epsilon_cutoff, nsigma: Truncations, see
            ``docs/samplers.md`` for the formulas of these and the following.
        smoothing_factor, smoothing_curve: Quadratic reshaping; factor 0 is off.
        xtc_threshold, xtc_probability: Excluding top choices; probability 0 is off.
        skew: Above 0 favours unlikely tokens.
        dynatemp_min, dynatemp_max, dynatemp_exponent: Temperature by entropy; maximum 0 is off.
        temperature_last: Applies the temperature after the truncations.
        mirostat_mode, mirostat_tau, mirostat_eta: 2 replaces the truncations by Mirostat 2.
        no_repeat_ngram_size: No run of so many tokens comes twice; 0 is off.
        dry_*: DRY repetition penalty; multiplier 0 is off, breakers are token ids.
        bad_words_token_ids: Token sequences that never appear in the output.
        allowed_token_ids: The only tokens that may be drawn.
        sampler_priority: Samplers in the order in which they work, by the names of
            ``ingle.sampler_order``, Aphrodite's names or its numbers; those left out come behind,
            in their usual order. Empty keeps that.
        repetition_penalty_range: Tokens the repetition penalty looks back at; 0 looks at all.
        banned_strings: Texts that never appear in the output, whatever their case: the sequence
            goes back to the token in which one began, and on with another one.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    cache_salt: str | None = None
    structured: GrammarSpec | None = None
    top_a: float = 0.0
    tfs: float = 1.0
    typical_p: float = 1.0
    eta_cutoff: float = 0.0
    epsilon_cutoff: float = 0.0
    nsigma: float = 0.0
    smoothing_factor: float = 0.0
    smoothing_curve: float = 1.0
    xtc_threshold: float = 0.1
    xtc_probability: float = 0.0
    skew: float = 0.0
    dynatemp_min: float = 0.0
    dynatemp_max: float = 0.0
    dynatemp_exponent: float = 1.0
    temperature_last: bool = False
    mirostat_mode: int = 0
    mirostat_tau: float = 0.0
    mirostat_eta: float = 0.0
    no_repeat_ngram_size: int = 0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breaker_ids: tuple[int, ...] = ()
    dry_range: int = 0
    dry_max_ngram: int = 12
    dry_max_occurrences: int = 8
    dry_early_exit_match_len: int = 8
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_strings: tuple[str, ...] = ()
    sampler_priority: tuple[str | int, ...] = ()
    repetition_penalty_range: int = 0

    def __post_init__(self) -> None:
        check_sampling(self)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < MIN_TEMPERATURE


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuses any token id in ``params`` outside the model's vocabulary of ``vocab_size`` rows.

    Ids reach the sampler as indices, so this is the one gate for every field that carries them.
    """
    fields = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": tuple(chain.from_iterable(params.bad_words_token_ids)),
        "dry_sequence_breakers": params.dry_sequence_breaker_ids,
    }
    for name, ids in fields.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise refuse(name, token_id, f"a token id from 0 to {vocab_size - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One position's log-probabilities, of the distribution before penalties and temperature.

    Attributes:
        token_id: The sampled token, or the prompt's own.
        logprob: Its natural log-probability.
        rank: 1 for the likeliest token.
        top: The likeliest tokens as (token id, log-probability), likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion (or the piece of it that is new, when streamed).

    Attributes:
        index: 0 to n-1.
        text: Text so far; in a stream, the new text.
        token_ids: Token ids so far; in a stream, the new ones.
        logprobs: One entry per token of ``token_ids``, when asked for.
        finish_reason: None while it goes on.
        stop_reason: The stop string or stop token id that ended it, when one did.
        error: What went wrong, when ``finish_reason`` is ``"error"``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Where a finished request's time went, in seconds, and what was guessed for it.

    Attributes:
        queue_seconds: From its arrival to the first step it was in.
        prefill_seconds: From there to its first token.
        decode_seconds: From its first token to its last.
        num_draft_tokens: Tokens guessed for it and computed, over all its completions.
        num_accepted_tokens: Of these, the ones that were right.
    """

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What a request has produced.

    Attributes:
        request_id: As given.
        prompt: The prompt's text, when it was given as text.
        prompt_token_ids: The prompt's tokens.
        outputs: One per completion; in a stream, only those with news.
        finished: Whether every completion has ended.
        num_cached_tokens: Prompt tokens whose keys and values came from the prefix cache.
        prompt_logprobs: One entry per prompt token, None for the first, when asked for; in a
            stream it comes once, when the prompt has been computed.
        times: Where the time went, once it is finished.
        embedding: The pooled hidden states after the final norm, not scaled to any length, when
            asked for; in a stream it comes once.
    """

    request_id: str
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    times: RequestTimes | None = None
    embedding: list[float] | None = None
