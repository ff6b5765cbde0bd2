"""Settings of the server, which do not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercel.params import LIMITS, Limits, SamplingDefaults


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may ask.

    Attributes:
        key_digests: SHA-256 of every accepted key; empty: no key is asked for.
        allowed_hosts: names that `Host` may hold, lower case without port; None: any.
        cors_origins: origins that browsers may send from; ``*`` is any.
        is_metrics_open: whether `/metrics` needs no key.
    """

    key_digests: tuple[bytes, ...] = ()
    allowed_hosts: frozenset[str] | None = None
    cors_origins: tuple[str, ...] = ()
    is_metrics_open: bool = True


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How the server was asked to be.

    Attributes:
        served_names: names that `model` may hold; answers carry the first. Empty: the model's own.
        limits: bounds of every route.
        access: keys, hosts, origins.
        sampling: defaults of requests; they win over those of the model's file.
        has_model_defaults: the model's file may set defaults of requests.
        tool_parser: name, ``none``, or None to choose by the model.
        reasoning_parser: the same.
        is_reasoning_mirrored: reasoning goes to `reasoning` besides `reasoning_content`.
        has_priority_field: requests may set `priority`.
        is_strict: unknown fields are refused instead of counted.
        trusts_templates: requests may bring a `chat_template`.
        parse_special: the text of a control token in a raw prompt becomes its id.
        has_ui: the web page is served.
        logs_prompts: prompts and answers go to the log.
        has_warm_workers: the processes that check grammars start before the server is ready; else
            with the first grammar.
        warms_up: requests pass through the server before it is ready (`rehearsal.py`).
        slow_client_seconds: a reader that takes nothing for so long is given up.
        metrics_prefix: first part of every metric's name.
        url: where the server is reached, for messages; "" in tests.
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
