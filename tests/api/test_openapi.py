"""The OpenAPI document describes the body of every route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from tinkerflow.api.openapi import serve_document

# These routes do not read bodies.
NO_BODY = {"/client/config", "/client/dynamic_config", "/auth/token", "/publish", "/v1/embeddings"}


def test_every_route_that_reads_a_body_describes_it(server: Any) -> None:
    document = server.http.get(f"{server.url}/openapi.json").json()
    silent = {
        path
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if method in ("post", "put") and "requestBody" not in operation
    }
    assert all(any(path.endswith(tail) for tail in NO_BODY) for path in silent), silent
    assert "$ref" not in str([o for p in document["paths"].values() for m in p.values() if (o := m.get("requestBody"))])
    search = document["paths"]["/api/v1/sessions/search"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert search["properties"]["limit"]["maximum"] == 200


def test_openapi_document_is_created_once() -> None:
    app, made = FastAPI(openapi_url=None), list[dict[str, Any]]()
    document = app.openapi
    app.openapi = lambda: made.append(document()) or made[-1]  # type: ignore[func-returns-value, method-assign]
    serve_document(app)
    with TestClient(app) as client:
        answers = [client.get("/openapi.json") for _ in range(2)]
    assert [answer.json() for answer in answers] == [made[0]] * 2 and len(made) == 1
