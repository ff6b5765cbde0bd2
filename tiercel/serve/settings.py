"""Settings of the server, which do not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercel.params import LIMITS, Limits, SamplingDefaults


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Access control.

    Attributes:
        key_digests: SHA-256 of every accepted key; empty: no key is needed.
        allowed_hosts: names that `Host` may hold, lower case without port; None: any name.
        cors_origins: origins that browsers may send from; ``*`` is any origin.
        is_metrics_open: whether `/metrics` needs no key.
    """

    key_digests: tuple[bytes, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    cors_origins: tuple[str, ...] = ()
    is_metrics_open: bool = True


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of the server, from its options.

    Attributes:
        served_names: names that `model` may hold, the first of which responses carry; empty: the
            model's own.
        limits: limits of every route.
        access: keys, hosts and origins.
        sampling: sampling defaults of requests; they override those of the model's file.
        has_model_defaults: whether the model's file may set sampling defaults.
        tool_parser: name of a tool-call format, ``none``, or None to choose by the model.
        reasoning_parser: name of a reasoning format, ``none``, or None to choose by the model.
        is_reasoning_mirrored: whether `reasoning` repeats `reasoning_content`.
        has_priority_field: whether requests may set `priority`.
        is_strict: whether unknown fields are refused instead of counted.
        trusts_templates: whether requests may contain a `chat_template`.
        parse_special: whether the text of a control token in a raw prompt becomes its id.
        has_ui: whether the web page is served.
        logs_prompts: whether prompts and completions go to the log.
        has_warm_workers: whether the processes that check grammars start before the server is
            ready, instead of with the first grammar.
        warms_up: whether warm-up requests run before the server is ready (`lifecycle/warmup.py`).
        slow_client_seconds: timeout of a client that reads nothing.
        metrics_prefix: prefix of metric names.
        url: URL of the server, for messages; "" in tests.
    """

    served_names: tuple[str, ...] = ()
    limits: Limits = LIMITS
    access: AccessSettings = AccessSettings()
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    has_model_defaults: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    is_reasoning_mirrored: bool = False
    has_priority_field: bool = False
    is_strict: bool = False
    trusts_templates: bool = False
    parse_special: bool = True
    has_ui: bool = True
    logs_prompts: bool = False
    has_warm_workers: bool = False
    warms_up: bool = False
    slow_client_seconds: float = 60.0
    metrics_prefix: str = "tiercel"
    url: str = ""
