"""The options of `tiercel serve`, in the groups of its help.

A bound of a sampling parameter (the first group of `Limits`) may be lowered here, not raised: the
parameters check it themselves whenever they are created.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from tiercel.cli.options import MODEL_GROUP
from tiercel.config import MAX_REPLICAS
from tiercel.params import LIMITS

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
SERVER_GROUP = Group("Server", sort_key=1)
DEFAULTS_GROUP = Group("Defaults of requests", sort_key=3)
FORMS_GROUP = Group("Requests and answers", sort_key=3.1)
LOG_GROUP = Group("Log, metrics, traces", sort_key=3.2)
LIMITS_GROUP = Group("Limits", sort_key=3.3)


@Parameter(name="*", group=SERVER_GROUP)
@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens, which clients it admits, and how it presents itself."""

    # None stands for the default, so that an explicit value together with --uds is detected.
    host: Annotated[
        str | None, Parameter(help=f"Address to listen at [{DEFAULT_HOST}].", show_default=False)
    ] = None
    port: Annotated[
        int | None,
        Parameter(help=f"0 chooses a free one and prints it [{DEFAULT_PORT}].", show_default=False),
    ] = None
    uds: Annotated[
        Path | None, Parameter(help="Unix socket instead of a port.", show_default=False)
    ] = None
    served_model_name: Annotated[
        tuple[str, ...], Parameter(negative="", help="Name that requests use; repeatable.")
    ] = ()
    api_key: Annotated[
        tuple[str, ...], Parameter(negative="", help="Key that requests need; repeatable.")
    ] = ()
    api_key_file: Annotated[
        Path | None, Parameter(help="File with a key per line.", show_default=False)
    ] = None
    no_key: Annotated[
        bool, Parameter(negative="", help="Listen to other machines without a key.")
    ] = False
    cors_origin: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="Origin of allowed web pages; repeatable."),
    ] = ()
    allowed_host: Annotated[
        tuple[str, ...], Parameter(negative="", help="Further name in Host headers; repeatable.")
    ] = ()
    replicas: Annotated[
        int,
        Parameter(
            group=MODEL_GROUP,
            validator=Number(gte=1, lte=MAX_REPLICAS),
            help="Engines, each with GPUs of its own.",
        ),
    ] = 1
    nodes: Annotated[
        str | None,
        Parameter(
            group=MODEL_GROUP,
            help="Address of a Ray cluster whose hosts run the engines.",
            show_default=False,
        ),
    ] = None
    no_ui: Annotated[bool, Parameter(negative="", help="Serve no web page.")] = False
    drain_seconds: Annotated[float, Parameter(help="For running requests at shutdown.")] = 30.0
    hang_seconds: Annotated[
        float, Parameter(help="Restart an engine without progress; 1 or more.")
    ] = 60.0
    slow_client_seconds: Annotated[
        float, Parameter(help="Close a stream that is not read for so long.")
    ] = 60.0
    enable_fault_injection: Annotated[
        bool, Parameter(negative="", help="Let TIERCEL_FAULTS break the engine, for tests.")
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Parameter(group=LOG_GROUP, help="debug, info, warning or error."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Parameter(group=LOG_GROUP, help="text or json.")
    ] = "text"
    log_prompts: Annotated[
        bool, Parameter(negative="", group=LOG_GROUP, help="Write prompts and answers to the log.")
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None, Parameter(group=LOG_GROUP, help="Collector that gets a span per request.")
    ] = None
    metrics_auth: Annotated[
        Literal["none", "key"] | None,
        Parameter(group=LOG_GROUP, help="none or key: access to /metrics [none on loopback]."),
    ] = None
    metrics_prefix: Annotated[str, Parameter(group=LOG_GROUP, help="Prefix of metric names.")] = (
        "tiercel"
    )
    tool_parser: Annotated[
        str | None, Parameter(group=FORMS_GROUP, help="Form of tool calls, or none [the model's].")
    ] = None
    reasoning_parser: Annotated[
        str | None, Parameter(group=FORMS_GROUP, help="Form of reasoning, or none [the model's].")
    ] = None
    reasoning_field: Annotated[
        Literal["reasoning_content", "both"],
        Parameter(group=FORMS_GROUP, help="both: also in the field reasoning."),
    ] = "reasoning_content"
    priority_field: Annotated[
        bool, Parameter(negative="", group=FORMS_GROUP, help="Requests may set priority.")
    ] = False
    strict_fields: Annotated[
        bool, Parameter(negative="", group=FORMS_GROUP, help="Refuse unknown fields.")
    ] = False
    trust_request_chat_template: Annotated[
        bool, Parameter(negative="", group=FORMS_GROUP, help="Requests may bring a chat_template.")
    ] = False
    no_special_in_prompt: Annotated[
        bool,
        Parameter(negative="", group=FORMS_GROUP, help="Treat <|...|> in prompts as plain text."),
    ] = False


@Parameter(name="*", group=MODEL_GROUP)
@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Limits of concurrent work."""

    max_num_seqs: Annotated[
        int | None,
        Parameter(validator=Number(gte=1), help="Concurrent requests.", show_default=False),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Parameter(validator=Number(gte=1), help="New tokens of one step.", show_default=False),
    ] = None


@Parameter(name="*", group=DEFAULTS_GROUP)
@dataclass(frozen=True, slots=True)
class DefaultOptions:
    """Defaults of requests for fields that they leave out."""

    temperature: Annotated[
        float | None, Parameter(help="Else the model's, else 1.", show_default=False)
    ] = None
    top_p: Annotated[float | None, Parameter(help="Else the model's, else 1 (off).")] = None
    top_k: Annotated[int | None, Parameter(help="Else the model's, else 0 (off).")] = None
    min_p: Annotated[float | None, Parameter(help="Else the model's, else 0 (off).")] = None
    repeat_penalty: Annotated[float | None, Parameter(help="Else the model's, else 1 (off).")] = (
        None
    )
    max_tokens: Annotated[
        int | None,
        Parameter(help="Else the rest of the context; completions 16.", show_default=False),
    ] = None
    no_model_defaults: Annotated[
        bool, Parameter(negative="", help="Ignore the defaults in the model's file.")
    ] = False
    seed: Annotated[int, Parameter(group=MODEL_GROUP, help="Seed of requests without one.")] = 0


@Parameter(name="*", group=LIMITS_GROUP)
@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Fields of `Limits` under the same names."""

    max_n: Annotated[int, Parameter(help="Answers to a prompt.")] = LIMITS.max_n
    max_stop_strings: Annotated[int, Parameter(help="Stop strings of a request.")] = (
        LIMITS.max_stop_strings
    )
    max_stop_chars: Annotated[int, Parameter(help="Characters of a stop string.")] = (
        LIMITS.max_stop_chars
    )
    max_logit_bias: Annotated[int, Parameter(help="Entries of logit_bias.")] = LIMITS.max_logit_bias
    max_logprobs: Annotated[int, Parameter(help="Likely tokens at each position.")] = (
        LIMITS.max_logprobs
    )
    max_score_items: Annotated[int, Parameter(help="Items of a list to score.")] = (
        LIMITS.max_score_items
    )
    max_score_tokens: Annotated[int, Parameter(help="Tokens of query and items.")] = (
        LIMITS.max_score_tokens
    )
    max_body_bytes: Annotated[int, Parameter(help="Bytes of a request.")] = LIMITS.max_body_bytes
    max_json_depth: Annotated[int, Parameter(help="Nesting of a body.")] = LIMITS.max_json_depth
    max_json_members: Annotated[int, Parameter(help="Values in a body.")] = LIMITS.max_json_members
    max_prompts: Annotated[int, Parameter(help="Prompts of a request.")] = LIMITS.max_prompts
    max_answers: Annotated[int, Parameter(help="Prompts times answers.")] = LIMITS.max_answers
    max_messages: Annotated[int, Parameter(help="Messages of a chat.")] = LIMITS.max_messages
    max_tools: Annotated[int, Parameter(help="Tools of a request.")] = LIMITS.max_tools
    max_tool_name_chars: Annotated[int, Parameter(help="Characters of a tool's name.")] = (
        LIMITS.max_tool_name_chars
    )
    max_schema_bytes: Annotated[int, Parameter(help="Of a JSON schema.")] = LIMITS.max_schema_bytes
    max_schema_depth: Annotated[int, Parameter(help="Nesting of a JSON schema.")] = (
        LIMITS.max_schema_depth
    )
    max_schema_nodes: Annotated[int, Parameter(help="Parts of a JSON schema.")] = (
        LIMITS.max_schema_nodes
    )
    max_regex_bytes: Annotated[int, Parameter(help="Of a regular expression.")] = (
        LIMITS.max_regex_bytes
    )
    max_grammar_bytes: Annotated[int, Parameter(help="Of a grammar.")] = LIMITS.max_grammar_bytes
    max_grammar_seconds: Annotated[float, Parameter(help="For compiling a schema or grammar.")] = (
        LIMITS.max_grammar_seconds
    )
    max_waiting_requests: Annotated[int, Parameter(help="Waiting requests; beyond: 429.")] = (
        LIMITS.max_waiting_requests
    )
    max_queue_seconds: Annotated[float, Parameter(help="Wait in the queue.")] = (
        LIMITS.max_queue_seconds
    )
    max_request_seconds: Annotated[float | None, Parameter(help="For a whole request.")] = (
        LIMITS.max_request_seconds
    )
    max_connections: Annotated[int, Parameter(help="At once.")] = LIMITS.max_connections
    max_header_bytes: Annotated[int, Parameter(help="Of all headers.")] = LIMITS.max_header_bytes
    max_headers: Annotated[int, Parameter(help="Headers of a request.")] = LIMITS.max_headers
    max_head_seconds: Annotated[float, Parameter(help="For the headers to arrive.")] = (
        LIMITS.max_head_seconds
    )
    max_body_gap_seconds: Annotated[float, Parameter(help="Between two parts of a body.")] = (
        LIMITS.max_body_gap_seconds
    )
    max_body_seconds: Annotated[float, Parameter(help="For the whole body to arrive.")] = (
        LIMITS.max_body_seconds
    )
