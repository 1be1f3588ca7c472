"""``POST /v1/model/load`` and ``/v1/model/unload``."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelLoadRequest(msgspec.Struct, kw_only=True):
    """Which model to load; ``model``, ``name`` and ``model_name`` mean the same."""

    model: str | None = None
    name: str | None = None
    model_name: str | None = None
    stream: bool | None = None


class ModelLoadProgress(msgspec.Struct, kw_only=True):
    """How far loading is; ``module`` of ``modules`` is the same in percent, for TabbyAPI's
    clients."""

    model: str
    model_type: Literal["model"] = "model"
    status: Literal["processing", "finished"]
    bytes_read: int = 0
    bytes_total: int = 0
    module: int
    modules: int = 100


class ModelState(msgspec.Struct, kw_only=True):
    """What an unload has come to."""

    model: str | None
    status: Literal["unloaded"] = "unloaded"
