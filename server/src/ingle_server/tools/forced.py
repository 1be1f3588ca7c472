"""Grammars under which an answer is nothing but calls, arguments by their schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ingle import GrammarSpec
from ingle_server.schemas.chat import FunctionDefinition

MAX_CALLS = 8
"""Calls of one forced answer: small models never end a list that may go on."""

_OF_ANY_TYPE = ("$ref", "allOf", "anyOf", "oneOf", "type", "enum", "const")


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object."""
    parameters = function.parameters
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if any(key in parameters for key in _OF_ANY_TYPE):
        return parameters
    return {"type": "object", **parameters}


def named_call_grammar(function: FunctionDefinition) -> GrammarSpec:
    """The arguments of one call."""
    return GrammarSpec("json", json.dumps(arguments_schema(function)))


def calls_grammar(functions: Sequence[FunctionDefinition], parallel: bool) -> GrammarSpec:
    """A list of one or more calls, as objects with ``name`` and ``arguments``."""
    rules = []
    for i, function in enumerate(functions):
        opening = json.dumps(f'{{"name":"{function.name}","arguments":')
        # Each schema is a document of its own, so that its references lead where they should.
        schema = {**arguments_schema(function), "x-guidance": {"whitespace_flexible": False}}
        rules += [f'call{i}: {opening} args{i} "}}"', f"args{i}: %json {json.dumps(schema)}"]
    more = f' ("," call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    choice = " | ".join(f"call{i}" for i in range(len(functions)))
    return GrammarSpec("lark", "\n".join([f'start: "[" call{more} "]"', f"call: {choice}", *rules]))
