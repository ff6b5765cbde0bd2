"""A span for each request, sent to an OpenTelemetry collector (extra `otel`).

A request that carries `traceparent` (W3C Trace Context) continues the caller's trace and keeps its
sampling decision; any other request begins a trace. The attribute names are OpenTelemetry's for
HTTP and generative models. Prompts and completions are never among the attributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tiercel.serve.http.logs import PROBES, RequestLog

SERVICE: Final = "tiercel"
EXPORT_S: Final = 5.0  # timeout of one attempt to reach the collector, the last one included
_TRACE_HEADERS: Final = (b"traceparent", b"tracestate")
_MAX_HEADER_BYTES: Final = 1024


class Tracing:
    """Begins and ends spans; a separate thread sends them in batches."""

    def __init__(self, endpoint: str) -> None:
        """Set up; nothing is sent yet, and a collector that does not respond delays no request.

        Args:
            endpoint: URL that accepts OTLP over HTTP, like http://localhost:4318/v1/traces.
        """
        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Mapping[str, Any], log: RequestLog) -> Span | None:
        """Start the span of a request, and name its trace in the log; None for probes."""
        if scope["path"] in PROBES:
            return None
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _TRACE_HEADERS and len(value) <= _MAX_HEADER_BYTES
        }
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(scope["method"], parent, SpanKind.SERVER)
        log.trace_id = format_trace_id(span.get_span_context().trace_id)
        return span

    def end(
        self, span: Span, scope: Mapping[str, Any], log: RequestLog, status: int, request_id: str
    ) -> None:
        """Write the result of a request; its last byte is sent, or the client has left."""
        method = scope["method"]
        # Only paths of routes without parameters become span names: few, and never a client's text.
        if status not in (404, 405) and not scope.get("path_params"):
            span.update_name(f"{method} {scope['path']}")
        values: dict[str, Any] = {
            "http.request.method": method,
            "http.response.status_code": status or None,
            "tiercel.request_id": request_id,
            "gen_ai.usage.input_tokens": log.prompt_tokens,
            "gen_ai.usage.cached_tokens": log.cached_tokens,
            "gen_ai.usage.output_tokens": log.completion_tokens,
            "gen_ai.response.finish_reasons": log.finish_reason and [log.finish_reason],
            "gen_ai.latency.time_in_queue": log.queue_ms and log.queue_ms / 1e3,
            "gen_ai.latency.time_to_first_token": log.ttft_ms and log.ttft_ms / 1e3,
            "error.type": log.error,
        }
        span.set_attributes({name: value for name, value in values.items() if value is not None})
        if log.error is not None and (status >= 500 or status in (0, 200)):
            span.set_status(StatusCode.ERROR, log.error)
        span.end()

    async def close(self) -> None:
        """Send the remaining spans; give up after a timeout."""
        closing = asyncio.get_running_loop().run_in_executor(None, self._provider.shutdown)
        await asyncio.wait([closing], timeout=EXPORT_S)
