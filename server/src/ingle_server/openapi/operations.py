"""What the routes' handlers cannot say of themselves, because they read and write raw bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from ingle_server.routes.page import MEDIA_TYPES
from ingle_server.schemas.anthropic import MessageObject, MessagesRequest, TokenCount
from ingle_server.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from ingle_server.schemas.completion import Completion, CompletionRequest
from ingle_server.schemas.embeddings import EmbeddingList, EmbeddingRequest
from ingle_server.schemas.kobold import KoboldKey, KoboldRequest, KoboldText
from ingle_server.schemas.model_admin import ModelLoadProgress, ModelLoadRequest, ModelState
from ingle_server.schemas.models import ModelCard, ModelList
from ingle_server.schemas.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from ingle_server.schemas.responses import (
    DeletedResponse,
    ItemList,
    ResponseObject,
    ResponsesRequest,
)
from ingle_server.schemas.tabby import (
    TabbyCard,
    TabbyDecodeRequest,
    TabbyEncodeRequest,
    TabbyText,
    TabbyTokens,
)
from ingle_server.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One handler.

    Attributes:
        body: What its body decodes to, or None when it reads none.
        body_required: Whether it must come; a GET never has one.
        answer: What a 200 holds as JSON, or None when it is not JSON.
        streams: Media type of the same as a stream, when ``stream`` (or nothing) asks for one.
        frame: What each of the stream's events or lines holds, when a struct says it.
        media: Media types of a 200 that is neither of these.
        query: JSON Schemas of its query parameters.
        statuses: Refusals other than those that follow from its path and body.
        is_admin: Whether it takes an admin key.
    """

    body: type[msgspec.Struct] | None = None
    body_required: bool = True
    answer: Any = None
    streams: str | None = None
    frame: type[msgspec.Struct] | None = None
    media: tuple[str, ...] = ()
    query: Mapping[str, Json] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()
    is_admin: bool = False

    @property
    def names_model(self) -> bool:
        """Whether the body names a model, which may not exist."""
        return self.body is not None and "model" in self.body.__struct_fields__


_OBJECT = Operation(answer=Json)
_PAGE: Mapping[str, Json] = {
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string", "description": "The id of an item: the page begins behind it."},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
}

OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "cancel_response": Operation(answer=ResponseObject, statuses=(400,)),
        "count_message_tokens": Operation(body=MessagesRequest, answer=TokenCount),
        "create_chat_completion": Operation(
            body=ChatCompletionRequest,
            answer=ChatCompletion,
            streams=EVENTS,
            frame=ChatCompletionChunk,
        ),
        "create_completion": Operation(
            body=CompletionRequest, answer=Completion, streams=EVENTS, frame=Completion
        ),
        "create_embeddings": Operation(body=EmbeddingRequest, answer=EmbeddingList),
        "create_message": Operation(body=MessagesRequest, answer=MessageObject, streams=EVENTS),
        "create_response": Operation(body=ResponsesRequest, answer=ResponseObject, streams=EVENTS),
        "current_model": Operation(answer=TabbyCard),
        "decode_tokens": Operation(body=TabbyDecodeRequest, answer=TabbyText),
        "delete_response": Operation(answer=DeletedResponse),
        "detokenize": Operation(body=DetokenizeRequest, answer=DetokenizeResponse),
        "encode_tokens": Operation(body=TabbyEncodeRequest, answer=TabbyTokens),
        "health": Operation(),
        "kobold_abort": Operation(body=KoboldKey, body_required=False, answer=Json),
        "kobold_api_version": _OBJECT,
        "kobold_check": Operation(body=KoboldKey, body_required=False, answer=Json),
        "kobold_context": _OBJECT,
        "kobold_generate": Operation(body=KoboldRequest, answer=Json),
        "kobold_length": _OBJECT,
        "kobold_model": _OBJECT,
        "kobold_perf": _OBJECT,
        "kobold_soft_prompt": _OBJECT,
        "kobold_soft_prompts": _OBJECT,
        "kobold_stream": Operation(body=KoboldRequest, streams=EVENTS),
        "kobold_tokencount": Operation(body=KoboldText, answer=Json),
        "kobold_version": _OBJECT,
        "list_input_items": Operation(answer=ItemList, query=_PAGE, statuses=(400,)),
        "list_models": Operation(answer=ModelList),
        "load": Operation(answer=dict[str, int]),
        "load_model": Operation(
            body=ModelLoadRequest,
            answer=ModelLoadProgress,
            streams=EVENTS,
            frame=ModelLoadProgress,
            is_admin=True,
        ),
        "metrics": Operation(media=("text/plain",)),
        "ollama_chat": Operation(body=OllamaChatRequest, answer=Json, streams=LINES),
        "ollama_generate": Operation(body=OllamaGenerateRequest, answer=Json, streams=LINES),
        "ollama_ps": _OBJECT,
        "ollama_show": Operation(body=OllamaShowRequest, answer=Json),
        "ollama_tags": _OBJECT,
        "ollama_version": _OBJECT,
        "openapi_document": _OBJECT,
        "page": Operation(media=("text/html",)),
        "page_file": Operation(media=tuple(sorted(set(MEDIA_TYPES.values())))),
        "plugins": _OBJECT,
        "retrieve_model": Operation(answer=ModelCard),
        "retrieve_response": Operation(
            answer=ResponseObject,
            query={"stream": {"enum": ["false", "0"], "description": "Cannot be had as a stream."}},
            statuses=(400,),
        ),
        "tabby_models": Operation(answer=ModelList),
        "tokenize": Operation(body=TokenizeRequest, answer=TokenizeResponse),
        "unload_model": Operation(answer=ModelState, is_admin=True),
        "version": Operation(answer=dict[str, str]),
    }
)
"""By the name of the handler."""
