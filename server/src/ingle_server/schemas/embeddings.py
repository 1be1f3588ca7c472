"""``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Literal

import msgspec

from ingle.request import Pooling


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The request. ``pooling`` is Ingle's own; by default the mean of all tokens is taken."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Pooling | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector of length 1: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """One vector per input, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
