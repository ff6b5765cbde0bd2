"""Spans of requests, as a collector gets them; `traceparent` is continued."""

import http.server
import signal
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.cli.harness import error_line
from tests.serve.harness import NAME, start_server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.spans = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with Collector() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def values(span):
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


def test_spans_continue_the_callers_trace(tiny, tmp_path, collector):
    log_path = tmp_path / "log"
    endpoint = ("--otlp-traces-endpoint", collector.url)
    body = {"model": NAME, "prompt": "the thin man", "max_tokens": 5, "temperature": 0}
    with start_server(tiny, *endpoint, log_path=log_path, is_probed=False) as server:
        parents = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        assert server.post("/v1/completions", body, headers=parents).status_code == 200
        unsampled = {"traceparent": f"00-{'c' * 32}-{PARENT}-00"}
        assert server.post("/v1/completions", body, headers=unsampled).status_code == 200
        for broken in ("00-zz", f"00-{'0' * 32}-{PARENT}-01", "x" * 5000):
            bad = {"traceparent": broken}
            assert server.post("/v1/completions", body | {"n": 0}, headers=bad).status_code == 400
        assert server.get("/no/such/route").status_code == 404
        server.stop(signal.SIGTERM)
        log = server.log
    spans = {span.name: [] for span in collector.spans}
    for span in collector.spans:
        spans[span.name].append(span)
    assert set(spans) == {"POST /v1/completions", "GET"}  # neither probes nor unknown paths
    continued = [s for s in collector.spans if s.trace_id.hex() == TRACE]
    assert [s.parent_span_id.hex() for s in continued] == [PARENT]
    of = values(continued[0])
    assert of["http.response.status_code"] == 200
    assert of["tiercel.request_id"] == "mine"
    assert of["gen_ai.usage.input_tokens"] > 0
    assert of["gen_ai.usage.output_tokens"] == 5
    assert 0 < of["gen_ai.latency.time_to_first_token"] < 60
    assert f"trace_id={TRACE}" in log
    assert not [s for s in collector.spans if s.trace_id.hex() == "c" * 32]  # not sampled
    refused = [s for s in spans["POST /v1/completions"] if s not in continued]
    assert [values(s)["error.type"] for s in refused] == ["invalid_request"] * 3
    assert not any(s.parent_span_id for s in refused)  # what cannot be read begins a trace


def test_a_dead_collector_costs_nothing(tiny, tmp_path):
    endpoint = ("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces")
    with start_server(tiny, *endpoint, log_path=tmp_path / "log") as server:
        assert server.expected is not None
        assert server.stop(signal.SIGTERM, seconds=20) == 0


def test_an_address_that_is_none_is_refused(tiny, here):
    done = here("serve", str(tiny), "--otlp-traces-endpoint", "localhost:4318")
    assert "--otlp-traces-endpoint localhost:4318" in error_line(done, status=2)
