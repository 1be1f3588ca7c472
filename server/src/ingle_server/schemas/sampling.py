"""The request fields that completions and chats share."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """``structured_outputs``: exactly one of its fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of both endpoints; null is as good as absent in all of them.

    Decoding is strict (no ``"yes"`` for true, no 1.5 for an integer); ranges are checked in
    ``translate.py``. Fields typed ``Any`` are known only so that they can be refused by name.
    """

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # vLLM's extensions, which OpenAI clients send through ``extra_body``.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None

    # The same under the names vLLM used before.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None

    # TabbyAPI's: texts that are gone back from, and ids (as a list or as "1,2") never drawn.
    banned_strings: str | list[str] | None = None
    banned_tokens: str | list[int] | None = None
    allowed_tokens: str | list[int] | None = None

    # Aphrodite's samplers.
    sampler_priority: str | list[int | str] | None = None
    custom_token_bans: str | list[int] | None = None
    top_a: float | None = None
    tfs: float | None = None
    typical_p: float | None = None
    eta_cutoff: float | None = None
    epsilon_cutoff: float | None = None
    nsigma: float | None = None
    smoothing_factor: float | None = None
    smoothing_curve: float | None = None
    xtc_threshold: float | None = None
    xtc_probability: float | None = None
    skew: float | None = None
    dynatemp_min: float | None = None
    dynatemp_max: float | None = None
    dynatemp_exponent: float | None = None
    temperature_last: bool | None = None
    mirostat_mode: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    no_repeat_ngram_size: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: str | list[str] | None = None
    dry_range: int | None = None
    dry_max_ngram: int | None = None
    dry_max_occurrences: int | None = None
    dry_early_exit_match_len: int | None = None

    # KoboldCpp's order, and the repetition penalty's reach as TabbyAPI has it.
    sampler_order: list[int] | None = None
    penalty_range: int | None = None

    # The same under names that other engines gave them.
    repetition_penalty_range: int | None = None
    repetition_range: int | None = None
    rep_pen_range: int | None = None
    rep_pen: float | None = None
    min_temp: float | None = None
    max_temp: float | None = None
    temp_exponent: float | None = None
    stop_sequence: str | list[str] | None = None
    stopping_strings: str | list[str] | None = None
    ban_eos_token: bool | None = None
    add_bos_token: bool | None = None
    grammar_string: str | None = None
    regex_pattern: str | None = None
    json_schema: str | dict[str, Any] | None = None
    typical: float | None = None
    top_n_sigma: float | None = None
    dynatemp_low: float | None = None
    dynatemp_high: float | None = None
    dry_penalty_last_n: int | None = None

    prompt_logprobs: int | None = None

    # Ask for `timings` in the answer, in a stream in its last chunks.
    timings: bool | None = None
    timings_per_token: bool | None = None

    # Not there: known only to be refused by name, see ``lacking.py``.
    use_beam_search: bool | None = None
    prompt_embeds: Any = None
    num_beams: Any = None
    guidance_scale: Any = None
    cfg_scale: Any = None
    token_healing: Any = None
    encoder_repetition_penalty: Any = None
    penalty_alpha: Any = None
    repetition_decay: Any = None
    adaptive_target: Any = None
    response_prefix: Any = None
    priority: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    logprob_token_ids: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    vllm_xargs: Any = None
    aphrodite_xargs: Any = None
    spaces_between_special_tokens: bool | None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One token at one position of the prompt; ``rank`` is 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token: its own and the likeliest tokens by id, null for the first."""
