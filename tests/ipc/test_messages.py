"""What crosses the socket arrives as it was sent; what is no message is refused."""

import asyncio
import dataclasses
import logging
import math
import socket
from unittest import mock

import msgspec
import pytest

from tiercel import errors
from tiercel.config import LoadOptions
from tiercel.errors import EngineDeadError, InternalError, InvalidRequestError, TiercelError
from tiercel.grammar.spec import GrammarSpec
from tiercel.ipc.last_words import LinkHandler
from tiercel.ipc.messages import (
    MAX_FROM_ENGINE_BYTES,
    MAX_TO_ENGINE_BYTES,
    Abort,
    Delta,
    Embedding,
    EngineInfo,
    EngineStats,
    Entered,
    ErrorInfo,
    Failed,
    FrameReader,
    Log,
    NewRequest,
    Opened,
    Outputs,
    Progress,
    PromptLogprobs,
    Ready,
    Refused,
    Scores,
    Start,
    Stats,
    Stop,
    decode_from_engine,
    decode_to_engine,
    encode,
    split_prompt_logprobs,
)
from tiercel.ipc.process import EngineLink
from tiercel.ipc.spawn import Connection
from tiercel.loader.stamps import FileStamp
from tiercel.params import SamplingDefaults, SamplingParams, StructuredOutputs
from tiercel.request.request import Request, TokenLogprobs
from tiercel.request.score_task import ScoreRead, ScoreTask

PARAMS = SamplingParams(
    n=3,
    temperature=0.25,
    seed=-(2**63),
    stop=["né", "\n"],
    stop_token_ids=[5],
    logit_bias={3: -100.0, 7: 0.5},
    allowed_token_ids=[1, 2, 3],
    bad_words=["x"],
    logprobs=20,
    prompt_logprobs=0,
    max_tokens=None,
    structured_outputs=StructuredOutputs(json={"type": "object"}),
)
REQUEST = Request(
    request_id="request-7",
    prompt_token_ids=[1, 2**17],
    params=PARAMS,
    seed=-(2**63),
    stream=2,
    stop_ids=frozenset({5, 6}),
    max_tokens=9,
    priority=-3,
    client="10.0.0.1",
    grammar=GrammarSpec('{"grammars": []}'),
    pooling="mean",
    score=ScoreTask(((1, 2), (3,)), ((ScoreRead(1, (5, 6)), ScoreRead(0, (7,))),)),
)
LOGPROBS = (
    TokenLogprobs(3, -0.1, ((3, -0.1), (9, -math.inf))),
    TokenLogprobs(4, -math.inf, ()),
)
INFO = EngineInfo(
    model_name="m.gguf",
    architecture="llama",
    file_format="gguf",
    vocab_size=272,
    hidden_size=64,
    max_position=2048,
    max_model_len=512,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    block_size=64,
    num_blocks=33,
    device="cuda:0",
    dtype="float16",
    seed=2**63 - 1,
    spec="ngram",
    num_spec_tokens=5,
    has_prefix_cache=True,
    gpu_memory_utilization=0.9,
    tokenizer=b"\x00\xff",
    chat_template=None,
    pooling="last",
    load_seconds=1.5,
    sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20),
)
TO_ENGINE = [
    Start(LoadOptions(model="m", max_num_seqs=3, offline=True, enable_fault_injection=True)),
    NewRequest.of(4, REQUEST),
    Abort(2**40),
    Stop(7, "né"),
]
FROM_ENGINE = [
    Progress("Loading", 3, 2**40, 0.25),
    Opened((FileStamp(b"/m\xff.gguf", 2**40, -1, 2**64 - 1),)),
    Ready(INFO),
    Outputs(
        1.25,
        9,
        (Entered(8, 64), Entered(9, 0)),
        (Delta(8, (1, 2), LOGPROBS), Delta(9, (), (), "stop", "né"), Delta(3, (5,), (), "stop", 5)),
    ),
    PromptLogprobs(4, LOGPROBS),
    Embedding(4, b"\0\0\x80\x3f"),
    Scores(4, b"\0\0\x80\x3f\0\0\0\xc0"),
    Refused(4, ErrorInfo.of(InvalidRequestError("no", hint="yes", param="n"))),
    Stats(
        EngineStats(
            num_running=3, kv_cache_usage=0.5, iteration_tokens=(1, 2), accepted_per_pos=(3, 1)
        )
    ),
    Log(30, "tiercel.x", "text"),
    Failed(ErrorInfo("InternalError", "why"), "trace", ("request-7",)),
]


