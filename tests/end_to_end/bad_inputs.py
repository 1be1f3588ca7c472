"""The bad inputs of specs/robustness.md §3 as data: one entry a row, by its number there.

Rows 30, 34 and 35 need a server in another state and are tests of their own; so are rows 29 and 32,
which are no bodies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

P, C = "/v1/completions", "/v1/chat/completions"
VOCAB_SIZE = 49152
CONTEXT = 8192
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Bad:
    """One request that must be refused.

    Attributes:
        path: Where it is sent.
        body: The whole body, or the fields that a good one is changed by.
        param: Field that the error names.
        says: What its message must hold: what was wrong, and the value seen.
        code: The error's code.
        status: The answer's status.
        headers: Sent along.
        may_pass: Whether the specification allows an answer, too.
    """

    path: str
    body: bytes | dict[str, Any]
    param: str | None
    says: tuple[str, ...]
    code: str | None = None
    status: int = 400
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    may_pass: bool = False

    @property
    def content(self) -> bytes:
        """The body's bytes; None as a field's value leaves the field out."""
        if isinstance(self.body, bytes):
            return self.body
        good: dict[str, Any] = {"model": "demo", "max_tokens": 4}
        good |= (
            {"prompt": "hi"} if self.path == P else {"messages": [{"role": "user", "content": "a"}]}
        )
        changed = {**good, **self.body}
        return json.dumps({k: v for k, v in changed.items() if v is not ABSENT}).encode()


ABSENT = object()
"""The value of a field that is left out."""


def each(path: str, field: str, *values: tuple[Any, str], code: str | None = None) -> list[Bad]:
    """Bad values of one field, each with what the message must show of it."""
    return [Bad(path, {field: value}, field, (field, shows), code) for value, shows in values]


def number(field: str, *literals: str) -> list[Bad]:
    """Numbers that JSON or a float cannot hold."""
    return [
        Bad(
            P,
            b'{"model":"demo","prompt":"hi","%b":%b}' % (field.encode(), literal.encode()),
            field,
            (field, literal.strip('{}"1:') if field == "logit_bias" else literal),
        )
        for literal in literals
    ]


def message(value: Any, at: str, shows: str) -> Bad:
    """A chat with one message that is wrong at ``at``."""
    return Bad(C, {"messages": [value]}, f"messages[0].{at}", (f"messages[0].{at}", shows))


def part(kind: str) -> Bad:
    """A chat whose second part is of a kind that is not served."""
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "http://192.0.2.1/"}}]
    return message({"role": "user", "content": parts}, "content[1].type", kind)


def schema(value: Any) -> dict[str, Any]:
    """``response_format`` of a JSON Schema."""
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


def nested(depth: int) -> dict[str, Any]:
    """An object in an object ``depth`` times."""
    value: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NO_TOOL = {"type": "function", "function": {"name": "see"}}
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
REPEATS = {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}

ROWS: dict[int, tuple[str, list[Bad]]] = {
    1: ("cut JSON", [Bad(P, b'{"model": "x", "prompt": "a', None, ("JSON", "truncated"))]),
    2: (
        "a body that is no object",
        [
            Bad(C, b"", None, ("JSON", "empty")),
            Bad(C, b"[]", None, ("JSON object", "array")),
            Bad(C, b"5", None, ("JSON object", "int")),
            Bad(C, b"null", None, ("JSON object", "null")),
        ],
    ),
    3: ("invalid UTF-8", [Bad(P, b'{"model":"demo","prompt":"\xff\xfe"}', None, ("UTF-8",))]),
    4: (
        "half a surrogate pair",
        [Bad(P, b'{"model":"demo","prompt":"emoji \\ud83d"}', None, ("surrogate",))],
    ),
    5: ("deep JSON", [Bad(P, b"[" * 200_000, None, ("JSON",))]),
    6: (
        "64 MiB of prompt",
        [
            Bad(
                P, b'{"model":"demo","prompt":"%b"}' % (b"a" * 2**26), None, ("limit",), status=413
            ),
        ],
    ),
    7: (
        "no messages",
        [
            Bad(C, {"messages": ABSENT}, "messages", ("messages is required",)),
            *each(C, "messages", ([], "at least one"), ("hi", '"hi"'), (None, "null")),
        ],
    ),
    8: (
        "wrong messages",
        [
            message({"content": "a"}, "role", "required"),
            message({"role": 5, "content": "a"}, "role", "5"),
            message({"role": "king", "content": "a"}, "role", '"king"'),
            message({"role": "user", "content": 5}, "content", "5"),
            message({"role": "user"}, "content", "required"),
        ],
    ),
    9: (
        "parts that are no text",
        [part(kind) for kind in ("image_url", "file", "input_audio", "dream")],
    ),
    10: (
        "a prompt that is none",
        each(P, "prompt", ([], "empty"), ([[]], "empty"), ([None], "null"), (5, "5")),
    ),
    11: (
        "ids out of the vocabulary",
        each(
            P,
            "prompt",
            ([10**9], "1000000000"),
            ([-1], "-1"),
            ([VOCAB_SIZE], str(VOCAB_SIZE)),
            ([[5], [VOCAB_SIZE]], str(VOCAB_SIZE)),
        ),
    ),
    12: (
        "a prompt longer than the context",
        each(
            P, "prompt", ([5] * CONTEXT, str(CONTEXT)), ("a " * 9000, str(CONTEXT)), code=TOO_LONG
        ),
    ),
    13: (
        "more tokens than the context has",
        each(P, "max_tokens", (CONTEXT, str(CONTEXT)), (10**12, str(10**12)), code=TOO_LONG),
    ),
    14: (
        "temperature",
        [
            *each(P, "temperature", (-1, "-1"), (3, "3"), ("hot", '"hot"')),
            *number("temperature", "NaN", "1e999", "-Infinity"),
        ],
    ),
    15: ("top_p", each(P, "top_p", (-0.1, "-0.1"), (1.5, "1.5"))),
    16: (
        "n",
        each(P, "n", (0, "0"), (-1, "-1"), (1.5, "1.5"), (10**6, str(10**6)), (2**63, str(2**63))),
    ),
    17: (
        "max_tokens",
        [
            *each(P, "max_tokens", (-1, "-1"), (1.5, "1.5"), ("ten", '"ten"')),
            *each(C, "max_tokens", (-1, "-1"), (0, "0")),
            *each(C, "max_completion_tokens", (0, "0"), (1.5, "1.5")),
        ],
    ),
    18: (
        "stop",
        each(P, "stop", (5, "5"), ([5], "5"), (list("abcdef"), "6"), ([""], "empty")),
    ),
    19: (
        "logprobs",
        [
            *each(P, "logprobs", (-1, "-1"), (10**6, str(10**6))),
            Bad(C, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ("top_logprobs", "21")),
            *each(C, "top_logprobs", (3, "logprobs to be true")),
        ],
    ),
    20: (
        "logit_bias",
        [
            *each(
                P,
                "logit_bias",
                ("x", '"x"'),
                ({"abc": 1}, '"abc"'),
                ({"999999999": 1}, "999999999"),
                ({"1": "x"}, "str"),
                ({"1": 101}, "101"),
            ),
            *number("logit_bias", '{"1":1e400}'),
        ],
    ),
    21: ("seed", each(P, "seed", ("s", '"s"'), (2**64, str(2**64)))),
    22: (
        "stream",
        [
            *each(P, "stream", ("yes", '"yes"')),
            *each(C, "stream", ("yes", '"yes"')),
            *each(P, "stream_options", ({"include_usage": True}, "stream to be true")),
            *each(C, "stream_options", ({"include_usage": True}, "stream to be true")),
        ],
    ),
    23: (
        "response_format",
        each(
            C,
            "response_format",
            ("json", '"json"'),
            ({"type": "sound"}, '"sound"'),
            ({"type": "json_schema"}, "json_schema"),
            ({"type": "json_schema", "json_schema": {"name": "s"}}, "schema"),
            (schema({"type": "hiccup"}), "hiccup"),
            (schema({"$ref": "#/nowhere"}), "/nowhere"),
        ),
    ),
    24: (
        "costly grammars",
        [
            *each(C, "response_format", (schema(nested(400)), "nested"), (schema(MANY), "5000")),
            Bad(C, {"response_format": schema(REPEATS)}, "response_format", (), may_pass=True),
        ],
    ),
    25: (
        "tools",
        [
            *each(
                C,
                "tools",
                ("x", '"x"'),
                ([{}], "required"),
                ([{"type": "function", "function": {"name": 5}}], "5"),
                ([{"type": "function", "function": {"name": "f", "parameters": "no"}}], '"no"'),
            ),
            Bad(
                C, {"tools": [TOOL], "tool_choice": NO_TOOL}, "tool_choice", ("tool_choice", "see")
            ),
            *each(C, "tool_choice", ("required", "tools"), (NO_TOOL, "tools")),
        ],
    ),
    26: (
        "sampling out of range",
        [
            *each(P, "presence_penalty", (3, "3")),
            *each(P, "repetition_penalty", (0, "0")),
            *each(P, "min_p", (2, "2")),
            *each(P, "top_k", (-7, "-7")),
            *each(P, "min_tokens", (5, "5")),
        ],
    ),
    27: (
        "lists of ids",
        [
            *each(P, "stop_token_ids", ([VOCAB_SIZE], str(VOCAB_SIZE)), ([-1], "-1")),
            *each(P, "allowed_token_ids", ([VOCAB_SIZE], str(VOCAB_SIZE)), ([], "at least one")),
        ],
    ),
    28: (
        "unknown models",
        [
            Bad(path, {"model": name}, "model", (name, "demo"), "model_not_found", 404)
            for path in (P, C)
            for name in ("no/such", "../../etc/passwd")
        ],
    ),
    31: (
        "templates of the client's",
        [
            *each(C, "chat_template", ("{% for i in range(10**9) %}{% endfor %}", "model's own")),
            *each(C, "chat_template_kwargs", ({"tokenize": True}, "tokenize")),
        ],
    ),
    33: (
        "JSON under another content type",
        [
            Bad(
                P,
                b'{"model":"demo","prompt":"hi","max_tokens":1}',
                None,
                ("application/json", "text/plain"),
                status=415,
                headers=(("content-type", "text/plain"),),
            )
        ],
    ),
}
