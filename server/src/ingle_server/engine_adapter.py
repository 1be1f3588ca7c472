"""Fits ``ingle.AsyncEngine`` to what the server needs: the only file that knows both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from ingle import (
    AsyncEngine,
    CheckpointError,
    Conversation,
    EngineConfig,
    RequestOutput,
    SamplingParams,
)
from ingle_server.engine_client import ChatPrompt, EngineStats, ModelInfo

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What generation_config.json may set for requests that say nothing of it."""


def load_engine(
    config: EngineConfig, on_progress: Callable[[int, int], None] | None = None
) -> AsyncEngineClient:
    """A loaded and started engine.

    Args:
        config: What to load and how.
        on_progress: Called with (bytes read, bytes in all), in the loading thread.

    Raises:
        ConfigError, CheckpointError, PluginError, CapacityError: Why it cannot be loaded.
    """
    engine = AsyncEngine.from_config(config, on_progress=on_progress)
    client = AsyncEngineClient(engine)
    engine.start()
    return client


class AsyncEngineClient:
    """``AsyncEngine`` as an ``EngineClient``."""

    def __init__(self, engine: AsyncEngine) -> None:
        if engine.tokenizer is None:
            raise CheckpointError("The model has no tokenizer; a server needs one.")
        self._engine = engine
        self._tokenizer = tokenizer = engine.tokenizer
        start = tokenizer.token_to_id("<|endoftext|>")
        info = engine.info
        self._template = engine.chat_template
        self._info = ModelInfo(
            name=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            generation_defaults={
                name: info.generation_defaults[name]
                for name in _DEFAULTS
                if info.generation_defaults.get(name) is not None
            },
            has_chat_template=self._template.available,
            chat_template=self._template.source,
            start_token_id=tokenizer.bos_token_id if start is None else start,
            memory_report=info.memory_report,
        )

    @property
    def info(self) -> ModelInfo:
        """The model; constant."""
        return self._info

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; control tokens in it count as such."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ``token_ids``."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's raw bytes."""
        return self._tokenizer.id_to_bytes(token_id)

    def render_chat(self, chat: ChatPrompt) -> list[int]:
        """Token ids of a conversation.

        Raises:
            RequestError: When the template refuses the messages.
        """
        return self._template.encode(
            Conversation(
                messages=chat.messages,
                tools=chat.tools,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                add_special_tokens=chat.add_special_tokens,
                template_kwargs=chat.template_kwargs,
            )
        )

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compiles the request's grammar.

        Raises:
            RequestError: When it can't be followed.
        """
        self._engine.compile_grammar(params)

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields what is new; closing the iterator aborts the request."""
        return self._engine.generate(request_id, prompt_token_ids, params, prompt)

    def stats(self) -> EngineStats:
        """The engine's state now."""
        return self._engine.stats()

    def plugin_report(self) -> Mapping[str, Any]:
        """What every plugin offers, what was chosen and why."""
        return self._engine.info.plugin_report

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine thread has ended."""
        self._engine.check_health()

    def step_seconds(self) -> float:
        """How long the step under way has been running; 0 between steps."""
        return self._engine.step_seconds()

    async def shutdown(self, step_timeout: float | None = None) -> bool:
        """Ends the engine; False when a step has not returned in time."""
        return await self._engine.shutdown(step_timeout=step_timeout)
