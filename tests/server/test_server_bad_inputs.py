"""Bad inputs of specs/robustness.md §3: status, param, code, and the shape of every error body."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest
from server_checks import check_error
from server_fake_engine import CONTEXT, VOCAB_SIZE
from server_under_test import Running, running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "fake/model", "prompt": "hi", **fields}).encode()


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "fake/model", "messages": messages, **fields}).encode()


def raw_field(name: str, value: str) -> bytes:
    return b'{"model":"fake/model","prompt":"hi","%b":%b}' % (name.encode(), value.encode())


MALFORMED = [
    pytest.param(COMPLETIONS, b'{"model": "x", "prompt": "a', id="cut JSON"),
    *(pytest.param(CHAT, body, id=f"body {body!r}") for body in (b"", b"[]", b"5", b"null")),
    pytest.param(COMPLETIONS, b'{"model":"fake/model","prompt":"a\xff\xfe"}', id="invalid UTF-8"),
    pytest.param(COMPLETIONS, b'{"model":"fake/model","prompt":"a \\ud83d"}', id="lone surrogate"),
    pytest.param(COMPLETIONS, b"[" * 200_000, id="deep JSON"),
    pytest.param(
        COMPLETIONS, b'{"model":"fake/model","x":' + b"[" * 200_000, id="deep JSON in a field"
    ),
    pytest.param(CHAT, b'{"model":"fake/model","tools":' + b"[" * 200_000, id="unclosed"),
    pytest.param(
        COMPLETIONS, b'{"model":"fake/model","prompt":"a","stop":"\\udc00"}', id="surrogate in stop"
    ),
]


@pytest.mark.parametrize(("path", "body"), MALFORMED)
def test_malformed_bodies_are_refused(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body, headers=JSON)
    param = "tools" if b'"tools"' in body else None
    assert check_error(response, 400, param)["type"] == "invalid_request_error"


def test_a_lone_surrogate_is_named_as_such(http: httpx.Client) -> None:
    body = b'{"model":"fake/model","prompt":"a \\ud83d"}'
    message = check_error(http.post(COMPLETIONS, content=body, headers=JSON), 400, None)["message"]
    assert "surrogate" in message


BAD_COMPLETIONS: list[tuple[str, list[Any]]] = [
    ("prompt", [[], [[]], [None], 5, [1_000_000_000], [-1], [VOCAB_SIZE], ["a", 5], [["a"]], ""]),
    ("temperature", [-1, 3, "hot", True]),
    ("top_p", [-0.1, 1.5, "x"]),
    ("n", [0, -1, 1.5, 10**6, 2**63, 10**400, "1", True]),
    ("max_tokens", [-1, 1.5, "ten", 0]),
    ("stop", [5, [5], list("abcdef"), [""], ""]),
    ("logprobs", [-1, 21, 10**6, True]),
    (
        "logit_bias",
        [
            "x",
            {"abc": 1},
            {"999999999": 1},
            {"1": "x"},
            {"1": 101},
            {"-1": 1},
            {"1_0": 1},
            {"1": True},
            {str(i): 1 for i in range(5000)},
        ],
    ),
    ("seed", ["s", 2**64, 1.5]),
    ("stream", ["yes", 1, "true"]),
    ("stream_options", [{"include_usage": True}, 5]),
    ("presence_penalty", [3, -3]),
    ("frequency_penalty", [3]),
    ("repetition_penalty", [0, -1]),
    ("min_p", [2, -0.1]),
    ("top_k", [-7, 1.5]),
    ("min_tokens", [17, -1]),
    ("stop_token_ids", [[VOCAB_SIZE], [-1], 5]),
    ("allowed_token_ids", [[VOCAB_SIZE], [], [-1], 5]),
    ("best_of", [-1, 21, 1.5]),
    ("response_format", ["json", {"type": "sound"}, {"type": "json_schema"}]),
    ("suffix", ["x"]),
    ("cache_salt", ["", "x" * 129, 5]),
    ("truncate_prompt_tokens", [0, -2, CONTEXT + 1]),
    ("bad_words", ["x", [""], ["x"] * 200, ["x" * 300], [5]]),
    ("top_a", [-1, 2, "x"]),
    ("tfs", [0, 1.5]),
    ("typical_p", [-0.1, 1.1]),
    ("eta_cutoff", [-1]),
    ("epsilon_cutoff", [-1]),
    ("nsigma", [-1, 10**400]),
    ("smoothing_factor", [-1]),
    ("smoothing_curve", [0]),
    ("xtc_threshold", [2]),
    ("xtc_probability", [2]),
    ("skew", [100]),
    ("dynatemp_min", [1]),
    ("dynatemp_exponent", [0]),
    ("temperature_last", ["yes"]),
    ("mirostat_mode", [1, 3, 2.5]),
    ("mirostat_tau", [-1]),
    ("no_repeat_ngram_size", [-1, 10**6]),
    ("dry_base", [0.5]),
    ("dry_allowed_length", [0]),
    ("dry_range", [-1]),
    ("dry_sequence_breakers", [5, [5]]),
    ("prompt_logprobs", [-1, 21, "x", 1.5]),
    ("use_beam_search", [True]),
    ("prompt_embeds", ["gASV"]),
    (
        "structured_outputs",
        [
            5,
            {},
            {"json_object": False},
            {"json": ""},
            {"json": {"type": "hiccup"}},
            {"json": {"$ref": "#/nowhere"}},
            {"json": {}, "regex": "a"},
            {"regex": "("},
            {"regex": ""},
            {"choice": []},
            {"choice": [5]},
            {"grammar": "start: nothing"},
            {"grammar": ""},
            {"structural_tag": {}},
        ],
    ),
    ("guided_json", [5, "{", {"type": "hiccup"}]),
    ("guided_regex", ["(", 5]),
    ("guided_choice", ["a", []]),
    ("guided_grammar", ["root ::= (", 5]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_COMPLETIONS for value in values]
)
def test_bad_completion_fields_are_refused_by_name(
    http: httpx.Client, field: str, value: Any
) -> None:
    started = time.perf_counter()
    response = http.post(COMPLETIONS, content=completion(**{field: value}), headers=JSON)
    check_error(response, 400, field)
    # §3 row 16: a hundred times what it takes, a hundredth of what copying n times would.
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused_by_name(
    http: httpx.Client, field: str, value: str
) -> None:
    response = http.post(COMPLETIONS, content=raw_field(field, value), headers=JSON)
    check_error(response, 400, field)


def test_an_infinite_bias_is_refused(http: httpx.Client) -> None:
    body = raw_field("logit_bias", '{"1": 1e400}')
    check_error(http.post(COMPLETIONS, content=body, headers=JSON), 400, "logit_bias")


def test_a_refusal_shows_field_and_value(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, content=completion(n=1.5), headers=JSON)
    assert check_error(response, 400, "n")["message"] == "n: expected int or null, got float (1.5)."


def test_long_values_are_cut_in_messages(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, content=completion(temperature="x" * 100_000), headers=JSON)
    assert len(check_error(response, 400, "temperature")["message"]) < 200


@pytest.mark.parametrize("fields", [{"best_of": 2, "n": 3}, {"best_of": 2, "stream": True}])
def test_best_of_below_n_or_streamed_is_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    check_error(http.post(COMPLETIONS, content=completion(**fields), headers=JSON), 400, "best_of")


def test_a_missing_prompt_is_refused(http: httpx.Client) -> None:
    check_error(http.post(COMPLETIONS, json={"model": "fake/model"}), 400, "prompt")


def test_a_missing_model_is_refused(http: httpx.Client) -> None:
    check_error(http.post(COMPLETIONS, json={"prompt": "hi"}), 400, "model")


USER = {"role": "user", "content": "hi"}
SCHEMA = {"name": "a", "schema": {"type": "hiccup"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
BAD_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "hiccup"}}}
BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0].role", {"messages": [{"content": "hi"}]}),
    ("messages[0].role", {"messages": [{"role": 5, "content": "hi"}]}),
    ("messages[0].role", {"messages": [{"role": "king", "content": "hi"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[1].content", {"messages": [USER, {"role": "assistant", "content": None}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
    *(
        (
            "messages[0].content[1].type",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}
                ]
            },
        )
        for kind in ("image_url", "file", "input_audio", "dream")
    ),
    (
        "messages[0].content[0].text",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    ),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("logprobs", {"logprobs": 5}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -1}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("response_format", {"response_format": "json"}),
    ("response_format", {"response_format": {"type": "sound"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
    ("tools", {"tools": "x"}),
    ("tools", {"tools": [{}]}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": 5}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a", "parameters": "no"}}]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tools", {"tools": [BAD_TOOL], "tool_choice": "required"}),
    (
        "tools",
        {
            "tools": [BAD_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
    ),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}),
    (
        "tool_choice",
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "x"}}],
                },
            },
        },
    ),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "sometimes"}),
    (
        "tool_choice",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
    ),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tokenize": True}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    (
        "continue_final_message",
        {"add_generation_prompt": True, "continue_final_message": True},
    ),
    ("audio", {"audio": {"voice": "x"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("web_search_options", {"web_search_options": {}}),
    ("messages", {"messages": [{"role": "user", "content": "template, refuse!"}]}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_CHATS)
def test_bad_chat_fields_are_refused_by_name(
    http: httpx.Client, param: str, fields: dict[str, Any]
) -> None:
    check_error(http.post(CHAT, content=chat(**fields), headers=JSON), 400, param)


def test_missing_messages_are_refused(http: httpx.Client) -> None:
    check_error(http.post(CHAT, json={"model": "fake/model"}), 400, "messages")


def test_media_is_refused_without_fetching(http: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.setblocking(False)
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/cat.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        body = chat(messages=[{"role": "user", "content": [part]}])
        check_error(http.post(CHAT, content=body, headers=JSON), 400, "messages[0].content[0].type")
        with pytest.raises(BlockingIOError):
            canary.accept()


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_too_long_prompts_are_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    """By tokens, and by characters before anything is tokenised."""
    code = "context_length_exceeded"
    for length in (CONTEXT, CONTEXT + 1, CONTEXT * 5):
        body = completion(prompt="x" * length, **fields)
        check_error(http.post(COMPLETIONS, content=body, headers=JSON), 400, "prompt", code)
        body = chat(messages=[{"role": "user", "content": "x" * length}], **fields)
        check_error(http.post(CHAT, content=body, headers=JSON), 400, "messages", code)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_too_many_tokens_for_the_context_are_refused(http: httpx.Client, field: str) -> None:
    code = "context_length_exceeded"
    for stream in (False, True):
        body = chat(**{field: CONTEXT, "stream": stream})
        error = check_error(http.post(CHAT, content=body, headers=JSON), 400, field, code)
        assert str(CONTEXT) in error["message"]
    body = completion(max_tokens=CONTEXT)
    check_error(http.post(COMPLETIONS, content=body, headers=JSON), 400, "max_tokens", code)


@pytest.mark.parametrize("name", ["no/such", "../../etc/passwd", "", "x" * 100_000, "/etc/passwd"])
def test_model_names_are_not_paths(http: httpx.Client, name: str) -> None:
    for response in (
        http.post(COMPLETIONS, content=completion(model=name), headers=JSON),
        http.post(CHAT, content=chat(model=name), headers=JSON),
    ):
        error = check_error(response, 404, "model", "model_not_found")
        assert len(error["message"]) < 200


def test_too_many_prompts_are_refused_before_anything_is_copied(http: httpx.Client) -> None:
    body = completion(prompt=["x"] * 100_000)
    check_error(http.post(COMPLETIONS, content=body, headers=JSON), 400, "prompt")
    body = completion(prompt=["x"] * 100, n=100)
    check_error(http.post(COMPLETIONS, content=body, headers=JSON), 400, "prompt")


def test_wrong_methods_and_paths_have_the_error_shape(http: httpx.Client) -> None:
    response = http.get(CHAT)
    check_error(response, 405, None)
    assert "POST" in response.headers["allow"]
    check_error(http.get("/v1/nope"), 404, None)
    check_error(http.delete("/v1/models"), 405, None)
    check_error(http.get("/" + "x" * 5000), 414, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types_are_refused(http: httpx.Client, kind: str) -> None:
    response = http.post(COMPLETIONS, content=completion(), headers={"content-type": kind})
    check_error(response, 415, None)


def test_a_charset_and_a_missing_content_type_are_fine(http: httpx.Client) -> None:
    kind = "application/json; charset=utf-8"
    body = completion()
    assert http.post(COMPLETIONS, content=body, headers={"content-type": kind}).status_code == 200
    assert http.post(COMPLETIONS, content=body).status_code == 200


def test_large_bodies_are_refused_and_the_client_hears_why() -> None:
    with running_server(max_request_body="1MiB") as running, running.client() as client:
        for size in (2, 64):
            body = completion(prompt="x" * (size * 2**20))
            check_error(client.post(COMPLETIONS, content=body, headers=JSON), 413, None)
        chunks = (b"x" * 2**16 for _ in range(64))
        check_error(client.post(COMPLETIONS, content=chunks, headers=JSON), 413, None)
        assert client.post(COMPLETIONS, content=completion(), headers=JSON).status_code == 200


def exchange(running: Running, data: bytes) -> bytes:
    """What the server says to raw bytes until it closes the connection."""
    with running.raw() as sock:
        try:
            sock.sendall(data)
        except OSError:
            return b""
        answer = b""
        while True:
            try:
                chunk = sock.recv(65536)
            except ConnectionResetError:
                return answer
            if not chunk:
                return answer
            answer += chunk


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(
            HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n123456", id="two lengths"
        ),
        pytest.param(HEAD + b"Content-Length: -5\r\n\r\n", id="negative length"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", id="bad chunk size"),
        pytest.param(HEAD + b"X: " + b"x" * 2**23 + b"\r\n\r\n", id="8 MiB header"),
        pytest.param(HEAD + b"X: y\r\n" * 200_000 + b"\r\n", id="200,000 headers"),
        pytest.param(b"\x16\x03\x01 not HTTP\r\n\r\n", id="not HTTP"),
    ],
)
def test_smuggling_and_header_floods_end_the_connection(shared: Running, data: bytes) -> None:
    answer = exchange(shared, data)
    assert not answer or answer.split()[1] in (b"400", b"431")
    with shared.client() as client:
        assert client.get("/health").status_code == 200


def test_more_than_256_headers_are_refused(http: httpx.Client) -> None:
    check_error(http.get("/health", headers=[("x", "y")] * 300), 431, None)


def test_unfinished_headers_and_bodies_are_timed_out() -> None:
    with running_server(header_timeout=0.2) as running:
        assert exchange(running, b"") == b""
        assert exchange(running, b"GET /health HTT") == b""
        answer = exchange(running, HEAD + b"Connection: close\r\nContent-Length: 50\r\n\r\n{")
        assert answer.split()[1] == b"408"
