"""``GET /v1/models``."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """One name under which the model is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ingle"
    root: str
    parent: None = None
    max_model_len: int | None
    loaded: bool = True


class ModelList(msgspec.Struct, kw_only=True):
    """Every name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
