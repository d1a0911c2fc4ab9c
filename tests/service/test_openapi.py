"""The server does what its OpenAPI document says: schemathesis makes requests of it, and no answer is a 500."""

from __future__ import annotations

import schemathesis
from helpers.remote_samples import fill
from helpers.serving import serving_here
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
NUM_EXAMPLES = 4


def test_every_route_does_what_it_says(tmp_path):
    seen = set()
    with serving_here(fill(tmp_path / "cache", range(12))) as server:
        description = schemathesis.openapi.from_url(server.url + "/v1/openapi.json").exclude(path_regex=":encode$")
        headers = {"Authorization": f"Bearer {server.write_token}"}
        for result in description.get_all_operations():
            operation = result.ok()

            @settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(operation.as_strategy())
            def check(case):
                answer = case.call_and_validate(base_url=server.url, headers=headers, checks=CHECKS, timeout=30)
                seen.add(answer.status_code)

            check()
    assert {200, 404, 422} <= seen and not {401, 403} & seen, seen


def test_all_routes_but_one_say_that_they_need_a_token(served):
    document = served.get("/v1/openapi.json", token=None).json()
    routes = {path: route for path, methods in document["paths"].items() for route in methods.values()}
    assert {path for path, route in routes.items() if "security" not in route} == {"/v1/healthz"}
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
