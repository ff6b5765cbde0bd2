"""Prometheus metrics with vLLM's names, so that its dashboards work.

There is a registry for each engine and one for what the server counts. The labels `model_name` and
`engine` are added when the metrics are read, because the model's name is not known when counting
begins. An engine's counts arrive as totals of one engine process. The growth since its previous
message is added here, so that a counter never falls when the engine is restarted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tiercel.ipc.messages import EngineInfo, EngineStats

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
# vLLM's buckets of the time to first token, 1 ms to 43 minutes.
_FIRST_TOKEN_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
# Finer than vLLM's: a decode step of a fast GPU takes 2 to 10 ms.
_TOKEN_S: Final = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.5, 5.0,
)  # fmt: skip
_REQUEST_S: Final = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS: Final = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_COMPLETIONS: Final = (1, 2, 5, 10, 20)
_STEP_TOKENS: Final = (1, *(2**e for e in range(3, 15)))
# Label values of refused requests; a label must not come from a client.
_REASONS: Final = frozenset(
    {
        "body_too_large", "chat_template_error", "context_length_exceeded", "draining",
        "engine_dead", "engine_loading", "engine_restarting", "headers_too_large",
        "host_not_allowed", "internal_error", "invalid_api_key", "invalid_argument",
        "invalid_http", "invalid_json", "invalid_request", "invalid_schema", "method_not_allowed",
        "model_not_found", "no_valid_token", "nonfinite_logits", "not_found", "not_supported",
        "out_of_memory", "queue_full", "queue_timeout", "request_timeout", "schema_too_complex",
        "thread_unsupported_request", "too_many_connections", "unsupported_content",
        "unsupported_media_type", "unsupported_model", "unsupported_parameter",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Values of a request that are counted at its end; seconds on the monotonic clock.

    Attributes:
        finish_reasons: per completion: ``stop``, ``length``, ``tool_calls``, ``abort``, ``error``.
        num_prompt_tokens: tokens of all its prompts.
        num_generation_tokens: tokens of each completion.
        n: completions requested per prompt.
        max_tokens: limit of the request, or the rest of the context.
        total_s: time from its arrival to its end.
        queue_s: time until its first step began; None if none did.
        prefill_s: time from its first step to the first token; None without one.
        decode_s: time from the first token to the last; None without one.
    """

    finish_reasons: tuple[str, ...]
    num_prompt_tokens: int
    num_generation_tokens: tuple[int, ...]
    n: int
    max_tokens: int
    total_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Values of one engine now.

    Attributes:
        num_running: requests in it.
        num_waiting: requests that wait for it.
        num_restarts: processes of it after the first, so far.
        is_ready: whether it takes requests.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_restarts: int = 0
    is_ready: bool = False


