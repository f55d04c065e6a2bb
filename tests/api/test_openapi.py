"""The OpenAPI document describes the body of every route."""

from __future__ import annotations

from typing import Any

# What is sent there is not read.
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
