"""Whatever a client sends: an answer or a 4xx with the error shape, never a 5xx."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_checks import LEAKS

from ingle_server.schemas.chat import ChatCompletionRequest
from ingle_server.schemas.completion import CompletionRequest

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2, 0.5, 2**31, 2**63, 2**64, -(2**70), 10**25, ""])
    | st.floats()
    | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGE_KEYS = st.sampled_from(["role", "content", "tool_calls", "name", "type", "text"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"])}).flatmap(
        lambda known: st.dictionaries(MESSAGE_KEYS, VALUES).map(lambda more: known | more)
    ),
    max_size=3,
)


def fields_of(schema: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    names = [field.encode_name for field in msgspec.structs.fields(schema)]
    names = [name for name in names if name not in ("model", "messages", "prompt", "stream")]
    return st.dictionaries(st.sampled_from(names), VALUES, max_size=3)


def check(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    # json.dumps writes NaN, Infinity and escaped lone surrogates, as careless clients do.
    data = json.dumps({"model": "fake/model", **body}).encode()
    response = http.post(path, content=data, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not LEAKS.search(error["message"])
        assert len(error["message"]) <= 500


common = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@common
@given(prompt=VALUES | st.just("hi"), fields=fields_of(CompletionRequest))
def test_no_completion_request_makes_a_5xx(
    http: httpx.Client, prompt: Any, fields: dict[str, Any]
) -> None:
    check(http, "/v1/completions", {"prompt": prompt, **fields})


@common
@given(messages=MESSAGES | VALUES, fields=fields_of(ChatCompletionRequest))
def test_no_chat_request_makes_a_5xx(
    http: httpx.Client, messages: Any, fields: dict[str, Any]
) -> None:
    check(http, "/v1/chat/completions", {"messages": messages, **fields})


@common
@given(
    fields=fields_of(CompletionRequest),
    options=st.dictionaries(
        st.sampled_from(["include_usage", "continuous_usage_stats", "x"]), VALUES, max_size=2
    ),
    prompt=st.text(max_size=20) | VALUES,
)
def test_every_stream_is_whole_whatever_was_asked(
    http: httpx.Client, fields: dict[str, Any], options: dict[str, Any], prompt: Any
) -> None:
    """Refused with a status, or a stream of events that ends as streams do."""
    body = {"model": "fake/model", "prompt": prompt, **fields, "stream": True}
    if options:
        body["stream_options"] = options
    data = json.dumps(body).encode()
    response = http.post("/v1/completions", content=data)
    if response.status_code == 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return
    assert response.status_code == 200
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        assert event.startswith((": ", "data: {"))
        if event.startswith("data: "):
            json.loads(event.removeprefix("data: "))


@common
@given(data=st.binary(max_size=60))
def test_no_bytes_make_a_5xx(http: httpx.Client, data: bytes) -> None:
    for body in (data, b'{"model":"fake/model","prompt":"' + data + b'"}'):
        response = http.post("/v1/completions", content=body)
        assert response.status_code in (200, 400)
