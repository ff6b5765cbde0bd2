"""The messages between the HTTP process and the engine process, and their form on the socket.

Free of PyTorch. A frame is ``u32 little-endian length, MessagePack of that length``; a message is a
MessagePack array whose first item is its number (`tag`), then its fields in the order given here:

    to the engine     1 Start   2 NewRequest   3 Abort   4 Stop   5 Forget   6 Join   7 Place
    from the engine  16 Progress  17 Ready  18 Outputs  19 PromptLogprobs  20 Refused  21 Stats
                     22 Log  23 Failed  24 Embedding  25 Scores  26 Forgotten
                     27 PromptProgress  28 Advanced  29 Opened  30 ItemTokens

The first message comes once: `Start`, `Join` in a process that becomes a rank of several
(`rank_messages.py`), or `Place` in one that finds hosts for an engine (`placer.py`). A request is
named by its key, a number that its client counts up from 1; its id travels for the log alone.
Closing the socket ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tiercel import errors
from tiercel.config import LoadOptions
from tiercel.errors import EngineDeadError, TiercelError
from tiercel.grammar.spec import GrammarSpec
from tiercel.loader.stamps import FileStamp
from tiercel.params import SamplingDefaults, SamplingParams
from tiercel.request.request import Request, TokenLogprobs
from tiercel.request.score_task import ScoreTask

LENGTH_BYTES = 4
MAX_TO_ENGINE_BYTES = 64 * 2**20  # a prompt of a million ids takes 5 MB
MAX_FROM_ENGINE_BYTES = 320 * 2**20  # a tokenizer file holds up to 256 MiB
PROMPT_LOGPROBS_PER_MESSAGE = 1024  # 300 KB with 20 alternatives each: decoded in 5 ms


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the model that the HTTP process gets.

    Attributes:
        model_name: file or folder name, without its path.
        architecture: as the file names it.
        file_format: ``gguf`` or ``hf``.
        vocab_size: rows of the output matrix.
        hidden_size: elements of a hidden state.
        max_position: context length that the model itself allows.
        max_model_len: context length that the engine was given.
        max_num_seqs: requests that run together.
        max_num_batched_tokens: new tokens of one step.
        block_size: tokens of a cache block.
        num_blocks: blocks of the cache, the null block included.
        device: ``cpu`` or ``cuda:i``.
        dtype: dtype of activations and cache.
        seed: seed of requests without one.
        spec: method of making drafts, or ``off``.
        num_spec_tokens: drafts of a request and step at most.
        has_prefix_cache: whether computed blocks are kept.
        gpu_memory_utilization: share of the GPU's memory, as requested.
        tokenizer: bytes for `unpack_tokenizer`.
        chat_template: Jinja source, or None.
        pooling: ``mean`` or ``last`` if the file declares an embedding model, else None.
        sampling_defaults: sampling defaults of the model's file.
        load_seconds: seconds of loading weights, without the import of PyTorch.
        packs_items: whether the model computes items to score after one prompt in one step.
        tensor_parallel_size: processes that compute together, one GPU each.
    """

    model_name: str
    architecture: str
    file_format: str
    vocab_size: int
    hidden_size: int
    max_position: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    device: str
    dtype: str
    seed: int
    spec: str
    num_spec_tokens: int
    has_prefix_cache: bool
    gpu_memory_utilization: float
    tokenizer: bytes
    chat_template: str | None
    pooling: str | None
    load_seconds: float
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    packs_items: bool = True
    tensor_parallel_size: int = 1

    @property
    def longest_packed_item(self) -> int:
        """Tokens of an item that a step is sure to hold; 0: the model packs none."""
        return self.max_num_batched_tokens - self.max_num_seqs if self.packs_items else 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the cache holds."""
        return (self.num_blocks - 1) * self.block_size


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters of one engine process; totals unless said otherwise.

    Attributes:
        num_running: requests with an engine row now.
        num_waiting: requests without one now.
        kv_cache_usage: share of the cache's blocks that requests hold now, 0 to 1.
        num_preemptions: requests that gave their blocks back and waited again.
        prefix_queries: prompt tokens that were looked up in the prefix cache.
        prefix_hits: prompt tokens that were found in the prefix cache.
        num_steps: steps of the loop.
        step_seconds: time of all steps.
        num_nonfinite: requests that ended because their logits were NaN or infinite.
        num_prompt_tokens: of prompts that were computed to their end.
        num_generation_tokens: tokens generated.
        num_drafts: steps of requests that verified drafts.
        num_draft_tokens: drafts in these steps.
        accepted_per_pos: number of accepted first, second, ... drafts.
        iteration_tokens: tokens of each step since the message before: those generated, and the
            whole prompt where it was finished.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    num_nonfinite: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    iteration_tokens: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted drafts."""
        return sum(self.accepted_per_pos)


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A `TiercelError`: the name of its class and what it says; `code` None is the class's own."""

    kind: str
    message: str
    hint: str = ""
    param: str | None = None
    code: str | None = None

    @staticmethod
    def of(error: TiercelError) -> ErrorInfo:
        """Describe an error."""
        return ErrorInfo(
            kind=type(error).__name__,
            message=plain_text(str(error)),
            hint=plain_text(error.hint),
            param=getattr(error, "param", None),
            code=None if error.code == type(error).code else error.code,
        )

    def error(self) -> TiercelError:
        """Make the error again; a class that is unknown here becomes `InternalError`."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, TiercelError)):
            kind = errors.InternalError
        error = kind(self.message, hint=self.hint)
        if isinstance(error, errors.InvalidRequestError):
            error.param = self.param
        if self.code is not None:
            error.code = self.code
        return error


class Start(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Load a model.

    Attributes:
        options: options of the load.
        token: the secret with which ranks of other hosts knock; b"" where there are none.
    """

    options: LoadOptions
    token: bytes = b""


