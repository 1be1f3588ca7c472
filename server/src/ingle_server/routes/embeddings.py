"""``POST /v1/embeddings``: any decoder's hidden states, pooled."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse

from ingle import SamplingParams
from ingle_server.body import read_json
from ingle_server.error_shapes import renamed
from ingle_server.errors import ApiError, bad_request, generation_failed, shown
from ingle_server.flight import Prompt
from ingle_server.outputs import UsageCounter, collect
from ingle_server.plain import json_response, unless_client_leaves
from ingle_server.prompts import encode_prompts, split_prompts
from ingle_server.schemas.completion import CompletionRequest
from ingle_server.schemas.embeddings import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from ingle_server.service import Service

_DECODER = msgspec.json.Decoder(EmbeddingRequest)


@post("/v1/embeddings", status_code=200)
async def create_embeddings(
    request: Request[Any, Any, Any], service: NamedDependency[Service]
) -> ASGIResponse:
    """One vector of length 1 per input."""
    config = service.config
    body = await read_json(request, _DECODER, config.max_body_bytes, config.header_timeout)
    prompts = await _prompts(service, body)
    params = SamplingParams(max_tokens=0, pooling=body.pooling or "mean", temperature=0.0)
    flight = service.take_off("embd", prompts, params)
    try:
        usage = UsageCounter(flight.num_prompt_tokens)
        collected = await unless_client_leaves(request, collect(flight, usage))
    finally:
        service.land(flight)
    data = [
        Embedding(index=index, embedding=_shown(body, each.embedding))
        for index, each in enumerate(collected)
    ]
    count = flight.num_prompt_tokens
    counts = EmbeddingUsage(prompt_tokens=count, total_tokens=count)
    return json_response(EmbeddingList(data=data, model=body.model, usage=counts))


async def _prompts(service: Service, body: EmbeddingRequest) -> list[Prompt]:
    service.check_model(body.model)
    service.check_alive()
    if body.encoding_format not in (None, "float", "base64"):
        raise bad_request(
            f"encoding_format must be float or base64, got {shown(body.encoding_format)}.",
            "encoding_format",
        )
    if body.dimensions is not None and body.dimensions < 1:
        raise bad_request(f"dimensions must be at least 1, got {body.dimensions}.", "dimensions")
    keep, longest = body.truncate_prompt_tokens, service.engine.info.max_model_len
    if keep is not None and not (keep == -1 or 1 <= keep <= longest):
        raise bad_request(
            f"truncate_prompt_tokens must be -1 or from 1 to {longest}, got {keep}.",
            "truncate_prompt_tokens",
        )
    fields = CompletionRequest(
        model=body.model,
        prompt=None,
        truncate_prompt_tokens=keep,
        add_special_tokens=body.add_special_tokens,
    )
    try:
        raw = split_prompts(body.input)
        if len(raw) > service.config.max_prompts:
            raise bad_request(
                f"prompt may hold at most {service.config.max_prompts} texts, got {len(raw)}.",
                "prompt",
            )
        return await encode_prompts(service, fields, raw)
    except ApiError as error:
        raise renamed(error, {"prompt": "input"}) from None


def _shown(body: EmbeddingRequest, pooled: list[float] | None) -> list[float] | str:
    if pooled is None:
        raise generation_failed()
    size = body.dimensions or len(pooled)
    if size > len(pooled):
        raise bad_request(
            f"dimensions may be at most {len(pooled)}, the model's hidden size; got {size}.",
            "dimensions",
        )
    length = math.sqrt(sum(value * value for value in pooled[:size])) or 1.0
    vector = array("f", (value / length for value in pooled[:size]))
    if body.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()