def body_of(frame):
    (body,) = FrameReader(2**20).feed(frame)
    return body


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_to_the_engine_arrive_as_sent(message):
    assert decode_to_engine(body_of(encode(message))) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_from_the_engine_arrive_as_sent(message):
    assert decode_from_engine(body_of(encode(message))) == message


def test_each_message_has_a_number_of_its_own():
    tags = [type(m).__struct_config__.tag for m in TO_ENGINE + FROM_ENGINE]
    assert len(set(tags)) == len(tags)


def test_a_request_arrives_with_all_that_it_asks_for():
    arrived = decode_to_engine(body_of(encode(NewRequest.of(1, REQUEST)))).request()
    # Fields with a default are the engine's own notes, but for what a caller may set.
    asked = [
        field.name
        for field in dataclasses.fields(Request)
        if field.default is field.default_factory is dataclasses.MISSING
    ] + ["priority", "client", "grammar", "pooling", "score", "wants_logits"]
    assert set(asked) | {"key"} == set(NewRequest.__struct_fields__)
    for name in asked:
        assert getattr(arrived, name) == getattr(REQUEST, name), name
    assert type(arrived.params) is SamplingParams
    assert arrived.output_token_ids == []


def test_frames_may_come_in_any_pieces():
    frames = b"".join(encode(message) for message in FROM_ENGINE)
    for size in (1, 2, 3, 7, 64, len(frames)):
        reader = FrameReader(2**20)
        bodies = [
            bytes(body)
            for start in range(0, len(frames), size)
            for body in reader.feed(frames[start : start + size])
        ]
        assert [decode_from_engine(body) for body in bodies] == FROM_ENGINE


def test_the_length_is_little_endian():
    frame = encode(Log(20, "x", "y" * 300))
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4 > 255


@pytest.mark.reliability
def test_a_frame_over_the_limit_is_refused_before_it_is_kept():
    reader = FrameReader(100)
    with pytest.raises(EngineDeadError, match="101 bytes"):
        list(reader.feed((101).to_bytes(4, "little")))
    assert [bytes(b) for b in FrameReader(100).feed((100).to_bytes(4, "little") + b"x" * 100)]


