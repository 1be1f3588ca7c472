"""Ingle: an LLM inference engine for the card you own, where formats are plugins.

Everything public is imported on first use, so that ``import ingle`` loads neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingle.checkpoint.chat_template import Conversation
    from ingle.config import EngineConfig
    from ingle.engine.async_engine import AsyncEngine
    from ingle.engine.release import release_memory
    from ingle.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineDeadError,
        IngleError,
        PluginError,
        RequestError,
    )
    from ingle.llm import LLM
    from ingle.quantize.evaluation import Evaluation, evaluate
    from ingle.request import CompletionOutput, GrammarSpec, RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "Conversation",
    "EngineConfig",
    "EngineDeadError",
    "Evaluation",
    "GrammarSpec",
    "IngleError",
    "PluginError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "evaluate",
    "release_memory",
]

_HOMES = {
    "AsyncEngine": "ingle.engine.async_engine",
    "CompletionOutput": "ingle.request",
    "Conversation": "ingle.checkpoint.chat_template",
    "EngineConfig": "ingle.config",
    "Evaluation": "ingle.quantize.evaluation",
    "GrammarSpec": "ingle.request",
    "LLM": "ingle.llm",
    "RequestOutput": "ingle.request",
    "SamplingParams": "ingle.request",
    "evaluate": "ingle.quantize.evaluation",
    "release_memory": "ingle.engine.release",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ingle' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "ingle.errors")), name)
