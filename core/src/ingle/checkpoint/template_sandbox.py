"""Jinja for templates that came with a model: sandboxed, and bounded in time and size."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS: Final = 10.0
MAX_PRODUCT: Final = 1_000_000
_MAX_EXPONENT: Final = 1_000
_BUDGET: Final = "ingle budget"  # no template can name a variable with a space


class TemplateLimitError(jinja2.TemplateError):
    """A template takes too long or makes too much."""


class Budget:
    """What one rendering may still use."""

    def __init__(self, max_chars: int, max_seconds: float = MAX_SECONDS) -> None:
        self._chars = max_chars
        self._deadline = time.monotonic() + max_seconds
        self._max_seconds = max_seconds

    def check_time(self) -> None:
        """Raises ``TemplateLimitError`` when the time is up."""
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"rendering took over {self._max_seconds:g} seconds")

    def spend(self, text: str) -> str:
        """``text``, counted. Raises ``TemplateLimitError`` when it is too much."""
        self._chars -= len(text)
        if self._chars < 0:
            raise TemplateLimitError("the rendered conversation is too long")
        self.check_time()
        return text


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment transformers renders chat templates in, with limits.

    Every loop and macro body first checks the time; products and powers are bounded, since one of
    them could fill the memory in a single step.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compile_bounded(self, source: str) -> jinja2.Template:
        """The compiled template. Raises ``jinja2.TemplateSyntaxError``."""
        tree = self.parse(source)
        blocks: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For)]
        blocks.extend(tree.find_all(nodes.Macro))
        for block in blocks:
            check = nodes.Call(
                nodes.EnvironmentAttribute("check_budget"),
                [nodes.ContextReference()],
                [],
                None,
                None,
                lineno=block.lineno,
            )
            block.body.insert(0, nodes.ExprStmt(check, lineno=block.lineno))
        for node in tree.find_all(nodes.Node):
            node.set_environment(self)
        return self.from_string(tree)

    def check_budget(self, context: jinja2.runtime.Context) -> None:
        """Called at the head of every loop and macro body."""
        context.parent[_BUDGET].check_time()

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """``*`` and ``**`` within bounds."""
        if operator == "**":
            fine = _magnitude(left) <= MAX_PRODUCT and _magnitude(right) <= _MAX_EXPONENT
        else:
            both_numbers = _is_number(left) and _is_number(right)
            fine = both_numbers or _magnitude(left) * _magnitude(right) <= MAX_PRODUCT
        if not fine:
            raise SecurityError(f"the template's {operator} gives too large a result")
        return super().call_binop(context, operator, left, right)


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The tag's body, whose variables stay inside it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any], budget: Budget) -> str:
    """The rendered text. Raises ``jinja2.TemplateError`` and whatever the template's code does."""
    pieces = template.generate({**variables, _BUDGET: budget})
    return "".join(budget.spend(piece) for piece in pieces)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' ``tojson`` filter writes it: no HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _magnitude(value: Any) -> float:
    """A number's size, or how many items something has."""
    if _is_number(value):
        return float(abs(value))
    return len(value) if isinstance(value, str | list | tuple | dict) else 1