class Join(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Load a model as another rank of it than 0.

    Attributes:
        options: those of `settled`.
        rank: of the process, from 1.
        address: where the ranks meet; see `parallel.connect`.
    """

    options: LoadOptions
    rank: int
    address: str


class Place(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Find hosts of a Ray cluster for an engine, and start it there.

    Attributes:
        cluster: ``host:port`` of the cluster's head.
        num_ranks: processes of the engine.
        num_engines: engines of the server, for the error when they are too many.
        resource: what each rank needs one of: ``GPU`` or ``CPU``.
        host: of the server, where the engine knocks.
        port: the same.
        token: the secret by which the server knows the engine, and ranks know each other.
        seconds: after which there are no hosts.
        shared: variables of the server's environment that the engine must have.
    """

    cluster: str
    num_ranks: int
    num_engines: int
    resource: str
    host: str
    port: int
    token: bytes
    seconds: float
    shared: dict[str, str]


class NewRequest(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request; the fields as in `Request`."""

    key: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stream: int
    stop_ids: frozenset[int]
    max_tokens: int
    priority: int
    grammar: GrammarSpec | None
    pooling: str | None
    score: ScoreTask | None
    client: str
    wants_logits: bool = False

    @staticmethod
    def of(key: int, request: Request) -> NewRequest:
        """Describe a request."""
        return NewRequest(
            key,
            request.request_id,
            request.prompt_token_ids,
            request.params,
            request.seed,
            request.stream,
            request.stop_ids,
            request.max_tokens,
            request.priority,
            request.grammar,
            request.pooling,
            request.score,
            request.client,
            request.wants_logits,
        )

    def request(self) -> Request:
        """Make the request that the engine works on."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            seed=self.seed,
            stream=self.stream,
            stop_ids=self.stop_ids,
            max_tokens=self.max_tokens,
            priority=self.priority,
            grammar=self.grammar,
            pooling=self.pooling,
            score=self.score,
            client=self.client,
            wants_logits=self.wants_logits,
        )


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """End a request in any state; nothing happens if it has ended."""

    key: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """End a request whose text reached a stop string."""

    key: int
    stop_string: str


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Count from zero again, and keep no prefix; answered by `Forgotten`."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """How far a stage of fetching or loading has come, in a unit of its own.

    Attributes:
        what: name of the stage.
        done: amount of the stage that is done.
        total: whole amount of the stage; 0 where unknown.
        share: share of the whole start that is done, 0 to 1; it never falls
            (`start_progress.py`).
    """

    what: str
    done: int
    total: int
    share: float


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=29):
    """The model's files were found and checked; loading begins."""

    files: tuple[FileStamp, ...]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """The model is loaded."""

    info: EngineInfo


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """A request got its engine row; `num_cached` tokens of its prompt were in the prefix cache."""

    key: int
    num_cached: int


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """The result of a step for one request; it has ended if there is a reason."""

    key: int
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Outputs(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """The results of one step.

    Attributes:
        started_s: `perf_counter` when the step began; one clock for all processes of a machine.
        last_key: the newest request that the engine knew when the step began.
        entered: requests whose first step this was.
        deltas: in the order of the step.
    """

    started_s: float
    last_key: int
    entered: tuple[Entered, ...]
    deltas: tuple[Delta, ...]


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """The answer to `Forget`: later `Stats` count from zero."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Some of the log-probabilities of a prompt, in order; all come before its first delta."""

    key: int
    entries: tuple[TokenLogprobs, ...]


class PromptProgress(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """How many tokens of a prompt are computed, after a step that did not finish the prompt."""

    key: int
    num_computed: int


class Embedding(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """The vector of a request with `pooling`, before its only delta; see `Request.embedding`.

    Attributes:
        key: the request.
        embedding: float32, of `value_bytes`.
    """

    key: int
    embedding: bytes


class Scores(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """The values of a request with `score`, before its only delta; see `Request.scores`.

    Attributes:
        key: the request.
        scores: float32, of `value_bytes`.
    """

    key: int
    scores: bytes


class ItemTokens(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """The tokens of a request with `score.sample_keys`, before its only delta."""

    key: int
    entries: tuple[TokenLogprobs, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """A request that the engine does not take."""

    key: int
    error: ErrorInfo


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Counters, at most every 100 ms while there is work, and when it is done."""

    stats: EngineStats


class Advanced(msgspec.Struct, frozen=True, array_like=True, tag=28):
    """A step has advanced; see `Pulse`.

    longest_s: the longest time from one advance to the next since the message before.
    """

    longest_s: float


class Log(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """A line for the log of the server; `level` as in `logging`."""

    level: int
    logger: str
    text: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """The engine ends.

    Attributes:
        error: why.
        detail: the traceback, for the log; "" where the error says it all.
        suspects: ids of the requests of the step that failed.
    """

    error: ErrorInfo
    detail: str = ""
    suspects: tuple[str, ...] = ()


ToEngine = Start | Join | Place | NewRequest | Abort | Stop | Forget
FromEngine = (
    Progress
    | Opened
    | Ready
    | Outputs
    | PromptLogprobs
    | PromptProgress
    | Embedding
    | Scores
    | ItemTokens
    | Refused
    | Stats
    | Advanced
    | Log
    | Failed
    | Forgotten
)


class FrameReader:
    """Cuts what arrives into frames.

    Raises:
        EngineDeadError: by `feed`, for a frame that is longer than `max_bytes`: the other side is
            not what it should be, and nothing after such a length can be read.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytearray]:
        """Add what was read; yields each frame that is complete, without its length."""
        pending = self._pending
        pending += data
        start = 0
        try:
            while len(pending) - start >= LENGTH_BYTES:
                begin = start + LENGTH_BYTES
                size = int.from_bytes(pending[start:begin], "little")
                if size > self._max_bytes:
                    raise EngineDeadError(f"a message of {size} bytes is over the limit.")
                if len(pending) - begin < size:
                    break
                start = begin + size
                yield pending[begin:start]
        finally:
            del pending[:start]


_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The frame of a message."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_to_engine(body: bytes | bytearray) -> ToEngine:
    """Read a message in the engine process.

    Raises:
        EngineDeadError: it is none.
    """
    message: ToEngine = _decode(_TO_ENGINE, body)
    return message


def decode_from_engine(body: bytes | bytearray) -> FromEngine:
    """Read a message in the client's process.

    Raises:
        EngineDeadError: it is none.
    """
    message: FromEngine = _decode(_FROM_ENGINE, body)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes | bytearray) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineDeadError(f"a message cannot be read: {error!s:.200}.") from None


def value_bytes(values: npt.NDArray[np.float32]) -> bytes:
    """Float32 values as they travel: little-endian."""
    return values.astype("<f4", copy=False).tobytes()


def read_values(data: bytes) -> npt.NDArray[np.float32]:
    """Float32 values from the bytes of `value_bytes`."""
    return np.frombuffer(data, "<f4").astype(np.float32, copy=False)


def plain_text(text: str) -> str:
    """Text that UTF-8 can hold: a message may quote bytes of a broken file."""
    return text.encode("utf-8", "backslashreplace").decode()


def split_prompt_logprobs(key: int, entries: Sequence[TokenLogprobs]) -> Iterator[PromptLogprobs]:
    """Messages that carry the log-probabilities of a prompt."""
    for start in range(0, len(entries), PROMPT_LOGPROBS_PER_MESSAGE):
        yield PromptLogprobs(key, tuple(entries[start : start + PROMPT_LOGPROBS_PER_MESSAGE]))
