"""Kobold's API: a request as SillyTavern sends it."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from server_fake_engine import ANSWER, CONTEXT
from server_under_test import Running, running_server

SILLY_TAVERN = {
    "prompt": "You: hi\nBot:",
    "gui_settings": False,
    "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    "max_context_length": 512,
    "max_length": 160,
    "rep_pen": 1.08,
    "rep_pen_range": 1024,
    "rep_pen_slope": 0.7,
    "temperature": 0.65,
    "tfs": 1,
    "top_a": 0,
    "top_k": 0,
    "top_p": 0.95,
    "min_p": 0,
    "typical": 1,
    "use_world_info": False,
    "singleline": False,
    "stop_sequence": ["\nYou:", "\nBot:", "", "###", "</s>", "\n\n\n", "<|end|>"],
    "streaming": True,
    "can_abort": True,
    "mirostat": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "use_default_badwordsids": True,
    "grammar": "",
    "sampler_seed": -1,
    "genkey": "KCPP1234",
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":"]',
}


def test_a_request_of_sillytavern_is_answered(http: httpx.Client, shared: Running) -> None:
    answer = http.post("/api/v1/generate", json=SILLY_TAVERN)
    assert answer.status_code == 200, answer.text
    (result,) = answer.json()["results"]
    assert result["text"] == ANSWER
    assert result["finish_reason"] == "stop"
    assert result["completion_tokens"] == len(ANSWER.encode()) + 1
    params = shared.engine.seen[-1].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.65, 0.95, 160)
    assert (params.repetition_penalty, params.seed, len(params.stop)) == (1.08, None, 6)
    assert answer.headers["x-request-id"]


def test_a_stream_is_events_of_tokens(http: httpx.Client) -> None:
    answer = http.post("/api/extra/generate/stream", json=SILLY_TAVERN)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in answer.text.strip().split("\n\n")]
    assert {event for event, _ in frames} == {"event: message"}
    data = [json.loads(line.removeprefix("data: ")) for _, line in frames]
    assert "".join(each["token"] for each in data) == ANSWER
    assert [each["finish_reason"] for each in data] == [None] * (len(data) - 1) + ["stop"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_generation_is_looked_at_and_aborted(streams: bool) -> None:
    with running_server() as running, running.client() as http:
        running.engine.hold = 8
        path = "/api/extra/generate/stream" if streams else "/api/v1/generate"
        box: list[httpx.Response] = []

        def ask() -> None:
            with running.client() as other:
                box.append(other.post(path, json=SILLY_TAVERN))

        thread = threading.Thread(target=ask)
        thread.start()
        key = {"genkey": "KCPP1234"}
        text = ""
        while text != "Zoë say":
            found = http.post("/api/extra/generate/check", json=key).json()["results"]
            text = found[0]["text"]
        assert http.get("/api/extra/generate/check").json()["results"] == [{"text": text}]
        assert http.post("/api/extra/abort", json=key).json()["success"] == "true"
        thread.join(20)
        assert box[0].status_code == 200
        if not streams:
            assert box[0].json()["results"][0]["text"] == text
        assert http.post("/api/extra/abort", json=key).json()["success"] == "false"
        while running.engine.active:
            pass
        assert len(running.engine.aborted) == 1


def test_a_prompt_too_long_loses_its_beginning(http: httpx.Client, shared: Running) -> None:
    body = {"prompt": "a" * 900 + "b" * 900, "max_length": 24}
    assert http.post("/api/v1/generate", json=body).status_code == 200
    seen = shared.engine.seen[-1]
    assert len(seen.prompt_token_ids) == CONTEXT - 24
    assert bytes(seen.prompt_token_ids[-900:]) == b"b" * 900


def test_more_tokens_than_there_is_room_for_are_cut(http: httpx.Client, shared: Running) -> None:
    body = {"prompt": "abc", "max_length": 100000}
    assert http.post("/api/v1/generate", json=body).status_code == 200
    assert shared.engine.seen[-1].params.max_tokens <= CONTEXT - 1


@pytest.mark.parametrize(
    "field",
    [
        {"banned_tokens": ["shiver", ""]},
        {"banned_strings": ["shiver"]},
        {"banned_tokens": ["shiver"], "banned_strings": ["other"]},
    ],
)
def test_texts_are_banned_under_both_names(
    http: httpx.Client, shared: Running, field: dict[str, Any]
) -> None:
    assert http.post("/api/v1/generate", json={**SILLY_TAVERN, **field}).status_code == 200
    assert shared.engine.seen[-1].params.banned_strings == ("shiver",)


def test_order_reach_and_banned_ids_count(http: httpx.Client, shared: Running) -> None:
    body = {**SILLY_TAVERN, "custom_token_bans": "65, 66"}
    assert http.post("/api/v1/generate", json=body).status_code == 200
    params = shared.engine.seen[-1].params
    assert params.bad_words_token_ids == ((65,), (66,))
    assert params.repetition_penalty_range == 1024
    assert params.sampler_priority[-2:] == ("temperature", "quadratic")


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/api/v1/config/max_context_length", {"value": CONTEXT}),
        ("/api/extra/true_max_context_length", {"value": CONTEXT}),
        ("/api/v1/config/max_length", {"value": 256}),
        ("/api/v1/config/soft_prompt", {"value": ""}),
        ("/api/v1/config/soft_prompts_list", {"values": []}),
        ("/api/v1/model", {"result": "fake/model"}),
        ("/api/latest/model", {"result": "fake/model"}),
        ("/api/v1/info/version", {"result": "1.2.5"}),
    ],
)
def test_what_clients_look_up_is_there(http: httpx.Client, path: str, answer: Any) -> None:
    assert http.get(path).json() == answer


def test_extras_are_told(http: httpx.Client) -> None:
    version = http.get("/api/extra/version").json()
    assert (version["result"], version["protected"]) == ("KoboldCpp", False)
    assert http.get("/api/extra/perf").json()["idle"] in (0, 1)
    counted = http.post("/api/extra/tokencount", json={"prompt": "abc"}).json()
    assert counted == {"value": 3, "ids": [97, 98, 99]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": 5}, "prompt"),
        ({"max_length": 0}, "max_length"),
        ({"rep_pen": -1}, "rep_pen"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"stop_sequence": ["a"] * 65}, "stop_sequence"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"sampler_order": [9]}, "sampler_order"),
        ({"banned_tokens": [5]}, "banned_tokens"),
        ({"custom_token_bans": "x"}, "custom_token_bans"),
    ],
)
def test_mistakes_are_told_in_kobolds_shape(
    http: httpx.Client, change: dict[str, Any], named: str
) -> None:
    answer = http.post("/api/v1/generate", json={**SILLY_TAVERN, **change})
    assert answer.status_code == 400
    detail = answer.json()["detail"]
    assert set(detail) == {"msg", "type"}
    assert named in detail["msg"]
