"""Calls in a model's text, whole and in any pieces; what is none stays text."""

from __future__ import annotations

import json
import time

import pytest

from ingle_server.tools.answer import AnswerReader
from ingle_server.tools.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, format_of
from ingle_server.tools.parser import NamedCall, ToolCallParser
from ingle_server.tools.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from ingle_server.tools.reasoning import REASONING_FORMATS, ReasoningSplitter

CALL = '{"name": "look", "arguments": {"at": "a \\"{\\" b"}}'
LOOK = ("look", {"at": 'a "{" b'})
NAMES = {"look", "go"}

CASES = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [LOOK]),
    ("hermes", f"Well.\n<tool_call>{CALL}</tool_call>", "Well.\n", [LOOK]),
    (
        "hermes",
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>",
        "",
        [LOOK, LOOK],
    ),
    ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call> done", "done", [LOOK, LOOK]),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", "<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
    ("hermes", '<tool_call>{"name": "look", ', '<tool_call>{"name": "look", ', []),
    ("hermes", "<tool_call>text", "<tool_call>text", []),
    ("llama3_json", '{"name": "go", "parameters": {}}', "", [("go", {})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "go", "parameters": {}}; {"name": "go", "parameters": {"n": 1}}',
        "",
        [("go", {}), ("go", {"n": 1})],
    ),
    ("llama3_json", '{"name": "fly", "parameters": {}}', '{"name": "fly", "parameters": {}}', []),
    ("llama3_json", "Hello {name}", "Hello {name}", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}]", "", [LOOK]),
    ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", "", [LOOK, LOOK]),
    ("mistral", '[TOOL_CALLS]go{"n": 1}', "", [("go", {"n": 1})]),
    ("mistral", '[TOOL_CALLS]go[ARGS]{"n": 1}', "", [("go", {"n": 1})]),
    ("mistral", '[TOOL_CALLS]go{"n": 1}[TOOL_CALLS]look{}', "", [("go", {"n": 1}), ("look", {})]),
    ("json", f"[{CALL},{CALL}]", "", [LOOK, LOOK]),
    ("json", CALL, "", [LOOK]),
    ("json", "[1] is a list", "[1] is a list", []),
    ("json", '{"a": 1}', '{"a": 1}', []),
    ("json", "", "", []),
    ("json", "  ", "  ", []),
]


def read(reader: AnswerReader | ToolCallParser, parts: list[str]) -> list[Piece]:
    return [piece for part in parts for piece in reader.push(part)] + reader.finish()


def content(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def calls(pieces: list[Piece]) -> list[tuple[str, object]]:
    found = []
    for start in pieces:
        if isinstance(start, CallStart):
            parts = [p for p in pieces if isinstance(p, CallArguments) and p.index == start.index]
            found.append((start.name, json.loads("".join(p.text for p in parts))))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("name", "text", "said", "called"), CASES)
def test_calls_are_found_whatever_the_pieces(
    name: str, text: str, said: str, called: list[tuple[str, object]], size: int
) -> None:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    pieces = read(ToolCallParser(FORMATS[name], NAMES, 99), parts)
    assert content(pieces) == said
    assert calls(pieces) == called
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert [start.index for start in starts] == list(range(len(called)))
    assert len({start.id for start in starts}) == len(called)


def test_calls_after_the_last_wanted_one_are_dropped() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    assert calls(read(ToolCallParser(HERMES, NAMES, 1), [text])) == [LOOK]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        "<tool_call>" + "{" * 200_000,
        "<tool_call>" + '{"' + "\\" * 200_000,
        "<" * 200_000,
        "[" * 200_000,
        "<tool_call>" + '{"name":"a","arguments":{"a":' + "[" * 100_000,
    ],
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    started = time.perf_counter()
    for form in (HERMES, MISTRAL, LLAMA3, JSON):
        parts = [text[i : i + 5] for i in range(0, len(text), 5)]
        read(ToolCallParser(form, NAMES, 99), parts)
    assert time.perf_counter() - started < 20


def test_a_named_call_is_all_arguments() -> None:
    pieces = NamedCall("go").push('{"a"') + NamedCall("go").push("")
    assert [type(piece) for piece in pieces] == [CallStart, CallArguments, CallStart]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("<tool_call>", HERMES),
        ("<|start_header_id|>{{ tools }}", LLAMA3),
        ("plain", JSON),
        ("", JSON),
    ],
)
def test_the_template_shows_the_format(template: str, form: object) -> None:
    assert format_of(template) is form


def thoughts(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "inside", "text", "thought", "said"),
    [
        ("think", False, "<think>\nhm</think>\n\nYes <b>", "hm", "Yes <b>"),
        ("think", True, "hm < 3</think>Yes", "hm < 3", "Yes"),
        ("think", True, "<think>hm</think>Yes", "hm", "Yes"),
        ("think", False, "Yes", "", "Yes"),
        ("think", False, "<thin ice", "", "<thin ice"),
        ("qwen3", False, "<think>\n\n</think>\n\nYes", "", "Yes"),
        ("deepseek_r1", False, "cut sho", "cut sho", ""),
    ],
)
def test_thoughts_are_split_off(
    name: str, inside: bool, text: str, thought: str, said: str, size: int
) -> None:
    reader = AnswerReader(ReasoningSplitter(REASONING_FORMATS[name], inside), None)
    pieces = read(reader, [text[i : i + size] for i in range(0, len(text), size)])
    assert thoughts(pieces).strip() == thought
    assert content(pieces) == said


def test_calls_are_found_after_the_thoughts() -> None:
    splitter = ReasoningSplitter(REASONING_FORMATS["think"], False)
    reader = AnswerReader(splitter, ToolCallParser(HERMES, NAMES, 99))
    pieces = read(reader, [f"<think>a <tool_call></think><tool_call>{CALL}</tool_call>"])
    assert thoughts(pieces) == "a <tool_call>"
    assert calls(pieces) == [LOOK]
    assert reader.ends_with_calls
