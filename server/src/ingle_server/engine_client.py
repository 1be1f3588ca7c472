"""What the server needs of an engine. ``engine_adapter.py`` fits ``ingle.AsyncEngine`` to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingle import RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the server must know of the model.

    Attributes:
        name: The model as the operator gave it: a folder or a hub id.
        max_model_len: Tokens per sequence, prompt and output together; the one limit that
            admission, ``/v1/models`` and the cache share.
        vocab_size: Rows of the output layer; every token id of a request is below it.
        max_token_chars: Characters of the longest token, at least; text longer than this times
            ``max_model_len`` cannot fit, and is refused before it is tokenised.
        generation_defaults: Sampling parameters from ``generation_config.json``.
        has_chat_template: Whether chats can be served.
        chat_template: Its source, which shows how the model writes calls; "" when not known.
        start_token_id: What a text of no tokens goes on from, or None: ``<|endoftext|>`` where
            there is one, else the token that texts begin with.
        memory_report: Memory predicted and measured, one line; empty when not known.
    """

    name: str
    max_model_len: int
    vocab_size: int
    max_token_chars: int = 64
    generation_defaults: Mapping[str, int | float] = field(default_factory=dict)
    has_chat_template: bool = True
    chat_template: str = ""
    start_token_id: int | None = None
    memory_report: str = ""


class HistogramData(Protocol):
    """Observations counted by size."""

    @property
    def bounds(self) -> Sequence[float]:
        """Upper bounds, inclusive, ascending."""
        ...

    @property
    def counts(self) -> Sequence[int]:
        """Per bucket, not accumulated; the last one has no upper bound."""
        ...

    @property
    def total(self) -> float:
        """Sum of all observations."""
        ...


class EngineStats(Protocol):
    """The engine's state at one moment; totals count from its start."""

    @property
    def num_requests_running(self) -> int:
        """Sequences being computed."""
        ...

    @property
    def num_requests_waiting(self) -> int:
        """Sequences waiting for their turn."""
        ...

    @property
    def kv_cache_usage_perc(self) -> float:
        """Share of the cache's blocks that live requests hold, 0 to 1."""
        ...

    @property
    def kv_cache_blocks(self) -> int:
        """Blocks there are to give out."""
        ...

    @property
    def kv_cache_used_blocks(self) -> int:
        """Of these, the ones that live requests hold."""
        ...

    @property
    def prompt_tokens_total(self) -> int:
        """Prompt tokens of requests that got their first token."""
        ...

    @property
    def generation_tokens_total(self) -> int:
        """Tokens generated."""
        ...

    @property
    def num_preemptions_total(self) -> int:
        """Times a sequence lost its blocks to an older one."""
        ...

    @property
    def prefix_cache_queries_total(self) -> int:
        """Tokens looked up in the prefix cache."""
        ...

    @property
    def prefix_cache_hits_total(self) -> int:
        """Of these, the ones found."""
        ...

    @property
    def decode_steps_total(self) -> Mapping[str, int]:
        """Steps, by whether the next one was begun before their tokens were read, or why not."""
        ...

    @property
    def num_rows_in_vain_total(self) -> int:
        """Tokens that were begun ahead and nobody wanted."""
        ...

    @property
    def num_drafts_total(self) -> int:
        """Guesses of next tokens that were computed."""
        ...

    @property
    def num_draft_tokens_total(self) -> int:
        """Tokens in them."""
        ...

    @property
    def num_accepted_tokens_total(self) -> int:
        """Of these, the ones that were right."""
        ...

    @property
    def requests_finished_total(self) -> Mapping[str, int]:
        """Sequences ended, by finish reason."""
        ...

    @property
    def time_to_first_token_seconds(self) -> HistogramData:
        """One observation per request."""
        ...

    @property
    def inter_token_seconds(self) -> HistogramData:
        """One observation per generated token but the first."""
        ...

    @property
    def request_seconds(self) -> HistogramData:
        """One observation per finished request."""
        ...

    @property
    def queue_seconds(self) -> HistogramData:
        """From arrival to the first step, per finished request."""
        ...

    @property
    def prefill_seconds(self) -> HistogramData:
        """From there to the first token, likewise."""
        ...

    @property
    def decode_seconds(self) -> HistogramData:
        """From the first token to the last, likewise."""
        ...

    @property
    def per_output_token_seconds(self) -> HistogramData:
        """The mean time between a request's tokens."""
        ...

    @property
    def prompt_lengths(self) -> HistogramData:
        """Tokens of the prompt, per finished request."""
        ...

    @property
    def generation_lengths(self) -> HistogramData:
        """Tokens generated, per finished request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """One conversation to render.

    Attributes:
        messages: As templates want them: ``role``, ``content`` and so on.
        tools: Tool descriptions, as the client sent them.
        add_generation_prompt: Open the assistant's turn at the end.
        continue_final_message: Leave the last message's turn open.
        add_special_tokens: Let the tokenizer add its own, on top of the template's.
        template_kwargs: More variables for the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class EngineClient(Protocol):
    """An engine, seen from the server. ``encode`` and ``render_chat`` may run in a thread."""

    @property
    def info(self) -> ModelInfo:
        """The model; constant."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ``token_ids``; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's raw bytes, perhaps half a character."""
        ...

    def render_chat(self, chat: ChatPrompt) -> list[int]:
        """Token ids of a conversation.

        Raises:
            RequestError: When the template refuses the messages.
        """
        ...

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compiles the request's grammar, which may take seconds: for a thread.

        Raises:
            RequestError: When it can't be followed.
        """
        ...

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields what is new. Closing the iterator aborts the request.

        Raises:
            RequestError: At the first step, when the request is wrong.
            CapacityError: At the first step, when the queue is full.
            EngineDeadError: At any step.
        """
        ...

    def stats(self) -> EngineStats:
        """The engine's state now."""
        ...

    def plugin_report(self) -> Mapping[str, Any]:
        """What every plugin offers, what was chosen and why, as plain data for JSON."""
        ...

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine thread has ended."""
        ...

    def step_seconds(self) -> float:
        """How long the step under way has been running; 0 between steps."""
        ...

    async def shutdown(self, step_timeout: float | None = None) -> bool:
        """Ends the engine; what still runs is aborted.

        Returns:
            Whether it has ended: a step under way may take longer than ``step_timeout`` seconds.
        """
        ...