@pytest.mark.reliability
@pytest.mark.parametrize("limit", [0, 1, 5, 255, 256, 70_000])
def test_frames_up_to_the_limit_are_read_and_none_beyond(limit):
    """After sound frames too, which are handed out first."""
    sizes = sorted({0, limit // 2, max(0, limit - 1), limit})
    bodies = [bytes([size % 251]) * size for size in sizes]
    sound = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    for size in (limit + 1, limit + 256, 2**32 - 1):
        reader, got = FrameReader(limit), []
        with pytest.raises(EngineDeadError, match=f"a message of {size} bytes is over the limit"):
            got.extend(map(bytes, reader.feed(sound + size.to_bytes(4, "little"))))
        assert got == bodies


@pytest.mark.reliability
def test_each_side_takes_what_the_other_may_send():
    """A prompt of a million ids goes to the engine, a tokenizer file of 256 MiB comes from it."""
    assert MAX_TO_ENGINE_BYTES == 64 * 2**20 > 5_000_000
    assert MAX_FROM_ENGINE_BYTES == 320 * 2**20 > 256 * 2**20
    for limit in (MAX_TO_ENGINE_BYTES, MAX_TO_ENGINE_BYTES + 1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(limit.to_bytes(4, "little"))
            theirs.shutdown(socket.SHUT_WR)
            messages = EngineLink(ours).messages()
            if limit > MAX_TO_ENGINE_BYTES:
                with pytest.raises(EngineDeadError, match="over the limit"):
                    next(messages)
            else:
                assert list(messages) == []

    async def main():
        for limit in (MAX_FROM_ENGINE_BYTES, MAX_FROM_ENGINE_BYTES + 1):
            transport, heard = mock.Mock(), []
            connection = Connection(heard.append)
            connection.connection_made(transport)
            connection.data_received(encode(FROM_ENGINE[0]) + limit.to_bytes(4, "little"))
            assert heard == FROM_ENGINE[:1]
            assert transport.abort.called == (limit > MAX_FROM_ENGINE_BYTES)

    asyncio.run(main())


@pytest.mark.reliability
@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x90", b"\x91\x63", encode(TO_ENGINE[1])[4:-1], b"\x93\x02\x01\x01"]
)
def test_what_is_no_message_is_refused(body):
    with pytest.raises(EngineDeadError, match="cannot be read"):
        decode_to_engine(body)


@pytest.mark.reliability
def test_the_engine_takes_no_message_of_its_own():
    with pytest.raises(EngineDeadError):
        decode_to_engine(encode(FROM_ENGINE[0])[4:])


@pytest.mark.reliability
def test_wrong_parameters_are_refused_at_the_socket():
    message = encode(TO_ENGINE[1])[4:]
    place = message.index(b"temperature") + len("temperature")
    broken = bytearray(message)
    broken[place + 1 : place + 3] = b"\x7f\xf0"  # 0.25 becomes infinity
    with pytest.raises(EngineDeadError, match="temperature"):
        decode_to_engine(broken)


ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TiercelError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_keep_their_class_and_words(kind):
    error = kind("what", hint="then")
    if issubclass(kind, InvalidRequestError):
        error.param = "prompt"
        error.code = "schema_too_complex"
    made = decode_from_engine(body_of(encode(Refused(1, ErrorInfo.of(error))))).error.error()
    assert type(made) is kind
    assert (str(made), made.hint, made.code) == ("what", "then", error.code)
    assert getattr(made, "param", None) == getattr(error, "param", None)


def test_an_unknown_error_is_internal():
    for kind in ("ValueError", "annotations", "SystemExit"):
        assert type(ErrorInfo(kind, "x").error()) is InternalError


def test_text_that_is_no_unicode_is_escaped():
    info = ErrorInfo.of(TiercelError("bad \udcff name", hint="\ud800"))
    assert decode_from_engine(body_of(encode(Refused(1, info)))).error.message == "bad \\udcff name"


def test_long_prompt_logprobs_travel_in_parts():
    entries = [TokenLogprobs(i, -1.0, ()) for i in range(2500)]
    parts = list(split_prompt_logprobs(3, entries))
    assert [len(part.entries) for part in parts] == [1024, 1024, 452]
    assert [entry for part in parts for entry in part.entries] == entries
    assert list(split_prompt_logprobs(3, [])) == []


def test_a_log_line_of_the_engine_is_its_text_alone():
    """The parent's log writes level and name."""
    sent = []
    root = logging.getLogger()
    before = root.handlers[:]
    try:
        root.handlers = []
        logging.basicConfig(handlers=[LinkHandler(sent.append)])
        logging.getLogger("some.name").warning("%s went wrong", "it")
    finally:
        root.handlers = before
    assert sent == [Log(logging.WARNING, "some.name", "it went wrong")]


def test_a_model_that_packs_no_items_says_so():
    most = INFO.max_num_batched_tokens - INFO.max_num_seqs
    assert INFO.longest_packed_item == most > 0
    info = msgspec.structs.replace(INFO, packs_items=False)
    assert info.longest_packed_item == 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=type(info)) == info
