"""Conversations to token ids, by the template that came with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes

from ingle.checkpoint.control_marks import ControlMarks
from ingle.checkpoint.messages import normalize_messages
from ingle.checkpoint.template_sandbox import Budget, TemplateEnvironment, render_bounded
from ingle.checkpoint.template_source import DEFAULT_TEMPLATE, find_templates
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.errors import CheckpointError, RequestError

MAX_RENDERED_CHARS: Final = 64 * 1024 * 1024
_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What code inside a template can raise."""
_TAIL: Final = "\ufdd6 "
"""Marks the end of the message to be continued; its space shows whether the template trims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template is given.

    Attributes:
        messages: As the client sent them: ``role``, ``content``, ``tool_calls`` …
        tools: Tool descriptions in OpenAI's form.
        add_generation_prompt: Opens the assistant's turn at the end.
        continue_final_message: Leaves the last message's turn open.
        add_special_tokens: Lets the tokenizer add its own on top of the template's.
        template_kwargs: More variables for the template, such as ``enable_thinking``.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """One model's chat template, compiled.

    Args:
        tokenizer: The model's.
        templates: Template sources by name; ``default`` or the only one is used, ``tool_use`` for
            conversations with tools.

    Raises:
        CheckpointError: When a template has a syntax error.
    """

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._environment = TemplateEnvironment()
        self._source = "\n".join(templates.values())
        self._templates = {name: self._compile(name, text) for name, text in templates.items()}
        literal = "\0".join(self._literal_text(text) for text in templates.values())
        special = [t for t, i in tokenizer.added_tokens.items() if i in tokenizer.special_ids]
        written = [t for t in tokenizer.added_tokens if t.strip() and t in literal]
        self._marks = ControlMarks(
            {t: i for t, i in tokenizer.added_tokens.items() if t.strip() or t in special}
        )
        # What the assistant said may hold tokens such as <think>, which it wrote itself.
        self._in_assistant = self._marks.marking(special)
        self._in_others = self._marks.marking({*special, *written})

    @property
    def available(self) -> bool:
        """Whether the model has a template at all; without one every conversation is refused."""
        return bool(self._templates)

    @property
    def source(self) -> str:
        """The source of every template, joined."""
        return self._source

    def encode(self, conversation: Conversation) -> list[int]:
        """The conversation's token ids.

        Control tokens come from the template alone: one spelled out in a message stays text.

        Raises:
            RequestError: When the template refuses the messages, with the template's words.
        """
        rendered = self._render(conversation, mark=True)
        if not self._marks.marked(rendered):
            return self._tokenizer.encode(
                rendered, add_special_tokens=conversation.add_special_tokens
            )
        pieces = list(self._marks.pieces(rendered))
        return self._tokenizer.encode_pieces(pieces, conversation.add_special_tokens)

    def render(self, conversation: Conversation) -> str:
        """The conversation as text.

        Raises:
            RequestError: As ``encode`` does.
        """
        return self._render(conversation, mark=False)

    def _render(self, conversation: Conversation, mark: bool) -> str:
        template = self._choose(conversation.tools)
        messages = normalize_messages(conversation.messages, self._wants_parts)
        if conversation.continue_final_message:
            _append_tail(messages[-1])
        tools = None if conversation.tools is None else list(conversation.tools)
        kwargs = self._checked_kwargs(conversation.template_kwargs)
        if mark:
            messages = [self._marked(message) for message in messages]
            tools = self._marks.mark(tools, self._in_others)
            kwargs = self._marks.mark(kwargs, self._in_others)
        variables = self._variables(messages) | {
            **kwargs,
            "tools": tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        rendered = _run(template, variables)
        return _cut_at_tail(rendered) if conversation.continue_final_message else rendered

    def _variables(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """What every template sees, as transformers passes it."""
        return {
            **self._tokenizer.special_token_map(),
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }

    def _checked_kwargs(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        taken = sorted(self._variables([]).keys() & kwargs.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(taken)}: the engine does.",
                param="chat_template_kwargs",
            )
        return kwargs

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        by_assistant = message["role"] == "assistant"
        pattern = self._in_assistant if by_assistant else self._in_others
        marked: dict[str, Any] = self._marks.mark(message, pattern)
        return marked

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise RequestError(
            "This model has no chat template, so it cannot chat; use /v1/completions.",
            param="messages",
        )

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows text only when content is a list of parts."""
        probe = "ingle-probe"
        template = self._choose(None)
        shown = {}
        for parts in (False, True):
            messages = normalize_messages([{"role": "user", "content": probe}], parts)
            try:
                shown[parts] = probe in _run(template, self._variables(messages))
            except RequestError:
                shown[parts] = False
        return shown[True] and not shown[False]

    def _compile(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._environment.compile_bounded(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise CheckpointError(
                f"{self._tokenizer.path}: chat template {name!r} has a fault: {error}."
            ) from error

    def _literal_text(self, source: str) -> str:
        """Every text the template itself can write."""
        tree = self._environment.parse(source)
        written = [node.data for node in tree.find_all(nodes.TemplateData)]
        constants = [node.value for node in tree.find_all(nodes.Const)]
        return "\0".join([*written, *(text for text in constants if isinstance(text, str))])


def load_chat_template(path: Path | str, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a model folder, unless the tokenizer was given another; a folder that
    has none refuses every conversation.

    Raises:
        CheckpointError: When a template's file or syntax is at fault.
    """
    if tokenizer.chat_template is not None:
        return ChatTemplate(tokenizer, {DEFAULT_TEMPLATE: tokenizer.chat_template})
    return ChatTemplate(tokenizer, find_templates(Path(path), tokenizer.config))


def _run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return render_bounded(template, variables, Budget(MAX_RENDERED_CHARS))
    except _TEMPLATE_FAULTS as error:
        raise RequestError(
            f"The model's chat template refuses these messages: {str(error)[:500]}",
            param="messages",
        ) from error


def _append_tail(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _TAIL
    else:
        content[-1]["text"] += _TAIL


def _cut_at_tail(rendered: str) -> str:
    """The text up to the end of the last message."""
    mark = _TAIL.strip()
    before, found, after = rendered.rpartition(mark)
    if not found:
        raise RequestError(
            "The model's chat template does not show the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return before if (mark + after).startswith(_TAIL) else before.rstrip()
