"""Continuations of prompts, from a request's fields to a generation under way."""

from __future__ import annotations

from dataclasses import replace

from ingle_server.chat_features import check_response_format
from ingle_server.errors import bad_request, not_supported
from ingle_server.flight import Flight, Prompt
from ingle_server.prompts import RawPrompt, encode_prompts, split_prompts
from ingle_server.schemas.completion import UNNAMED, CompletionRequest
from ingle_server.service import Service
from ingle_server.structured import Wanted, check_grammar, wanted_output
from ingle_server.translate import (
    DEFAULT_COMPLETION_TOKENS,
    STRICT,
    Limits,
    check_count,
    check_fields,
    check_logprobs,
    check_max_tokens,
    sampling_params,
    token_budget,
)
from ingle_server.words import words_of

MAX_BEST_OF = 20


async def begin_completion(
    service: Service, body: CompletionRequest, prefix: str, limits: Limits = STRICT
) -> Flight:
    """Checks a request in full and starts it; its id begins with ``prefix``.

    Raises:
        ApiError: 400, 404 or 503.
        RequestError: 400.
    """
    raw = _check(service, body, limits)
    wanted = wanted_output(body, body.response_format)
    await check_grammar(service.engine, wanted)
    prompts = await encode_prompts(service, body, raw)
    return _take_off(service, body, prompts, (wanted, limits, prefix))


def _check(service: Service, body: CompletionRequest, limits: Limits) -> list[RawPrompt]:
    """Checks every field, and gives the prompts to tokenise.

    Raises:
        ApiError: 400, 404 or 503.
        RequestError: 400.
    """
    _name_model(service, body)
    service.check_alive()
    check_max_tokens("max_tokens", body.max_tokens, at_least=0 if body.echo else 1)
    raw = split_prompts(body.prompt)
    check_count(body, len(raw), service.config.max_prompts)
    check_fields(body, service.engine.info, limits)
    check_logprobs("logprobs", body.logprobs)
    _check_best_of(body, len(raw) * (body.best_of or 1), service.config.max_prompts)
    check_response_format(body.response_format)
    if body.suffix:
        raise not_supported("suffix", "Inserting between prompt and suffix")
    return raw


def _name_model(service: Service, body: CompletionRequest) -> None:
    """Checks the model's name, and puts it in where a client may leave it out."""
    if body.model == UNNAMED and body.api_type is None:
        raise bad_request("model is required.", "model")
    if body.api_type is not None and body.model in (UNNAMED, ""):
        body.model = service.names[0]
    service.check_model(body.model)


def _check_best_of(body: CompletionRequest, total: int, limit: int) -> None:
    """0 is as good as absent; ``total`` completions would be made."""
    if body.best_of is None:
        return
    if not 0 <= body.best_of <= MAX_BEST_OF:
        raise bad_request(
            f"best_of must be from 0 to {MAX_BEST_OF}, got {body.best_of}.", "best_of"
        )
    if 0 < body.best_of < (body.n or 1):
        raise bad_request(f"best_of must be at least n ({body.n}), got {body.best_of}.", "best_of")
    if body.stream and body.best_of > (body.n or 1):
        raise bad_request(
            f"best_of above n cannot be streamed, got {body.best_of}: only at the end is it known "
            "which are the best.",
            "best_of",
        )
    if total > limit:
        raise bad_request(f"Prompts times best_of may be at most {limit}, got {total}.", "best_of")


def _take_off(
    service: Service,
    body: CompletionRequest,
    prompts: list[Prompt],
    also: tuple[Wanted | None, Limits, str],
) -> Flight:
    info = service.engine.info
    wanted, limits, prefix = also
    asked = ("max_tokens", body.max_tokens)
    max_tokens = token_budget(
        prompts, info, limits.cut(asked), limits.default(asked, DEFAULT_COMPLETION_TOKENS)
    )
    params = sampling_params(
        body,
        info,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        structured=None if wanted is None else wanted.grammar,
        words=words_of(service.engine, body),
    )
    if (body.best_of or 0) > params.n:
        logprobs = 0 if params.logprobs is None else params.logprobs
        params = replace(params, n=body.best_of or 1, logprobs=logprobs)
    if body.echo and body.logprobs is not None:
        most = max(body.logprobs, body.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=most)
    return service.take_off(prefix, prompts, params)
