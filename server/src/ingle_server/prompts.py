"""From ``prompt`` or ``messages`` to token ids, with every limit checked on the way."""

from __future__ import annotations

from typing import cast

import msgspec

from ingle_server.engine_client import ChatPrompt, ModelInfo
from ingle_server.errors import bad_request, shown
from ingle_server.flight import Prompt
from ingle_server.schemas.completion import CompletionRequest
from ingle_server.schemas.sampling import SamplingFields
from ingle_server.service import Service
from ingle_server.translate import too_long

RawPrompt = str | list[int] | None
"""Text, ids, or null: the start of a document."""


def split_prompts(prompt: str | list[str | int | list[int]] | None) -> list[RawPrompt]:
    """The four forms of ``prompt`` as a list of texts or token lists.

    Raises:
        ApiError: 400 for empty and mixed lists.
    """
    if prompt is None or isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt must not be an empty list.", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [cast("list[int]", prompt)]
    if not all(isinstance(item, str) for item in prompt) and not all(
        isinstance(item, list) for item in prompt
    ):
        raise bad_request("prompt must hold only texts, only ids or only lists of ids.", "prompt")
    return cast("list[RawPrompt]", prompt)


async def encode_prompts(
    service: Service, fields: CompletionRequest, raw: list[RawPrompt]
) -> list[Prompt]:
    """Tokenises the texts among ``raw``, and checks all of them.

    Raises:
        ApiError: 400.
    """
    info = service.engine.info
    for item in raw:
        if isinstance(item, str):
            check_text_length(len(item), info, "prompt")
        elif item is not None:
            check_ids(item, info, "prompt")
    num_chars = sum(len(item) for item in raw if isinstance(item, str))
    wanted = (fields.add_special_tokens, fields.add_bos_token, True)
    add_special = next(value for value in wanted if value is not None)

    def encode() -> list[Prompt]:
        return [_encode(service, item, add_special) for item in raw]

    prompts = await service.off_loop(num_chars, encode)
    return [fit(prompt, fields, fields.max_tokens, info, "prompt") for prompt in prompts]


def _encode(service: Service, item: RawPrompt, add_special_tokens: bool) -> Prompt:
    if item is None:
        return Prompt(token_ids=_document_start(service), text="")
    if isinstance(item, list):
        return Prompt(token_ids=item)
    token_ids = service.engine.encode(item, add_special_tokens=add_special_tokens)
    return Prompt(token_ids=token_ids, text=item)


def _document_start(service: Service) -> list[int]:
    """What the tokenizer puts before a text of its own accord, else the model's start token."""
    start = service.engine.info.start_token_id
    known = [] if start is None else [start]
    return service.engine.encode("", add_special_tokens=True) or known


async def render_chat(
    service: Service, chat: ChatPrompt, fields: SamplingFields, asked: int | None
) -> Prompt:
    """Renders and tokenises a conversation.

    Raises:
        ApiError: 400.
        RequestError: 400, when the template refuses the messages.
    """
    info = service.engine.info
    token_ids = await encode_chat(service, chat)
    return fit(Prompt(token_ids=token_ids), fields, asked, info, "messages")


async def encode_chat(service: Service, chat: ChatPrompt) -> list[int]:
    """The conversation's token ids, however many.

    Raises:
        ApiError: 400, when it has more text than can fit.
        RequestError: 400, when the template refuses the messages.
    """
    num_chars = sum(len(message["content"]) for message in chat.messages)
    check_text_length(num_chars, service.engine.info, "messages")
    # Tools and earlier calls are rendered too, and may be longer than what is said.
    size = len(msgspec.json.encode((chat.messages, chat.tools, chat.template_kwargs)))
    return await service.off_loop(size, lambda: service.engine.render_chat(chat))


def check_text_length(num_chars: int, info: ModelInfo, param: str) -> None:
    """Refuses text that cannot fit, before time is spent on tokenising it."""
    if num_chars > info.max_token_chars * info.max_model_len:
        raise too_long(param, f"{num_chars} characters", info)


def check_ids(token_ids: list[int], info: ModelInfo, param: str) -> None:
    """Refuses ids that are no rows of the model's vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise bad_request(
                f"{param} must hold ids from 0 to {info.vocab_size - 1}, got {shown(token_id)}.",
                param,
            )


def fit(
    prompt: Prompt, fields: SamplingFields, asked: int | None, info: ModelInfo, param: str
) -> Prompt:
    """``prompt``, truncated if the client wants it, with room for at least one more token unless
    none is ``asked`` for.

    Raises:
        ApiError: 400 when it is empty or too long.
    """
    token_ids = prompt.token_ids
    keep = fields.truncate_prompt_tokens
    if keep is not None:
        keep = info.max_model_len - (1 if asked is None else asked) if keep == -1 else keep
        token_ids = token_ids[-keep:] if keep > 0 else token_ids
    if not token_ids:
        raise bad_request("The prompt is empty; the model needs at least one token.", param)
    if len(token_ids) + (asked != 0) > info.max_model_len:
        raise too_long(param, f"{len(token_ids)} tokens", info)
    whole = len(token_ids) == len(prompt.token_ids)
    return Prompt(token_ids=token_ids, text=prompt.text if whole else None)