class Metrics:
    """All metrics of one server."""

    def __init__(self, prefix: str = "tiercel", num_engines: int = 1) -> None:
        self._registry = CollectorRegistry()
        self._model_name = ""
        self._num_template_kills = 0
        self._engines = [_EngineMetrics(prefix) for _ in range(num_engines)]
        self._requests = _RequestMetrics(prefix, self._registry)
        self._server = _ServerMetrics(prefix, self._registry)

    def set_model(self, name: str, info: EngineInfo, engine: int = 0) -> None:
        """Name the model and describe the cache of an engine; called whenever one is ready."""
        self._model_name = name
        self._engines[engine].cache_config.info(
            {
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.num_blocks),
                "cache_dtype": info.dtype,
                "enable_prefix_caching": str(info.has_prefix_cache),
                "gpu_memory_utilization": str(info.gpu_memory_utilization),
            }
        )

    def take_stats(self, stats: EngineStats, engine: int = 0) -> None:
        """Add an engine's counts since its previous message."""
        self._engines[engine].take(stats)

    def forget_engine(self, engine: int = 0) -> None:
        """Start from zero, as a new engine process does: its totals are all growth."""
        self._engines[engine].seen = EngineStats()

    def observe_first_token(self, seconds: float) -> None:
        """Count the first token of a completion, this long after its request."""
        self._requests.first_token.observe(seconds)

    def observe_tokens(self, num_new: int, seconds: float) -> None:
        """Count later tokens of a completion, which came this long after the previous ones."""
        for _ in range(num_new):
            self._requests.token.observe(seconds / num_new)
            self._requests.token_old_name.observe(seconds / num_new)

    def count_finished(self, request: FinishedRequest) -> None:
        """Count an admitted request at its end."""
        own = self._requests
        for reason in request.finish_reasons:
            own.success.labels(reason).inc()
        own.total.observe(request.total_s)
        for histogram, seconds in (
            (own.queue, request.queue_s),
            (own.prefill, request.prefill_s),
            (own.decode, request.decode_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if request.prefill_s is not None and request.decode_s is not None:
            own.inference.observe(request.prefill_s + request.decode_s)
            longest = max(request.num_generation_tokens, default=0)
            if longest > 1:
                own.per_token.observe(request.decode_s / (longest - 1))
        own.prompt_tokens.observe(request.num_prompt_tokens)
        for num_tokens in request.num_generation_tokens:
            own.generation_tokens.observe(num_tokens)
        own.n.observe(request.n)
        own.max_tokens.observe(request.max_tokens)

    def count_rejected(self, code: str) -> None:
        """Count a request that was refused with this error code."""
        self._server.rejected.labels(code if code in _REASONS else "other").inc()

    def count_disconnect(self) -> None:
        """Count a client that left before its response was complete."""
        self._server.disconnects.inc()

    def count_score_items(self, count: int, tiles_skipped: int) -> None:
        """Count scored items, and the tiles of attention that packing skipped."""
        self._server.score_items.inc(count)
        self._server.score_tiles_skipped.inc(tiles_skipped)

    def count_unknown_fields(self, count: int) -> None:
        """Count the unknown fields of a request."""
        self._server.unknown_fields.inc(count)

    def render(self, engines: Sequence[EngineGauges], num_template_kills: int) -> bytes:
        """All metrics as text.

        Args:
            engines: values of each engine now.
            num_template_kills: template processes that were killed so far.
        """
        for engine, gauges in zip(self._engines, engines, strict=True):
            engine.set(gauges)
        self._server.template_kills.inc(num_template_kills - self._num_template_kills)
        self._num_template_kills = num_template_kills
        whole = "0" if len(engines) == 1 else "all"
        registries = {str(number): engine.registry for number, engine in enumerate(self._engines)}
        labelled = [*registries.items(), (whole, self._registry)]
        return generate_latest(_Labelled(labelled, self._model_name))


class _Labelled(Collector):
    """Joins registries; adds labels to everything in them."""

    def __init__(
        self, registries: Sequence[tuple[str, CollectorRegistry]], model_name: str
    ) -> None:
        """Set up.

        Args:
            registries: label `engine` of each registry.
            model_name: label of all.
        """
        self._registries = registries
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for engine, registry in self._registries:
            labels = {"model_name": self._model_name, "engine": engine}
            for metric in registry.collect():
                samples = [s._replace(labels={**labels, **s.labels}) for s in metric.samples]
                family = families.setdefault(metric.name, metric)
                family.samples = samples if family is metric else family.samples + samples
        yield from families.values()


class _EngineMetrics:
    """Metrics of one engine."""

    def __init__(self, prefix: str) -> None:
        registry = self.registry = CollectorRegistry()
        self.seen = EngineStats()  # in its last message
        self._num_restarts = 0
        self.ready = Gauge(
            f"{prefix}:engine_ready", "Whether an engine takes requests, 0 or 1.", registry=registry
        )
        self.restarts = Counter(
            f"{prefix}:engine_restarts", "Engine processes after the first.", registry=registry
        )
        self.running = Gauge(
            f"{prefix}:num_requests_running", "Requests in the engine.", registry=registry
        )
        self.waiting = Gauge(
            f"{prefix}:num_requests_waiting", "Requests that wait.", registry=registry
        )
        self.cache_usage = Gauge(
            f"{prefix}:kv_cache_usage_perc", "Share of cache blocks in use, 0 to 1.",
            registry=registry,
        )  # fmt: skip
        self.cache_config = Info(f"{prefix}:cache_config", "The cache.", registry=registry)
        self.iteration_tokens = Histogram(
            f"{prefix}:iteration_tokens_total", "Tokens of one step.", buckets=_STEP_TOKENS,
            registry=registry,
        )  # fmt: skip
        self.totals = tuple(
            (Counter(f"{prefix}:{name}", text, registry=registry), field)
            for name, field, text in (
                ("prompt_tokens", "num_prompt_tokens", "Prompt tokens that were processed."),
                ("generation_tokens", "num_generation_tokens", "Tokens that were generated."),
                ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up."),
                ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
                ("num_preemptions", "num_preemptions", "Preemptions of requests."),
                ("nonfinite_logits", "num_nonfinite", "Requests that ended in NaN or infinity."),
                ("engine_steps", "num_steps", "Steps of the engine."),
                ("gpu_step_seconds", "step_seconds", "Time of these steps."),
                (
                    "spec_decode_num_drafts",
                    "num_drafts",
                    "Verified steps of requests with draft tokens.",
                ),
                ("spec_decode_num_draft_tokens", "num_draft_tokens", "Draft tokens verified."),
                (
                    "spec_decode_num_accepted_tokens",
                    "num_accepted_tokens",
                    "Draft tokens that were accepted.",
                ),
            )
        )
        self.accepted_per_pos = Counter(
            f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            ["position"],
            registry=registry,
        )

    def set(self, gauges: EngineGauges) -> None:
        """Set what is read when metrics are."""
        self.running.set(gauges.num_running)
        self.waiting.set(gauges.num_waiting)
        self.ready.set(gauges.is_ready)
        self.restarts.inc(gauges.num_restarts - self._num_restarts)
        self._num_restarts = gauges.num_restarts

    def take(self, stats: EngineStats) -> None:
        """Add the counts since the previous message."""
        seen = self.seen if stats.num_steps >= self.seen.num_steps else EngineStats()
        for counter, field in self.totals:
            counter.inc(max(0, getattr(stats, field) - getattr(seen, field)))
        before = dict(enumerate(seen.accepted_per_pos))
        for position, count in enumerate(stats.accepted_per_pos):
            growth = max(0, count - before.get(position, 0))
            self.accepted_per_pos.labels(str(position)).inc(growth)
        for num_tokens in stats.iteration_tokens:
            self.iteration_tokens.observe(num_tokens)
        self.cache_usage.set(stats.kv_cache_usage)
        self.seen = stats


class _RequestMetrics:
    """Times and sizes of requests."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{prefix}:{name}", text, buckets=buckets, registry=registry)

        self.first_token = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _FIRST_TOKEN_S
        )
        self.token = histogram(
            "inter_token_latency_seconds", "From one token to the next.", _TOKEN_S
        )
        self.token_old_name = histogram(
            "time_per_output_token_seconds", "The same under its older name.", _TOKEN_S
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean of one request.", _TOKEN_S
        )
        self.total = histogram(
            "e2e_request_latency_seconds", "From a request to its end.", _REQUEST_S
        )
        self.queue = histogram(
            "request_queue_time_seconds", "Until the first step began.", _REQUEST_S
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_S
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )
        self.inference = histogram(
            "request_inference_time_seconds", "From the first step to the last.", _REQUEST_S
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self.generation_tokens = histogram(
            "request_generation_tokens", "Tokens of completions.", _TOKENS
        )
        self.n = histogram("request_params_n", "Completions requested.", _COMPLETIONS)
        self.max_tokens = histogram("request_params_max_tokens", "Limit of a completion.", _TOKENS)
        self.success = Counter(
            f"{prefix}:request_success", "Completions that ended.", ["finished_reason"],
            registry=registry,
        )  # fmt: skip


class _ServerMetrics:
    """Metrics of the HTTP server itself."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"{prefix}:{name}", text, labels, registry=registry)

        self.score_items = counter("score_items", "Scored items.")
        text = "Tiles of attention that a causal mask over packed items would have computed."
        self.score_tiles_skipped = counter("score_tiles_skipped", text)
        self.rejected = counter("requests_rejected", "Refused requests.", ("reason",))
        self.disconnects = counter("client_disconnects", "Clients that left early.")
        self.unknown_fields = counter("unknown_fields", "Request fields that no route knows.")
        self.template_kills = counter("template_kills", "Template processes that were killed.")
