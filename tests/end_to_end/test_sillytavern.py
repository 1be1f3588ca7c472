"""SillyTavern's requests, field for field, against a real server process with the demo
model, in float32: then a stream gives the very tokens of the whole answer.

The bodies are what SillyTavern 1.13 sends for each kind of server it knows (its
``public/scripts/textgen-settings.js``, ``src/endpoints/backends/text-completions.js`` and
``kobold.js``), with its default settings and a few sliders moved.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import LiveServer

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
STOPS = ["\nUser:", "\nYou:", "\n\n\n", "<|im_end|>", "<|im_start|>", "###"]
BREAKERS = '["\\n", ":", "\\"", "*"]'

COMMON: dict[str, Any] = {
    "prompt": PROMPT,
    "max_new_tokens": 16,
    "max_tokens": 16,
    "temperature": 0.7,
    "top_p": 0.9,
    "typical_p": 1,
    "typical": 1,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 1,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0.8,
    "dry_base": 1.75,
    "dry_sequence_breakers": BREAKERS,
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "stopping_strings": STOPS,
    "stop": STOPS,
    "truncation_length": 2048,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": ["shivers down", "Testament"],
    "api_server": "http://127.0.0.1:2242",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
}
MORE: dict[str, Any] = {
    "rep_pen": 1.1,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "guidance_scale": 1,
    "negative_prompt": "",
    "repeat_penalty": 1.1,
    "repeat_last_n": 0,
    "n_predict": 16,
    "num_predict": 16,
    "num_ctx": 2048,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
}
BODIES: dict[str, dict[str, Any]] = {
    "tabby": {
        **COMMON,
        **MORE,
        "api_type": "tabby",
        "n": 1,
        "repetition_decay": 0,
        "temperature_last": True,
        "speculative_ngram": False,
    },
    "koboldcpp": {
        **COMMON,
        **MORE,
        "api_type": "koboldcpp",
        "sampler_order": [6, 0, 1, 3, 4, 2, 5],
        "trim_stop": True,
        "dry_sequence_breakers": json.loads(BREAKERS),
        "dynamic_temperature": True,
        "dynatemp_low": 0.5,
        "dynatemp_high": 1.5,
        "dynatemp_range": 0.5,
        "dynatemp_exponent": 1,
    },
    "aphrodite": {
        **COMMON,
        "api_type": "aphrodite",
        "model": "demo",
        "n": 1,
        "temperature_last": True,
        "eta_cutoff": 0,
        "epsilon_cutoff": 0,
        "ignore_eos": False,
        "spaces_between_special_tokens": True,
        "early_stopping": False,
        "include_stop_str_in_output": False,
        "custom_token_bans": [],
        "no_repeat_ngram_size": 0,
        "sampler_priority": [
            *("temperature", "dry", "penalties", "no_repeat_ngram", "top_nsigma", "top_p_top_k"),
            *("top_a", "min_p", "tfs", "eta_cutoff", "epsilon_cutoff", "typical_p", "quadratic"),
            "xtc",
        ],
    },
    "ooba": {
        **COMMON,
        **MORE,
        "api_type": "ooba",
        "min_length": 0,
        "num_beams": 1,
        "length_penalty": 1,
        "early_stopping": False,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "encoder_repetition_penalty": 1,
        "no_repeat_ngram_size": 0,
        "penalty_alpha": 0,
        "temperature_last": True,
        "do_sample": True,
        "sampler_priority": [
            *("repetition_penalty", "presence_penalty", "frequency_penalty", "dry"),
            *("top_n_sigma", "temperature", "dynamic_temperature", "quadratic_sampling", "top_k"),
            *("top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "tfs", "top_a", "min_p"),
            *("adaptive_p", "mirostat", "xtc", "encoder_repetition_penalty"),
            "no_repeat_ngram",
        ],
    },
    "vllm": {
        **COMMON,
        "api_type": "vllm",
        "model": "demo",
        "n": 1,
        "ignore_eos": False,
        "spaces_between_special_tokens": True,
        "logit_bias": {"28": -2.5},
    },
}
KOBOLD: dict[str, Any] = {
    "prompt": PROMPT,
    "use_story": False,
    "use_memory": False,
    "use_authors_note": False,
    "use_world_info": False,
    "max_context_length": 2048,
    "max_length": 16,
    "rep_pen": 1.1,
    "rep_pen_range": 1024,
    "rep_pen_slope": 0.7,
    "temperature": 0.7,
    "tfs": 1,
    "top_a": 0,
    "top_k": 1,
    "top_p": 0.9,
    "min_p": 0,
    "typical": 1,
    "sampler_order": [6, 0, 1, 3, 4, 2, 5],
    "singleline": False,
    "use_default_badwordsids": False,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "grammar": "",
    "sampler_seed": -1,
    "stop_sequence": STOPS,
}
OLLAMA: dict[str, Any] = {
    "model": "demo",
    "prompt": PROMPT,
    "stream": False,
    "keep_alive": -1,
    "raw": True,
    "options": {
        "num_predict": 16,
        "num_ctx": 2048,
        "stop": STOPS,
        "temperature": 0.7,
        "repeat_penalty": 1.1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "top_k": 1,
        "top_p": 0.9,
        "typical_p": 1,
        "repeat_last_n": 0,
        "mirostat": 0,
        "mirostat_tau": 5,
        "mirostat_eta": 0.1,
        "min_p": 0.05,
    },
}


@pytest.mark.parametrize("kind", BODIES)
def test_text_completions_are_answered_whole_and_streamed(
    exact_server: LiveServer, kind: str
) -> None:
    body = BODIES[kind]
    whole = exact_server.http.post("/v1/completions", json={**body, "stream": False})
    assert whole.status_code == 200, whole.text
    text = whole.json()["choices"][0]["text"]
    assert "Paris" in text
    streamed = exact_server.http.post("/v1/completions", json={**body, "stream": True}).text
    frames = [frame.removeprefix("data: ") for frame in streamed.split("\n\n") if frame]
    assert frames.pop() == "[DONE]"
    chunks = [json.loads(frame) for frame in frames]
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == text


def test_what_it_looks_up_first_is_there(exact_server: LiveServer) -> None:
    def get(path: str) -> Any:
        answer = exact_server.http.get(path)
        assert answer.status_code == 200, path
        return answer.json()

    for path in ("/v1/models", "/v1/model/list"):
        assert [card["id"] for card in get(path)["data"]] == ["demo"]
    assert get("/v1/model")["id"] == "demo"
    assert [model["name"] for model in get("/api/tags")["models"]] == ["demo"]
    assert get("/api/v1/info/version")["result"] >= "1.2.2"
    assert get("/api/extra/version")["result"] == "KoboldCpp"
    assert get("/api/v1/model")["result"] == "demo"


def test_its_ways_to_count_tokens_agree(exact_server: LiveServer) -> None:
    def post(path: str, **body: Any) -> Any:
        answer = exact_server.http.post(path, json=body)
        assert answer.status_code == 200, path
        return answer.json()

    ids = post("/tokenize", model="demo", prompt=PROMPT)["tokens"]
    assert post("/v1/tokenize", model="demo", prompt=PROMPT)["tokens"] == ids
    assert post("/v1/token/encode", text=PROMPT) == {"tokens": ids, "length": len(ids)}
    assert post("/v1/token/decode", tokens=ids) == {"text": PROMPT}
    assert post("/api/extra/tokencount", prompt=PROMPT) == {"value": len(ids), "ids": ids}


def test_kobolds_whole_body_is_answered(exact_server: LiveServer) -> None:
    answer = exact_server.http.post("/api/v1/generate", json=KOBOLD)
    assert answer.status_code == 200, answer.text
    text = answer.json()["results"][0]["text"]
    assert "Paris" in text
    streamed = exact_server.http.post("/api/extra/generate/stream", json=KOBOLD).text
    data = [json.loads(part.split("data: ")[1]) for part in streamed.split("\n\n") if part]
    assert "".join(each["token"] for each in data) == text
    assert exact_server.http.post("/api/extra/abort").status_code == 200


def test_ollamas_body_is_answered(exact_server: LiveServer) -> None:
    answer = exact_server.http.post("/api/generate", json=OLLAMA)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["response"]
    lines = exact_server.http.post("/api/generate", json={**OLLAMA, "stream": True}).text
    parts = [json.loads(line) for line in lines.splitlines()]
    assert "".join(part["response"] for part in parts) == answer.json()["response"]


def test_banned_strings_hold_in_a_real_stream(exact_server: LiveServer) -> None:
    body = {**BODIES["tabby"], "dry_multiplier": 0, "repetition_penalty": 1, "max_tokens": 24}
    ask: dict[str, Any] = {**body, "banned_strings": [], "stopping_strings": None, "stop": None}
    free = exact_server.http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    banned = ["PARIS", *[word for word in free.split() if len(word) > 3][1:3]]
    ask["banned_strings"] = banned
    whole = exact_server.http.post("/v1/completions", json=ask).json()
    text = whole["choices"][0]["text"]
    assert not any(word.lower() in text.lower() for word in banned)
    assert whole["usage"]["completion_tokens"] <= 24
    streamed = exact_server.http.post("/v1/completions", json={**ask, "stream": True}).text
    chunks = [json.loads(f[6:]) for f in streamed.split("\n\n") if f[6:].startswith("{")]
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == text
