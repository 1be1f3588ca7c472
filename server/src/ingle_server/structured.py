"""What an answer must look like: from a client's fields to one grammar, checked beforehand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from ingle import GrammarSpec, RequestError, SamplingParams
from ingle_server.engine_client import EngineClient
from ingle_server.errors import bad_request, not_supported
from ingle_server.schemas.sampling import SamplingFields, StructuredOutputs

COMPILE_SECONDS = 10.0
"""After which a grammar is refused; the compiler's own limits stop nearly all of them sooner."""
MAX_CHOICES = 2000

_SPELLINGS = (
    *((name, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")),
    ("json", "json_schema"),
    ("regex", "regex_pattern"),
    ("grammar", "grammar_string"),
)
"""(what it is, its field): vLLM's older names, then TabbyAPI's."""
ANY_OBJECT = GrammarSpec("json", '{"type":"object"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A grammar, and the request field that it came from."""

    grammar: GrammarSpec
    param: str


def wanted_output(
    fields: SamplingFields, response_format: dict[str, Any] | None = None
) -> Wanted | None:
    """The one grammar that the fields ask for, or None.

    Raises:
        ApiError: 400 when they ask for several, or for none in a form that cannot be read.
    """
    asked = [
        *_response_format(response_format),
        *_guided(fields),
        *_structured_outputs(fields.structured_outputs),
    ]
    if len(asked) > 1:
        names = " and ".join(wanted.param for wanted in asked[:2])
        raise bad_request(f"Only one of {names} can be followed.", asked[1].param)
    return asked[0] if asked else None


async def check_grammar(engine: EngineClient, wanted: Wanted | None) -> None:
    """Compiles a grammar off the event loop.

    Raises:
        ApiError: 400 with the field's name, when it can't be used or takes too long.
    """
    if wanted is None:
        return
    params = SamplingParams(structured=wanted.grammar)
    try:
        async with asyncio.timeout(COMPILE_SECONDS):
            await asyncio.to_thread(engine.compile_grammar, params)
    except RequestError as error:
        raise bad_request(f"{wanted.param}: {error}", wanted.param) from None
    except TimeoutError:
        raise bad_request(f"{wanted.param} takes too long to compile.", wanted.param) from None


def _response_format(value: dict[str, Any] | None) -> list[Wanted]:
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return []
    if kind == "json_object":
        return [Wanted(grammar=ANY_OBJECT, param="response_format")]
    grammar = json_grammar(value["json_schema"]["schema"], "response_format")
    return [Wanted(grammar=grammar, param="response_format")]


def _guided(fields: SamplingFields) -> list[Wanted]:
    asked = []
    for name, param in _SPELLINGS:
        given = getattr(fields, param)
        if given == "" and not param.startswith("guided"):
            continue  # an empty line of a form
        value = StructuredOutputs(**{name: given})
        asked += [Wanted(grammar=spec, param=param) for _, spec in _specs(value, param)]
    return asked


def _structured_outputs(value: StructuredOutputs | None) -> list[Wanted]:
    param = "structured_outputs"
    if value is None:
        return []
    if value.structural_tag is not None:
        raise not_supported(param, "structural_tag")
    specs = _specs(value, param)
    if len(specs) != 1:
        raise bad_request(
            f"{param} must hold exactly one of json, regex, choice, grammar and json_object; got "
            f"{len(specs)}.",
            param,
        )
    return [Wanted(grammar=specs[0][1], param=param)]


def _specs(value: StructuredOutputs, param: str) -> list[tuple[str, GrammarSpec]]:
    specs = []
    if value.json is not None:
        specs.append(("json", json_grammar(value.json, param)))
    if value.regex is not None:
        specs.append(("regex", GrammarSpec("regex", _not_empty(value.regex, "regex", param))))
    if value.choice is not None:
        specs.append(("choice", _choice(value.choice, param)))
    if value.grammar is not None:
        text = _not_empty(value.grammar, "grammar", param)
        specs.append(("grammar", GrammarSpec("grammar", text)))
    if value.json_object:
        specs.append(("json_object", ANY_OBJECT))
    return specs


def json_grammar(schema: str | dict[str, Any], param: str) -> GrammarSpec:
    """The grammar of a JSON Schema, given as an object or as JSON text.

    Raises:
        ApiError: 400 when the text is no JSON object.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(f"{param}: json must be a JSON Schema object.", param) from None
    try:
        return GrammarSpec("json", msgspec.json.encode(schema).decode())
    except RecursionError:
        raise bad_request(f"{param}: the schema is nested too deeply.", param) from None


def _choice(choices: list[str], param: str) -> GrammarSpec:
    if not choices or len(choices) > MAX_CHOICES or not all(choices):
        raise bad_request(f"{param}: choice must hold 1 to {MAX_CHOICES} non-empty texts.", param)
    return GrammarSpec("choice", msgspec.json.encode(choices).decode())


def _not_empty(text: str, name: str, param: str) -> str:
    if not text:
        raise bad_request(f"{param}: {name} must not be empty.", param)
    return text
