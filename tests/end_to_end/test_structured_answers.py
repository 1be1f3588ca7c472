"""The demo model under grammars: every answer validates, alone, in batches and when preempted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ingle import LLM, GrammarSpec, RequestError, SamplingParams
from ingle_server.schemas.chat import FunctionDefinition
from ingle_server.tools.forced import calls_grammar
from ingle_server.tools.formats import JSON
from ingle_server.tools.parser import ToolCallParser
from ingle_server.tools.pieces import CallArguments, CallStart

PROMPT = "<|im_start|>user\nDescribe a person as JSON.<|im_end|>\n<|im_start|>assistant\n"
NAME = {"type": "string", "minLength": 2, "maxLength": 12}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blué"]}, "minItems": 2, "maxItems": 3},
    {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}, "ok": {"type": "boolean"}},
        "required": ["at", "ok"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"}},
    },
    {"anyOf": [{"type": "null"}, {"const": 5}]},
    {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}},
        "required": ["day"],
        "additionalProperties": False,
    },
]


def is_valid(value: Any, which: int) -> bool:
    """Each schema again, in Python."""
    if which == 0:
        named = isinstance(value["name"], str) and 2 <= len(value["name"]) <= 12
        return named and type(value["age"]) is int and 0 <= value["age"] <= 120 and len(value) == 2
    if which == 1:
        return 2 <= len(value) <= 3 and set(value) <= {"red", "green", "blué"}
    if which == 2:
        return bool(re.fullmatch("[A-Z][a-z]{2,6}", value["at"])) and type(value["ok"]) is bool
    if which == 3:
        return value is None or value == 5
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", value["day"])) and len(value) == 1


def structured(schema: dict[str, Any], **options: Any) -> SamplingParams:
    spec = GrammarSpec("json", json.dumps(schema))
    return SamplingParams(structured=spec, max_tokens=options.pop("max_tokens", 64), **options)


@pytest.fixture(scope="module")
def llm(demo_model_dir: Path) -> LLM:
    # So small a cache that a batch of ten preempts.
    return LLM(
        str(demo_model_dir),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        block_size=16,
        kv_cache_memory_bytes="10MiB",
    )


def texts(llm: LLM, params: list[SamplingParams]) -> list[list[str]]:
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    assert all(o.finish_reason == "stop" for output in outputs for o in output.outputs)
    return [[o.text for o in output.outputs] for output in outputs]


def test_answers_validate_alone_and_in_a_batch(llm: LLM) -> None:
    params = [structured(schema, temperature=1.0, seed=3, n=2) for schema in SCHEMAS]
    batch = texts(llm, params)
    for which, answers in enumerate(batch):
        assert all(is_valid(json.loads(text), which) for text in answers), answers
    assert llm._core.scheduler.num_preemptions > 0
    assert texts(llm, params[:1]) == batch[:1]


def test_an_answer_that_is_cut_is_reported_as_length(llm: LLM) -> None:
    params = structured(SCHEMAS[0], max_tokens=3, temperature=0)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text.startswith("{")


def test_a_schema_that_cannot_be_followed_is_refused_before_it_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="hiccup"):
        llm.generate([PROMPT], structured({"type": "hiccup"}), use_tqdm=False)
    assert texts(llm, [structured(SCHEMAS[3], temperature=0)])


def test_forced_calls_hold_to_their_schemas(llm: LLM) -> None:
    move = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/side"}, "steps": {"type": "integer", "maximum": 9}},
        "required": ["to", "steps"],
        "additionalProperties": False,
        "$defs": {"side": {"enum": ["left", "right"]}},
    }
    functions = [FunctionDefinition(name="move", parameters=move), FunctionDefinition(name="stop")]
    spec = calls_grammar(functions, parallel=False)
    params = SamplingParams(structured=spec, max_tokens=64, temperature=1.0, seed=5, n=3)
    for text in texts(llm, [params])[0]:
        parser = ToolCallParser(JSON, {"move", "stop"}, 1)
        start, arguments = parser.push(text) + parser.finish()
        assert isinstance(start, CallStart)
        assert isinstance(arguments, CallArguments)
        value = json.loads(arguments.text)
        if start.name == "move":
            assert value["to"] in ("left", "right")
            assert value["steps"] <= 9
        else:
            assert value == {}
