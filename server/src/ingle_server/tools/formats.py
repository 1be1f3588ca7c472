"""How models write calls, as data, and which of the ways a chat template speaks of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls: objects with ``name`` and ``arguments`` (or ``parameters``).

    Attributes:
        name: As ``--tool-call-parser`` takes it.
        starts: Marks before a call; without any, the answer itself begins with the object.
        ends: Marks after a call.
        name_first: Whether ``name{...}`` or ``name[ARGS]{...}`` may stand for an object.
        special: Whether the marks are control tokens, which text must then show.
    """

    name: str
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    name_first: bool = False
    special: bool = False


HERMES: Final = ToolFormat(name="hermes", starts=("<tool_call>",), ends=("</tool_call>",))
"""Hermes 2 Pro, Qwen 2.5, Qwen 3."""
MISTRAL: Final = ToolFormat(name="mistral", starts=("[TOOL_CALLS]",), name_first=True, special=True)
"""Mistral: a list of objects, or from tokenizer v11 on a name and its arguments."""
LLAMA3: Final = ToolFormat(name="llama3_json", ends=("<|python_tag|>", "<|eom_id|>"), special=True)
"""Llama 3.1 and later: the answer is the object; several are parted by semicolons."""
JSON: Final = ToolFormat(name="json")
"""An object, or a list of them, as the whole answer."""

FORMATS: Final[Mapping[str, ToolFormat]] = MappingProxyType(
    {
        "hermes": HERMES,
        "qwen": HERMES,
        "mistral": MISTRAL,
        "llama3_json": LLAMA3,
        "llama4_json": LLAMA3,
        "json": JSON,
    }
)


def format_of(template: str) -> ToolFormat:
    """The format that a chat template shows the model."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return LLAMA3
    return JSON
