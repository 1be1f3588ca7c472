"""How this model's answers are read: which marks it puts around calls and thoughts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingle_server.config import ServerConfig
from ingle_server.engine_client import EngineClient
from ingle_server.tools.answer import AnswerReader
from ingle_server.tools.formats import FORMATS, format_of
from ingle_server.tools.plan import ToolPlan, explain_tools
from ingle_server.tools.reasoning import REASONING_FORMATS, ReasoningSplitter

TAIL_TOKENS = 16
"""Of the prompt, enough to hold a thought's opening mark."""


class Reading:
    """Makes the readers of answers.

    Args:
        engine: Its chat template says how the model writes calls, unless the options do.
        config: ``tool_call_parser`` and ``reasoning_parser``.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self._engine = engine
        template = engine.info.chat_template
        name = config.tool_call_parser
        self.tool_format = format_of(template) if name is None else FORMATS[name]
        parser = config.reasoning_parser
        self._reasoning = None if parser is None else REASONING_FORMATS[parser]
        self._template_shows_tools = not template or "tools" in template

    def reader_factory(self, plan: ToolPlan, prompt: Sequence[int]) -> Callable[[], AnswerReader]:
        """Makes readers for the choices of one request, whose prompt's tokens are ``prompt``."""
        form = self._reasoning
        # A grammar leaves no room for thoughts.
        thinks = form is not None and plan.mode in ("none", "auto")
        inside = thinks and form is not None and self._tail(prompt).endswith(form.start)

        def make() -> AnswerReader:
            splitter = ReasoningSplitter(form, inside) if thinks and form is not None else None
            return AnswerReader(splitter, plan.parser(self.tool_format), plan.mode != "named")

        return make

    def with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]:
        """``messages``, with the tools explained when the template would not show them."""
        return messages if self._template_shows_tools else explain_tools(messages, tools)

    def needs_special_tokens(self, plan: ToolPlan) -> bool:
        """Whether the text must show control tokens, because calls are marked by them."""
        return plan.mode == "auto" and self.tool_format.special

    def _tail(self, prompt: Sequence[int]) -> str:
        return self._engine.decode(prompt[-TAIL_TOKENS:]).rstrip()
