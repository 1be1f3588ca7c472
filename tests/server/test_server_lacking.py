"""What other servers take and this one does not is refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import pytest
from server_checks import check_error
from server_under_test import Running

from ingle_server.lacking import LACKING

SHAPES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
MEANT: dict[str, Any] = {
    "use_beam_search": True,
    "token_healing": True,
    "response_prefix": "Sure",
    "logprob_token_ids": [1],
    "logits_processors": ["a.b"],
}


def post(shared: Running, path: str, **fields: Any) -> Any:
    with shared.client() as client:
        return client.post(path, json={"model": "fake/model", **SHAPES[path], **fields})


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("name", [name for name, _, _ in LACKING])
def test_a_field_that_asks_for_what_is_lacking_is_refused_by_name(
    shared: Running, path: str, name: str
) -> None:
    value = MEANT.get(name, {"a": 1} if "kwargs" in name or "args" in name else 5)
    check_error(post(shared, path, **{name: value}), 400, name)


@pytest.mark.parametrize("path", SHAPES)
def test_values_that_ask_for_nothing_pass(shared: Running, path: str) -> None:
    """What SillyTavern sends without being asked to."""
    nothing = {name: harmless[-1] for name, harmless, _ in LACKING}
    more = {"adaptive_target": -0.01, "spaces_between_special_tokens": True, "length_penalty": 1}
    assert post(shared, path, **nothing, **more, early_stopping=False).status_code == 200


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"adaptive_target": 0.5}, "adaptive_target"),
        ({"adaptive_target": "x"}, "adaptive_target"),
        (
            {"spaces_between_special_tokens": False, "skip_special_tokens": False},
            "spaces_between_special_tokens",
        ),
        ({"suffix": "end"}, "suffix"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
def test_the_rest_too(shared: Running, fields: dict[str, Any], named: str) -> None:
    check_error(post(shared, "/v1/completions", **fields), 400, named)
