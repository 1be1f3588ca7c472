"""The OpenAPI document says what the server has, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from server_checks import check_error
from server_fake_engine import FakeEngine
from server_under_test import running_server

import ingle_server.routes
from ingle_server.app import ROUTES

METHODS = {"get", "head", "post", "put", "patch", "delete"}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> Document:
    response = http.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    return dict(response.json())


def operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def registered() -> set[tuple[str, str]]:
    """What the decorators of the handlers say, not what the framework made of it."""
    return {
        (re.sub(r"\{(\w+):\w+\}", r"{\1}", path), str(method).lower())
        for handler in ROUTES
        for path in handler.paths
        for method in handler.http_methods
    }


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref":
                yield each
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_registered_route_is_in_the_document_and_nothing_else(document: Document) -> None:
    assert document["openapi"].startswith("3.1.")
    assert {(path, method) for path, method, _ in operations(document)} == registered()


def test_a_method_that_is_not_in_the_document_is_not_allowed(
    http: httpx.Client, document: Document
) -> None:
    for path, item in document["paths"].items():
        url = path.format(response_id="r", model_id="m", name="n")
        for method in METHODS:
            refused = http.request(method.upper(), url).status_code == 405
            assert refused == (method not in item), (method, path)


def test_every_struct_that_a_route_decodes_is_a_body_of_the_document(document: Document) -> None:
    modules = [
        importlib.import_module(f"ingle_server.routes.{found.name}")
        for found in pkgutil.iter_modules(ingle_server.routes.__path__)
    ]
    decoded = {
        value.type.__name__
        for module in modules
        for value in vars(module).values()
        if isinstance(value, msgspec.json.Decoder)
    }
    bodies = {
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1]
        for _, _, operation in operations(document)
        if "requestBody" in operation
    }
    assert bodies == decoded


def test_a_body_without_its_required_fields_is_refused_as_the_document_says(
    http: httpx.Client, document: Document
) -> None:
    schemas = document["components"]["schemas"]
    for path, method, operation in operations(document):
        if "requestBody" not in operation or path == "/v1/model/load":
            continue
        kind = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        required = schemas[kind.rpartition("/")[2]].get("required", [])
        response = http.request(method.upper(), path, json={})
        if required:
            assert response.status_code == 400, path
            assert any(name in response.text for name in required), response.text


def test_every_reference_leads_somewhere_and_every_schema_is_used(document: Document) -> None:
    used = {found.rpartition("/")[2] for found in references(document)}
    assert used == set(document["components"]["schemas"])


def test_operation_ids_are_unique_and_every_operation_names_its_refusals(
    document: Document,
) -> None:
    found = list(operations(document))
    assert len({operation["operationId"] for _, _, operation in found}) == len(found)
    for path, method, operation in found:
        assert operation["summary"]
        assert {"200", "403", "431", "500"} <= set(operation["responses"]), (path, method)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "Error"),
        ("/v1/messages", "AnthropicError"),
        ("/api/chat", "OllamaError"),
        ("/api/v1/generate", "KoboldError"),
    ],
)
def test_every_door_has_its_own_error_shape(document: Document, path: str, name: str) -> None:
    refusal = document["paths"][path]["post"]["responses"]["400"]
    schema = refusal["content"]["application/json"]["schema"]
    assert schema == {"$ref": f"#/components/schemas/{name}"}


def test_the_four_keys_of_an_error_are_required(document: Document) -> None:
    error = document["components"]["schemas"]["Error"]["properties"]["error"]
    assert set(error["required"]) == {"message", "type", "param", "code"}


def test_the_key_is_asked_for_where_the_document_says_so() -> None:
    with running_server(FakeEngine(), api_key=("sesame",)) as running, running.client() as client:
        check_error(client.get("/openapi.json"), 401, None, "invalid_api_key")
        headers = {"authorization": "Bearer sesame"}
        document = client.get("/openapi.json", headers=headers).json()
        assert document["components"]["securitySchemes"]["bearer"] == {
            "type": "http",
            "scheme": "bearer",
        }
        for path, method, operation in operations(document):
            url = path.format(response_id="r", model_id="m", name="n")
            response = client.request(method.upper(), url)
            assert (response.status_code == 401) == bool(operation["security"]), path
            assert ("401" in operation["responses"]) == bool(operation["security"]), path


def test_without_a_key_the_document_asks_for_none(document: Document) -> None:
    assert {} in document["paths"]["/v1/chat/completions"]["post"]["security"]


def test_the_document_knows_the_operators_prefix() -> None:
    with running_server(FakeEngine(), root_path="/llm") as running, running.client() as client:
        document = client.get("/openapi.json").json()  # a proxy takes the prefix off
    assert document["servers"] == [{"url": "/llm"}]
    assert "/v1/models" in document["paths"]
