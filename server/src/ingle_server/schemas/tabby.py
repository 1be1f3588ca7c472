"""TabbyAPI's ``/v1/model`` and ``/v1/token``."""

from __future__ import annotations

from typing import Literal

import msgspec


class TabbyParameters(msgspec.Struct, kw_only=True):
    """What is told of a model."""

    max_seq_len: int


class TabbyCard(msgspec.Struct, kw_only=True):
    """The model in memory."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ingle"
    parameters: TabbyParameters


class TabbyEncodeRequest(msgspec.Struct, kw_only=True):
    """A text."""

    text: str
    add_bos_token: bool | None = None


class TabbyTokens(msgspec.Struct, kw_only=True):
    """Its tokens."""

    tokens: list[int]
    length: int


class TabbyDecodeRequest(msgspec.Struct, kw_only=True):
    """Tokens."""

    tokens: list[int]
    decode_special_tokens: bool | None = None


class TabbyText(msgspec.Struct, kw_only=True):
    """Their text."""

    text: str
