"""``/v1/embeddings`` with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from server_checks import check_error
from server_under_test import Running

MODEL = "fake/model"


@pytest.fixture(scope="module")
def client(shared: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("form", ["float", "base64"])
def test_every_input_gets_a_vector_of_length_one(client: OpenAI, form: Any) -> None:
    answer = client.embeddings.create(model=MODEL, input=["", "a", "bc"][1:], encoding_format=form)
    assert [each.index for each in answer.data] == [0, 1]
    assert (answer.object, answer.data[0].object) == ("list", "embedding")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    if form == "float":
        assert sum(x * x for x in answer.data[1].embedding) == pytest.approx(1, abs=1e-6)


def test_the_client_reads_base64_by_itself(client: OpenAI, http: httpx.Client) -> None:
    by_client = client.embeddings.create(model=MODEL, input="abc").data[0].embedding
    plain = http.post("/v1/embeddings", json={"model": MODEL, "input": "abc"}).json()
    assert by_client == pytest.approx(plain["data"][0]["embedding"])


@pytest.mark.parametrize("given", ["hi", [104, 105], [[104, 105]], ["hi"]])
def test_all_four_forms_of_input_are_read(client: OpenAI, shared: Running, given: Any) -> None:
    client.embeddings.create(model=MODEL, input=given)
    assert shared.engine.seen[-1].prompt_token_ids == [104, 105]
    assert shared.engine.seen[-1].params.pooling == "mean"


def test_dimensions_cut_the_vector(client: OpenAI, shared: Running) -> None:
    answer = client.embeddings.create(
        model=MODEL, input="abc", dimensions=2, extra_body={"pooling": "last"}
    )
    assert answer.data[0].embedding == pytest.approx([0.5**0.5, 0.5**0.5])
    assert shared.engine.seen[-1].params.pooling == "last"


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"input": []}, "input", None),
        ({"input": ""}, "input", None),
        ({"input": [1, "a"]}, "input", None),
        ({"input": 5}, "input", None),
        ({"input": [999999]}, "input", None),
        ({"input": "x" * 2000}, "input", "context_length_exceeded"),
        ({"encoding_format": "int8"}, "encoding_format", None),
        ({"dimensions": 0}, "dimensions", None),
        ({"dimensions": 5}, "dimensions", None),
        ({"pooling": "max"}, "pooling", None),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, change: dict[str, Any], param: str, code: str | None
) -> None:
    body = {"model": MODEL, "input": "hi", **change}
    check_error(http.post("/v1/embeddings", json=body), 400, param, code)
