"""The OpenAI-compatible HTTP server of Ingle. ``ingle serve`` runs it; ``create_app`` embeds it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingle_server.app import create_app
    from ingle_server.config import ServerConfig
    from ingle_server.engine_client import EngineClient, EngineStats, ModelInfo

__version__ = "0.1.0"

__all__ = ["EngineClient", "EngineStats", "ModelInfo", "ServerConfig", "__version__", "create_app"]

_HOMES = {"ServerConfig": "ingle_server.config", "create_app": "ingle_server.app"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ingle_server' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "ingle_server.engine_client")), name)
