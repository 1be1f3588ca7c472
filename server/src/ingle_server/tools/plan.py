"""What one chat does with its tools: what the model is shown, held to, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ingle_server.schemas.chat import ChatCompletionRequest, FunctionDefinition, Tool
from ingle_server.structured import Wanted
from ingle_server.tools.forced import calls_grammar, named_call_grammar
from ingle_server.tools.formats import JSON, ToolFormat
from ingle_server.tools.parser import NamedCall, ToolCallParser

ANY_NUMBER = 128

_EXPLAINED = (
    "You can call these functions:\n{tools}\nTo call one, answer with nothing but a JSON object: "
    '{{"name": "the function", "arguments": {{"argument": "value"}}}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """The tools of one request and how freely the model may use them.

    Attributes:
        mode: ``none`` leaves text as it is, ``named`` makes it one call of ``functions[0]``.
        functions: What may be called.
        parallel: Whether several calls may be made.
    """

    mode: Literal["none", "auto", "required", "named"] = "none"
    functions: tuple[FunctionDefinition, ...] = ()
    parallel: bool = True

    @property
    def wanted(self) -> Wanted | None:
        """The grammar that forces calls, when they are forced."""
        if self.mode == "named":
            return Wanted(grammar=named_call_grammar(self.functions[0]), param="tools")
        if self.mode == "required":
            return Wanted(grammar=calls_grammar(self.functions, self.parallel), param="tools")
        return None

    def parser(self, form: ToolFormat) -> ToolCallParser | NamedCall | None:
        """A reader for one answer; None leaves text as it is."""
        if self.mode == "none":
            return None
        if self.mode == "named":
            return NamedCall(self.functions[0].name)
        names = {function.name for function in self.functions}
        form = JSON if self.mode == "required" else form
        return ToolCallParser(form, names, ANY_NUMBER if self.parallel else 1)


def tool_plan(request: ChatCompletionRequest) -> ToolPlan:
    """The plan of a request whose tools and ``tool_choice`` have been checked."""
    choice: Any = request.tool_choice
    functions = _functions(request.tools)
    parallel = request.parallel_tool_calls is not False
    if not functions or choice == "none":
        return ToolPlan()
    if isinstance(choice, dict) and choice["type"] == "function":
        name = choice["function"]["name"]
        named = tuple(function for function in functions if function.name == name)
        return ToolPlan(mode="named", functions=named[:1], parallel=False)
    if isinstance(choice, dict):
        allowed = choice["allowed_tools"]
        names = {tool["function"]["name"] for tool in allowed["tools"]}
        functions = tuple(function for function in functions if function.name in names)
        choice = allowed.get("mode") or "auto"
    mode: Literal["auto", "required"] = "required" if choice == "required" else "auto"
    return ToolPlan(mode=mode, functions=functions, parallel=parallel)


def _functions(tools: Sequence[Tool] | None) -> tuple[FunctionDefinition, ...]:
    return tuple(tool.function for tool in tools or () if tool.function is not None)


def explain_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """``messages`` with the tools described in the system message, for templates that do not."""
    text = _EXPLAINED.format(tools="\n".join(json.dumps(tool) for tool in tools))
    first, rest = messages[0], list(messages[1:])
    if first["role"] != "system":
        return [{"role": "system", "content": text}, first, *rest]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
