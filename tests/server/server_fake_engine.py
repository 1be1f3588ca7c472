"""An engine without a model: one token per UTF-8 byte, and answers that are known in advance."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tokenizers

from ingle import CompletionOutput, EngineDeadError, RequestError, RequestOutput, SamplingParams
from ingle.checkpoint.token_bytes import BYTE_LEVEL_ALPHABET
from ingle.request import RequestTimes, TokenLogprob
from ingle.sampling.grammar import GrammarCompiler
from ingle_server.engine_client import ChatPrompt, ModelInfo

EOS = 256
VOCAB_SIZE = 300
CONTEXT = 1024
TIMES = RequestTimes(
    queue_seconds=0.5,
    prefill_seconds=0.25,
    decode_seconds=2.0,
    num_draft_tokens=7,
    num_accepted_tokens=3,
)
ANSWER = "Zoë says: €5, good 😀 day."


def byte_tokenizer_json() -> str:
    """A tokenizer with one token per byte, and one that ends a text."""
    vocabulary = dict(BYTE_LEVEL_ALPHABET)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend.to_str()


@dataclass
class Histogram:
    bounds: tuple[float, ...] = (0.1, 1.0)
    counts: tuple[int, ...] = (1, 2, 3)
    total: float = 7.5


@dataclass
class Stats:
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0
    kv_cache_blocks: int = 64
    kv_cache_used_blocks: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    num_preemptions_total: int = 0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    num_drafts_total: int = 0
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
    decode_steps_total: Mapping[str, int] = field(default_factory=dict)
    num_rows_in_vain_total: int = 0
    requests_finished_total: Mapping[str, int] = field(default_factory=dict)
    time_to_first_token_seconds: Histogram = field(default_factory=Histogram)
    inter_token_seconds: Histogram = field(default_factory=Histogram)
    request_seconds: Histogram = field(default_factory=Histogram)
    queue_seconds: Histogram = field(default_factory=Histogram)
    prefill_seconds: Histogram = field(default_factory=Histogram)
    decode_seconds: Histogram = field(default_factory=Histogram)
    per_output_token_seconds: Histogram = field(default_factory=Histogram)
    prompt_lengths: Histogram = field(default_factory=Histogram)
    generation_lengths: Histogram = field(default_factory=Histogram)


@dataclass
class Seen:
    """A request as it reached the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None


