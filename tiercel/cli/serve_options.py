"""The options of `tiercel serve`. Those that few people need are documented in docs/server.md only.

A bound of a sampling parameter (the first group of `Limits`) may be lowered here, not raised: the
parameters check it wherever they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from tiercel.cli.options import MODEL_GROUP
from tiercel.params import LIMITS

SERVER_GROUP = Group("Server", sort_key=1)
DEFAULTS_GROUP = Group("Defaults of requests", sort_key=3)
_HIDDEN = Parameter(show=False, negative="")


@Parameter(name="*", group=SERVER_GROUP)
@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, to whom, and what it says."""

    host: Annotated[str, Parameter(help="Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, Parameter(help="0 takes a free one and prints it.")] = 8000
    uds: Annotated[
        Path | None, Parameter(help="Unix socket instead of a port.", show_default=False)
    ] = None
    served_model_name: Annotated[
        tuple[str, ...], Parameter(negative="", help="Name that requests use; repeatable.")
    ] = ()
    api_key: Annotated[
        tuple[str, ...], Parameter(negative="", help="Key to ask for; repeatable.")
    ] = ()
    api_key_file: Annotated[
        Path | None, Parameter(help="File with a key per line.", show_default=False)
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Origin of pages that may ask; repeatable."),
    ] = ()
    allowed_host: Annotated[tuple[str, ...], _HIDDEN] = ()
    no_ui: Annotated[bool, Parameter(negative="", help="Serve no web page.")] = False
    drain_seconds: Annotated[float, Parameter(help="For running requests at the end.")] = 30.0
    hang_seconds: Annotated[
        float, Parameter(help="Restart an engine without progress; 1 or more.")
    ] = 60.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Parameter(help="debug, info, warning or error."),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Parameter(help="text or json.")] = "text"
    log_prompts: Annotated[bool, _HIDDEN] = False
    otlp_traces_endpoint: Annotated[str | None, _HIDDEN] = None
    metrics_auth: Annotated[Literal["none", "key"] | None, _HIDDEN] = None
    metrics_prefix: Annotated[str, _HIDDEN] = "tiercel"
    tool_parser: Annotated[str | None, _HIDDEN] = None
    reasoning_parser: Annotated[str | None, _HIDDEN] = None
    reasoning_field: Annotated[Literal["reasoning_content", "both"], _HIDDEN] = "reasoning_content"
    priority_field: Annotated[bool, _HIDDEN] = False
    strict_fields: Annotated[bool, _HIDDEN] = False
    trust_request_chat_template: Annotated[bool, _HIDDEN] = False
    no_special_in_prompt: Annotated[bool, _HIDDEN] = False
    slow_client_seconds: Annotated[float, _HIDDEN] = 60.0
    enable_fault_injection: Annotated[bool, _HIDDEN] = False


@Parameter(name="*", group=MODEL_GROUP)
@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What runs at once."""

    max_num_seqs: Annotated[
        int | None, Parameter(validator=Number(gte=1), help="Requests at once.", show_default=False)
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Parameter(validator=Number(gte=1), help="New tokens of one step.", show_default=False),
    ] = None


@Parameter(name="*", group=DEFAULTS_GROUP)
@dataclass(frozen=True, slots=True)
class DefaultOptions:
    """What a request gets where it says nothing."""

    temperature: Annotated[float | None, Parameter(help="Else 1.", show_default=False)] = None
    top_p: Annotated[float | None, _HIDDEN] = None
    top_k: Annotated[int | None, _HIDDEN] = None
    min_p: Annotated[float | None, _HIDDEN] = None
    repeat_penalty: Annotated[float | None, _HIDDEN] = None
    max_tokens: Annotated[
        int | None, Parameter(help="Else what is left; completions 16.", show_default=False)
    ] = None
    seed: Annotated[int, Parameter(group=MODEL_GROUP, help="Of requests without one.")] = 0


@Parameter(name="*", group=SERVER_GROUP)
@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Fields of `Limits`, by the same names."""

    max_n: Annotated[int, _HIDDEN] = LIMITS.max_n
    max_stop_strings: Annotated[int, _HIDDEN] = LIMITS.max_stop_strings
    max_stop_chars: Annotated[int, _HIDDEN] = LIMITS.max_stop_chars
    max_logit_bias: Annotated[int, _HIDDEN] = LIMITS.max_logit_bias
    max_logprobs: Annotated[int, _HIDDEN] = LIMITS.max_logprobs
    max_score_items: Annotated[int, _HIDDEN] = LIMITS.max_score_items
    max_score_tokens: Annotated[int, _HIDDEN] = LIMITS.max_score_tokens
    max_body_bytes: Annotated[int, _HIDDEN] = LIMITS.max_body_bytes
    max_json_depth: Annotated[int, _HIDDEN] = LIMITS.max_json_depth
    max_json_members: Annotated[int, _HIDDEN] = LIMITS.max_json_members
    max_prompts: Annotated[int, _HIDDEN] = LIMITS.max_prompts
    max_answers: Annotated[int, _HIDDEN] = LIMITS.max_answers
    max_messages: Annotated[int, _HIDDEN] = LIMITS.max_messages
    max_tools: Annotated[int, _HIDDEN] = LIMITS.max_tools
    max_tool_name_chars: Annotated[int, _HIDDEN] = LIMITS.max_tool_name_chars
    max_schema_bytes: Annotated[int, _HIDDEN] = LIMITS.max_schema_bytes
    max_schema_depth: Annotated[int, _HIDDEN] = LIMITS.max_schema_depth
    max_schema_nodes: Annotated[int, _HIDDEN] = LIMITS.max_schema_nodes
    max_regex_bytes: Annotated[int, _HIDDEN] = LIMITS.max_regex_bytes
    max_grammar_bytes: Annotated[int, _HIDDEN] = LIMITS.max_grammar_bytes
    max_grammar_seconds: Annotated[float, _HIDDEN] = LIMITS.max_grammar_seconds
    max_waiting_requests: Annotated[int, Parameter(help="Beyond them 429.")] = (
        LIMITS.max_waiting_requests
    )
    max_queue_seconds: Annotated[float, _HIDDEN] = LIMITS.max_queue_seconds
    max_request_seconds: Annotated[float | None, _HIDDEN] = LIMITS.max_request_seconds
    max_connections: Annotated[int, _HIDDEN] = LIMITS.max_connections
    max_header_bytes: Annotated[int, _HIDDEN] = LIMITS.max_header_bytes
    max_headers: Annotated[int, _HIDDEN] = LIMITS.max_headers
    max_head_seconds: Annotated[float, _HIDDEN] = LIMITS.max_head_seconds
    max_body_gap_seconds: Annotated[float, _HIDDEN] = LIMITS.max_body_gap_seconds
    max_body_seconds: Annotated[float, _HIDDEN] = LIMITS.max_body_seconds
