"""``timings`` in answers, and the histograms that add them up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi", "max_tokens": 9})]
KEYS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
    "queue_ms",
    "draft_n",
    "draft_n_accepted",
}


def post(http: httpx.Client, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
    answer = http.post(path, json={"model": "fake/model", **body, **more})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("field", ["timings", "timings_per_token"])
def test_timings_come_when_asked_for(
    http: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    answer = post(http, path, body, **{field: True}).json()
    timings, usage = answer["timings"], answer["usage"]
    assert set(timings) == KEYS
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert (timings["queue_ms"], timings["prompt_ms"], timings["predicted_ms"]) == (500, 250, 2000)
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (7, 3)
    rate = (usage["completion_tokens"] - 1) / 2.0
    assert timings["predicted_per_second"] == pytest.approx(rate, abs=0.001)


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_timings_are_absent_unless_asked_for(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert "timings" not in post(http, path, body).json()
    assert "timings" not in post(http, path, body, stream=True).text


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_streams_last_chunks_carry_the_timings(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True}
    text = post(http, path, body, stream=True, stream_options=options, timings=True).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    with_timings = [chunk for chunk in chunks if "timings" in chunk]
    assert with_timings == chunks[-2:]
    assert with_timings[0]["choices"][0]["finish_reason"]
    assert with_timings[1]["choices"] == []


def test_metrics_show_every_stage_of_a_request(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert f'ingle_{name}_bucket{{le="+Inf"}}' in text
        assert f"ingle_{name}_count" in text


def test_metrics_count_what_was_guessed(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f"\ningle_spec_decode_num_{name}_total " in text


def test_the_dashboard_asks_only_for_metrics_that_exist(http: httpx.Client) -> None:
    page = Path(__file__).parents[2] / "docs" / "grafana" / "ingle.json"
    asked = set(re.findall(r"\b(?:ingle|process)_[a-z_]+\b", page.read_text()))
    asked -= {"ingle_request_success_total"}  # appears with the first request
    shown = set(re.findall(r"^([a-z_]+)[ {]", http.get("/metrics").text, re.MULTILINE))
    assert len(asked) > 15
    assert asked <= shown