class FakeEngine:
    """Answers ``ANSWER``, one byte a step, with text at character borders only.

    ``hold`` makes every request stop before step number ``hold`` until ``release``.
    """

    def __init__(self, *, hold: int | None = None, **info: Any) -> None:
        self._info = ModelInfo(
            **{
                "name": "fake/model",
                "max_model_len": CONTEXT,
                "vocab_size": VOCAB_SIZE,
                "max_token_chars": 4,
                **info,
            }
        )
        self.hold = hold
        self.answer = ANSWER
        self.grammars = GrammarCompiler(byte_tokenizer_json, VOCAB_SIZE, [EOS])
        self.gate = asyncio.Event()
        self.seen: list[Seen] = []
        self.chats: list[ChatPrompt] = []
        self.aborted: list[str] = []
        self.active: set[str] = set()
        self.finished: Counter[str] = Counter()
        self.dead = False
        self.stuck_seconds = 0.0
        self.refusal: Exception | None = None
        self.row_error: str | None = None
        self.num_cached = 0
        self.num_tokens = 0

    @property
    def info(self) -> ModelInfo:
        return self._info

    def change_info(self, **changes: Any) -> None:
        self._info = replace(self._info, **changes)

    def release(self) -> None:
        self.hold = None
        self.gate.set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def render_chat(self, chat: ChatPrompt) -> list[int]:
        self.chats.append(chat)
        if any(message["content"] == "template, refuse!" for message in chat.messages):
            raise RequestError("The chat template refuses it.", param="messages")
        return list("".join(f"{m['role']}: {m['content']}\n" for m in chat.messages).encode())

    def compile_grammar(self, params: SamplingParams) -> None:
        if params.structured is not None:
            self.grammars.matcher(params.structured)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.dead:
            raise EngineDeadError("thread 0x7f00dead ended in /usr/lib/engine.py")
        if self.refusal is not None:
            raise self.refusal
        self.seen.append(Seen(request_id, prompt_token_ids, params, prompt))
        self.active.add(request_id)
        done = False
        try:
            async for output in self._steps(request_id, prompt_token_ids, params):
                yield output
                done = done or output.finished
        finally:
            self.active.discard(request_id)
            if not done:
                self.aborted.append(request_id)

    async def _steps(
        self, request_id: str, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        tokens = [*self.answer.encode(), EOS]
        if params.ignore_eos or params.max_tokens is None or params.max_tokens > len(tokens):
            tokens = tokens if not params.ignore_eos else list(b"x" * (params.max_tokens or 0))
        limit = len(tokens) if params.max_tokens is None else min(params.max_tokens, len(tokens))
        pending = b""
        judged = judged_prompt(prompt, params)
        if params.pooling is not None:
            vector = [float(len(prompt)), 3.0, 4.0, 0.0]
            yield RequestOutput(
                request_id=request_id,
                outputs=[CompletionOutput(index=0, finish_reason="length")],
                finished=True,
                embedding=vector,
            )
            return
        if limit == 0:
            outputs = [CompletionOutput(index=i, finish_reason="length") for i in range(params.n)]
            yield RequestOutput(
                request_id=request_id, outputs=outputs, finished=True, prompt_logprobs=judged
            )
        for step in range(limit):
            await self._wait_for_step(step)
            token = tokens[step]
            pending += self.token_bytes(token)
            text = _whole(pending)
            pending = pending[len(text.encode()) :]
            last = step + 1 == limit
            reason = None if not last else "stop" if token == EOS else "length"
            if self.row_error is not None and step == 2:
                reason = "error"
            if last and pending and reason == "length":
                text += pending.decode(errors="replace")
            outputs = [self._piece(i, token, text, reason, params) for i in range(params.n)]
            self.num_tokens += params.n
            if reason is not None:
                self.finished[reason] += params.n
            yield RequestOutput(
                request_id=request_id,
                prompt_token_ids=prompt,
                outputs=outputs,
                finished=reason is not None,
                num_cached_tokens=self.num_cached,
                times=TIMES if reason is not None else None,
                prompt_logprobs=judged if step == 0 else None,
            )
            if reason is not None:
                return

    async def _wait_for_step(self, step: int) -> None:
        if self.hold is not None and step >= self.hold:
            while not self.gate.is_set():
                if self.dead:
                    raise EngineDeadError("thread 0x7f00dead ended in /usr/lib/engine.py")
                await asyncio.sleep(0.01)
        else:
            await asyncio.sleep(0)

    def _piece(
        self, index: int, token: int, text: str, reason: Any, params: SamplingParams
    ) -> CompletionOutput:
        logprobs = None
        if params.logprobs is not None:
            others = [
                (token, -0.5),
                (65, -1.5),
                (66, -math.inf),
                *((67 + i, -9.0) for i in range(17)),
            ]
            top = tuple(others[: params.logprobs])
            logprobs = [TokenLogprob(token_id=token, logprob=-0.5, rank=1, top=top)]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=[token],
            logprobs=logprobs,
            finish_reason=reason,
            error=self.row_error if reason == "error" else None,
        )

    def stats(self) -> Stats:
        return Stats(
            num_requests_running=len(self.active),
            kv_cache_used_blocks=len(self.active),
            kv_cache_usage_perc=len(self.active) / 64,
            generation_tokens_total=self.num_tokens,
            requests_finished_total=dict(self.finished),
        )

    def plugin_report(self) -> Mapping[str, Any]:
        return {"plugins": [{"name": "dense", "status": "ok"}]}

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("thread 0x7f00dead ended in /usr/lib/engine.py")

    def step_seconds(self) -> float:
        return self.stuck_seconds

    async def shutdown(self, step_timeout: float | None = None) -> bool:
        self.release()
        return True


def _whole(data: bytes) -> str:
    """The longest beginning of ``data`` that is whole characters."""
    for end in range(len(data), -1, -1):
        try:
            return data[:end].decode()
        except UnicodeDecodeError:
            continue
    return ""


def judged_prompt(prompt: list[int], params: SamplingParams) -> list[TokenLogprob | None] | None:
    """Every prompt token but the first at rank 3; tokens 65 and 66 are the likeliest."""
    if params.prompt_logprobs is None:
        return None
    top = ((65, -0.1), (66, -0.2))[: params.prompt_logprobs]
    entries = [TokenLogprob(token_id=t, logprob=-1.5, rank=3, top=top) for t in prompt[1:]]
    return [None, *entries]
