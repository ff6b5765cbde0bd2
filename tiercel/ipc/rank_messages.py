"""The messages between rank 0 of a model and its other ranks, and their form on the socket.

Free of PyTorch. Frames as in `messages.py`, over a socket pair of rank 0 and each other rank:

    from rank 0    the requests and their ends, as the client sent them: 2 NewRequest  3 Abort
                   4 Stop  5 Forget;  41 Step  42 Scratch  43 Prepare  44 Begin  45 Agreed
    to rank 0      22 Log  23 Failed  50 Value  51 Alive  52 Word

`Join` (`messages.py`) is the first message and comes once. Closing the socket ends the rank.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tiercel.errors import EngineDeadError
from tiercel.grammar.spec import GrammarSpec
from tiercel.ipc.messages import (
    LENGTH_BYTES,
    Abort,
    Failed,
    Forget,
    Log,
    NewRequest,
    Stop,
)
from tiercel.scheduler.step_budget import Pace


class Step(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """Run a step, after all that came before this message.

    Attributes:
        late: keys of requests that end first, because a mask of theirs took too long on rank 0.
        pace: of rank 0's `StepBudget`; None if steps are not timed.
    """

    late: tuple[int, ...] = ()
    pace: Pace | None = None


class Scratch(msgspec.Struct, frozen=True, array_like=True, tag=42):
    """Run a step of scratch rows, with so many new tokens each."""

    query_lens: tuple[int, ...]


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=43):
    """Compile a grammar beside the steps: a request with it will probably come."""

    grammar: GrammarSpec
    stop_ids: frozenset[int]


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=44):
    """The warm-up is over: faults count steps from here."""


class Agreed(msgspec.Struct, frozen=True, array_like=True, tag=45):
    """What all ranks use, in answer to a `Value` of the same name; no values: go on."""

    what: str
    values: tuple[float, ...] = ()


class Value(msgspec.Struct, frozen=True, array_like=True, tag=50):
    """What a rank has measured, or must have in common with rank 0."""

    what: str
    values: tuple[float, ...] = ()
    facts: dict[str, str] = msgspec.field(default_factory=dict)


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=51):
    """The thread that computes has advanced.

    num_steps: `Step` messages that it has finished.
    """

    num_steps: int


class Word(msgspec.Struct, frozen=True, array_like=True, tag=52):
    """The check word after a number of steps; see `CheckWord`."""

    num_steps: int
    word: int


Event = NewRequest | Abort | Stop | Forget | Scratch | Step
ToRank = Event | Prepare | Begin | Agreed
FromRank = Value | Alive | Word | Log | Failed

_ENCODER = msgspec.msgpack.Encoder()
_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
MAX_FROM_RANK_BYTES: Final = 1 << 20  # a traceback and some facts


def encode_frame(message: ToRank | FromRank) -> bytes:
    """The frame of a message."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_to_rank(body: bytes | bytearray) -> ToRank:
    """Read a message of rank 0.

    Raises:
        EngineDeadError: it is none.
    """
    try:
        return _TO_RANK.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineDeadError(f"a message of rank 0 cannot be read: {error!s:.200}.") from None


def decode_from_rank(body: bytes | bytearray) -> FromRank:
    """Read a message of another rank.

    Raises:
        EngineDeadError: it is none.
    """
    try:
        return _FROM_RANK.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineDeadError(f"a message of a rank cannot be read: {error!s:.200}.") from None
