"""`tiercel serve`: the HTTP server in front of a separate engine process.

Every error of the command line is found before the port is bound, and an error of the port before
the model loads. The URL goes to standard output immediately, everything else to the log.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiercel.cli.options import CommonOptions, EngineOptions, ModelName
from tiercel.cli.serve_options import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    BatchOptions,
    DefaultOptions,
    LimitOptions,
    ServerOptions,
)
from tiercel.cli.terminal import UsageError, has_colour, read_bounded
from tiercel.errors import ArgumentError
from tiercel.machine import check_platform
from tiercel.params import LIMITS, Limits, SamplingDefaults, SamplingParams

if TYPE_CHECKING:
    from tiercel.config import LoadOptions
    from tiercel.ipc.client import EngineClient
    from tiercel.ipc.nodes import Cluster
    from tiercel.ipc.replicas import Replicas
    from tiercel.ipc.supervisor import SupervisorSettings
    from tiercel.serve.http.tracing import Tracing
    from tiercel.serve.settings import AccessSettings, ServeSettings

MAX_KEY_FILE_BYTES: Final = 1 << 20
MAX_KEY_CHARS: Final = 1024
# `SamplingParams` and its forms have these bounds themselves; a server may only be stricter.
_CEILINGS: Final = (
    "max_n", "max_stop_strings", "max_stop_chars", "max_logit_bias", "max_logprobs",
    "max_tool_name_chars", "max_schema_bytes", "max_schema_depth", "max_schema_nodes",
    "max_regex_bytes", "max_grammar_bytes",
)  # fmt: skip
_MAY_BE_ZERO: Final = ("max_stop_strings", "max_logit_bias", "max_logprobs", "max_waiting_requests")
_LARGEST: Final = 1 << 40
_LOG: Final = logging.getLogger("tiercel.serve")


def serve(
    model: ModelName = None,
    *,
    server: ServerOptions = ServerOptions(),  # noqa: B008 - frozen
    engine: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    batch: BatchOptions = BatchOptions(),  # noqa: B008 - frozen
    defaults: DefaultOptions = DefaultOptions(),  # noqa: B008 - frozen
    limits: LimitOptions = LimitOptions(),  # noqa: B008 - frozen
    common: CommonOptions = CommonOptions(),  # noqa: B008 - frozen
) -> int:
    """Serve a model over HTTP, by OpenAI's and Anthropic's APIs (docs/server.md)."""
    from tiercel.ipc.supervisor import SupervisorSettings
    from tiercel.serve.http.logs import set_up_logs
    from tiercel.serve.http.metrics import Metrics
    from tiercel.serve.server import fit_descriptors, run_server
    from tiercel.serve.startup_progress import StartupProgress
    from tiercel.serve.state import ServerState

    warning = check_platform()
    settings = make_settings(server, defaults, limits)
    settings = replace(settings, limits=fit_descriptors(settings.limits))
    tracing = make_tracing(server)
    cluster = make_cluster(server)
    level = "error" if common.quiet else "debug" if common.verbose else server.log_level
    with _bound(server) as (sockets, url):
        show_status = set_up_logs(getattr(logging, level.upper()), server.log_format)
        _print_url(url)
        if warning is not None:
            _LOG.warning(warning)
        _warn(server, settings)
        settings = replace(settings, url=url)
        options = _load_options(model, server, engine, batch, defaults)
        supervision = SupervisorSettings(heartbeat_s=server.hang_seconds)
        most = settings.limits.max_waiting_requests
        client = make_client(options, server.replicas, most, supervision, cluster)
        metrics = Metrics(settings.metrics_prefix, len(client.replicas))
        has_status = server.log_format == "text" and not common.quiet and has_colour()
        state = ServerState(
            settings,
            client,
            metrics,
            tracing=tracing,
            startup=StartupProgress(show_status if has_status else None),
        )
        return run_server(state, sockets, server.drain_seconds)


def make_settings(
    server: ServerOptions, defaults: DefaultOptions, limits: LimitOptions
) -> ServeSettings:
    """Make the settings of the options.

    Raises:
        UsageError: the message names the option.
    """
    from tiercel.serve.settings import ServeSettings

    try:
        _check_parsers(server)
        sampling = make_defaults(defaults)
    except ArgumentError as error:
        raise UsageError(str(error), hint=error.hint) from error
    _check_address(server)
    for name in ("drain_seconds", "slow_client_seconds"):
        if not 0 <= getattr(server, name) <= _LARGEST:
            raise UsageError(f"--{name.replace('_', '-')} must be 0 or more seconds.")
    if not 1 <= server.hang_seconds <= _LARGEST:
        raise UsageError(
            f"--hang-seconds {server.hang_seconds:g} is out of range.", hint="Use 1 or more."
        )
    if not server.metrics_prefix.isidentifier() or not server.metrics_prefix.isascii():
        raise UsageError("--metrics-prefix must be letters, digits and '_'.", hint="Use vllm.")
    if not all(server.served_model_name):
        raise UsageError("--served-model-name is empty.")
    return ServeSettings(
        served_names=tuple(dict.fromkeys(server.served_model_name)),
        limits=make_limits(limits),
        access=make_access(server),
        sampling=sampling,
        has_model_defaults=not defaults.no_model_defaults,
        tool_parser=server.tool_parser,
        reasoning_parser=server.reasoning_parser,
        is_reasoning_mirrored=server.reasoning_field == "both",
        has_priority_field=server.priority_field,
        is_strict=server.strict_fields,
        trusts_templates=server.trust_request_chat_template,
        parse_special=not server.no_special_in_prompt,
        has_ui=not server.no_ui,
        logs_prompts=server.log_prompts,
        has_warm_workers=True,
        warms_up=not server.enable_fault_injection,  # faults count steps from the first
        slow_client_seconds=server.slow_client_seconds,
        metrics_prefix=server.metrics_prefix,
    )


def _check_address(server: ServerOptions) -> None:
    """Refuse an impossible port, and an address together with a Unix socket."""
    if server.port is not None and not 0 <= server.port <= 65535:
        raise UsageError(f"--port {server.port} is out of range.", hint="Use 0 to 65535.")
    for name, value in (("--host", server.host), ("--port", server.port)):
        if server.uds is not None and value is not None:
            raise UsageError(
                f"{name} {value} cannot be used with --uds {server.uds}.", hint="Give one of them."
            )


def _check_parsers(server: ServerOptions) -> None:
    """Refuse an unknown parser name before the model is loaded."""
    from tiercel.serve.generation.reasoning_parser import select_reasoning_format
    from tiercel.serve.generation.tools.tool_formats import select_tool_format

    select_tool_format("", "", server.tool_parser)
    select_reasoning_format("", server.reasoning_parser)


def make_tracing(server: ServerOptions) -> Tracing | None:
    """Make the sender of traces, if a collector is named.

    Raises:
        UsageError: the message names what is missing or wrong.
    """
    endpoint = server.otlp_traces_endpoint
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(
            f"--otlp-traces-endpoint {endpoint}: not the address of a collector.",
            hint="Write one like http://localhost:4318/v1/traces.",
        )
    try:
        from tiercel.serve.http.tracing import Tracing
    except ImportError as error:
        raise UsageError(
            f"--otlp-traces-endpoint needs a package that is missing: {error.name}.",
            hint="Install it: pip install 'tiercel[otel]'.",
        ) from None
    return Tracing(endpoint)


def make_cluster(server: ServerOptions) -> Cluster | None:
    """The Ray cluster whose hosts run the engines, if one is named; nothing is connected.

    Raises:
        UsageError: it is no address, or Ray is missing.
    """
    if server.nodes is None:
        return None
    from tiercel.ipc.nodes import Cluster

    if find_spec("ray") is None:
        raise UsageError(
            "--nodes needs a package that is missing: ray.",
            hint="Install it on all hosts: pip install 'tiercel[ray]'.",
        )
    try:
        return Cluster.parse(server.nodes)
    except ArgumentError as error:
        raise UsageError(str(error), hint=error.hint) from error


def make_limits(options: LimitOptions) -> Limits:
    """Make the limits of the options.

    Raises:
        UsageError: a value is out of range.
    """
    for name, value in asdict(options).items():
        low = 0 if name in _MAY_BE_ZERO else 1 if isinstance(value, int) else 1e-3
        high = getattr(LIMITS, name) if name in _CEILINGS else _LARGEST
        if value is not None and not low <= value <= high:
            shown = "or more" if high == _LARGEST else f"to {high}"
            raise UsageError(
                f"--{name.replace('_', '-')} {value} is out of range.", hint=f"Use {low} {shown}."
            )
    return replace(LIMITS, **asdict(options))


def make_defaults(options: DefaultOptions) -> SamplingDefaults:
    """The defaults of requests, checked like the values of a request.

    Raises:
        ArgumentError: a value is out of range.
    """
    given = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "max_tokens": options.max_tokens,
    }
    given = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**given)  # type: ignore[arg-type]
    return SamplingDefaults(**given)  # type: ignore[arg-type]


def make_access(server: ServerOptions) -> AccessSettings:
    """Which clients may use the server.

    Raises:
        UsageError: an invalid key or origin, or no key where other machines have access.
        OSError: the key file cannot be read.
    """
    from tiercel.serve.http.access import LOOPBACK_HOSTS, digest, is_loopback
    from tiercel.serve.settings import AccessSettings

    keys = [("--api-key", key) for key in server.api_key]
    if server.api_key_file is not None:
        keys += [(str(server.api_key_file), key) for key in read_keys(server.api_key_file)]
    for where, key in keys:
        if not key or len(key) > MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
            raise UsageError(
                f"{where}: a key is empty or has characters that no header can have.",
                hint=f"Use 1 to {MAX_KEY_CHARS} printable ASCII characters.",
            )
    for origin in server.cors_origin:
        if origin != "*" and ("://" not in origin or origin.endswith("/")):
            raise UsageError(
                f"--cors-origin {origin}: no origin.", hint="Write https://example.org, or *."
            )
    host = _host(server)
    is_local = server.uds is not None or is_loopback(host)
    if keys and server.no_key:
        raise UsageError(
            "--no-key is given, and a key too.",
            hint="Leave out --no-key, or --api-key, --api-key-file and TIERCEL_API_KEY.",
        )
    if not (is_local or keys or server.no_key):
        raise UsageError(
            f"--host {host} allows access from other machines, and there is no key.",
            hint="Set TIERCEL_API_KEY or --api-key-file, or add --no-key to allow all of them.",
        )
    hosts = {name.lower() for name in server.allowed_host}
    if is_local and server.uds is None:
        hosts |= {*LOOPBACK_HOSTS, host.lower()}
    return AccessSettings(
        key_digests=tuple(digest(key) for _, key in keys),
        allowed_hosts=frozenset(hosts) or None,
        cors_origins=server.cors_origin,
        is_metrics_open=is_local if server.metrics_auth is None else server.metrics_auth == "none",
    )


def read_keys(path: Path) -> list[str]:
    """The keys of a file: one per line; empty lines and those that begin with # are skipped.

    Raises:
        UsageError: it contains no key, or is not text.
        OSError: it cannot be read.
    """
    try:
        data = read_bounded(path, MAX_KEY_FILE_BYTES)
        if data is None:
            raise UsageError(f"{path}: the file of keys is over {MAX_KEY_FILE_BYTES} bytes.")
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not valid UTF-8.") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{path}: the file holds no key.", hint="Write one key per line.")
    return keys


def _load_options(
    model: str | None,
    server: ServerOptions,
    engine: EngineOptions,
    batch: BatchOptions,
    defaults: DefaultOptions,
) -> LoadOptions:
    from tiercel.config import LoadOptions

    return LoadOptions(
        model=model,
        device=engine.device,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        numerics=engine.numerics,
        max_model_len=engine.max_model_len,
        max_num_seqs=batch.max_num_seqs,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        spec=engine.spec,
        num_spec_tokens=engine.num_spec_tokens,
        threads=engine.threads,
        tensor_parallel_size=engine.tensor_parallel_size,
        expert_parallel=engine.expert_parallel,
        data_parallel_attention=engine.data_parallel_attention,
        seed=defaults.seed,
        offline=engine.offline or None,
        enable_fault_injection=server.enable_fault_injection,
    )


def make_client(
    options: LoadOptions,
    count: int,
    max_waiting: int,
    settings: SupervisorSettings,
    cluster: Cluster | None,
) -> EngineClient | Replicas:
    """The client of the engine, or of all of them; nothing is started.

    Args:
        options: of each engine.
        count: engines.
        max_waiting: requests that may wait.
        settings: settings of restarts.
        cluster: hosts of the engines; None: this machine.
    """
    import msgspec

    from tiercel.ipc.client import EngineClient
    from tiercel.ipc.replicas import Replicas
    from tiercel.ipc.siblings import Siblings
    from tiercel.ipc.spawn import start_engine

    siblings = Siblings(settings.window_s, are_here=cluster is None)
    here = count if cluster is None else 1  # Ray gives each engine GPUs of its own
    clients = [
        EngineClient(
            msgspec.structs.replace(options, replica=number % here, num_replicas=here),
            max_waiting=max_waiting,
            settings=settings,
            siblings=siblings,
            name=f"engine {number}" if count > 1 else "",
            start=start_engine if cluster is None else partial(cluster.start, count),
        )
        for number in range(count)
    ]
    return clients[0] if count == 1 else Replicas(clients, max_waiting=max_waiting)


@contextlib.contextmanager
def _bound(server: ServerOptions) -> Iterator[tuple[list[socket.socket], str]]:
    """The sockets to listen at and the URL; the file of a Unix socket is removed at the end."""
    from tiercel.serve.server import bind, bind_unix

    if server.uds is not None:
        sockets = [bind_unix(server.uds)]
        url = f"http+unix://{server.uds}"
    else:
        host = _host(server)
        sockets = bind(host, DEFAULT_PORT if server.port is None else server.port)
        host = f"[{host}]" if ":" in host else host
        url = f"http://{host}:{sockets[0].getsockname()[1]}"
    try:
        yield sockets, url
    finally:
        for bound in sockets:
            bound.close()
        if server.uds is not None:
            server.uds.unlink(missing_ok=True)


def _host(server: ServerOptions) -> str:
    return DEFAULT_HOST if server.host is None else server.host


def _print_url(url: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed standard output: serve all the same
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()


def _warn(server: ServerOptions, settings: ServeSettings) -> None:
    from tiercel.serve.http.access import is_loopback

    host = _host(server)
    if server.uds is None and not is_loopback(host) and not settings.access.key_digests:
        _LOG.warning("every machine that reaches %s may use the model: there is no key", host)
    if server.log_prompts:
        _LOG.warning("prompts and answers are written to the log")
