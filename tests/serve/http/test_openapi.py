"""The description of the API holds: schemathesis sends what it allows and what it forbids."""

import functools

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS
from schemathesis.generation import GenerationMode

from tests.serve.fake_client import NAME
from tests.serve.thread_server import is_healthy, thread_server
from tiercel.serve import app as app_module
from tiercel.serve.http.openapi import DOCS, describe

CHECK_NAMES = (
    "not_a_server_error",
    "response_schema_conformance",
    "status_code_conformance",
    "content_type_conformance",
)
ALL_DOCS = [*(doc for module in app_module._MODULES for doc in module.DOCS), *DOCS]
WITH_BODY = [doc for doc in ALL_DOCS if doc.body is not None]
MODES = {"allowed": GenerationMode.POSITIVE, "forbidden": GenerationMode.NEGATIVE}


@functools.cache
def description():
    return schemathesis.openapi.from_dict(describe(ALL_DOCS))


@pytest.fixture(scope="module")
def described():
    """A server around a fake engine."""
    with thread_server() as running:
        yield running


def check_route(doc, mode, server, max_examples):
    schema = description()
    schema.config.update(base_url=server.url)
    operation = schema[doc.path][doc.method.upper()]
    checks = [CHECKS.get_one(name) for name in CHECK_NAMES]

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=MODES[mode]))
    def check(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = NAME  # the description cannot know it; else all would be 404
        case.validate_response(case.call(timeout=30), checks=checks)

    check()
    assert is_healthy(server)


@pytest.mark.parametrize("doc", ALL_DOCS, ids=lambda doc: doc.path)
def test_answers_are_as_described(doc, described):
    check_route(doc, "allowed", described, max_examples=5)


@pytest.mark.parametrize("doc", WITH_BODY, ids=lambda doc: doc.path)
def test_wrong_bodies_are_answered_as_described(doc, described):
    check_route(doc, "forbidden", described, max_examples=5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("doc", WITH_BODY, ids=lambda doc: doc.path)
def test_answers_are_as_described_at_length(doc, mode, described):
    check_route(doc, mode, described, max_examples=100)


def test_streams_are_described():
    paths = describe(ALL_DOCS)["paths"]
    streaming = [doc.path for doc in ALL_DOCS if doc.streams]
    assert "/v1/chat/completions" in streaming
    for path in streaming:
        assert "text/event-stream" in paths[path]["post"]["responses"]["200"]["content"]


def test_every_route_lists_its_errors():
    for path, methods in describe(ALL_DOCS)["paths"].items():
        for operation in methods.values():
            assert {"200", "400", "401", "403", "500"} <= operation["responses"].keys(), path
            for status, response in operation["responses"].items():
                assert status == "200" or response["content"]["application/json"]["schema"]
