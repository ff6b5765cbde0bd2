"""Workload: lengths, contents and arrival times of the requests of a measurement, all seeded.

Lengths depend only on the seed, so every level of load and every engine gets the same. Contents
also depend on the level: a repeated prompt would be served from the prefix cache.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Final

import msgspec

from tiercel.bench.completions import Completion
from tiercel.errors import ArgumentError

MAX_LEN: Final = 1 << 24
MAX_FILE_BYTES: Final = 1 << 30
MAX_LINE_BYTES: Final = 64 << 20
MIN_REQUESTS: Final = 32
REQUESTS_PER_PLACE: Final = 4
SECONDS_OF_RATE: Final = 10.0
_LENGTHS: Final = re.compile(r"(\d{1,9})(?::(\d{1,9}))?", re.ASCII)
# Plain words that are single tokens of most vocabularies, with the space before them.
# fmt: off
WORDS: Final = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "government", "number",
    "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month",
    "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind",
    "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea",
    "body", "information", "back", "parent", "face", "others", "level", "office", "door", "health",
    "person", "art", "war", "history", "party", "result", "change", "morning", "reason",
    "research", "girl", "guy", "moment", "air", "teacher", "force", "education",
)
# fmt: on


class Lengths(msgspec.Struct, frozen=True):
    """Token counts, uniform from `low` to `high`, both included."""

    low: int
    high: int


class Workload(msgspec.Struct, frozen=True):
    """The requests apart from the load. Two results can be compared only if these are equal.

    Attributes:
        input_len: tokens of a prompt; None with a file.
        output_len: tokens of an answer; with a file, for lines that do not set it.
        seed: seed of lengths, contents and arrival times.
        temperature: sampling temperature; 0 is greedy.
        token_ids: range of the ids of prompts; None for words.
        file_sha256: hash of the file with the prompts.
    """

    input_len: Lengths | None
    output_len: Lengths
    seed: int = 0
    temperature: float = 0.0
    token_ids: Lengths | None = None
    file_sha256: str | None = None


class WordScale(msgspec.Struct, frozen=True):
    """Token count of words on a server: tokens = fixed + per_word * words."""

    fixed: float
    per_word: float

    def words(self, num_tokens: int) -> int:
        """The number of words that gives `num_tokens` tokens, at least one."""
        return max(1, round((num_tokens - self.fixed) / self.per_word))


def parse_lengths(text: str, low: int = 1) -> Lengths:
    """Read `512` or `128:1024`.

    Args:
        text: text of the option.
        low: least allowed value: lengths begin at 1, token ids at 0.

    Raises:
        ValueError: the text is neither, or out of range.
    """
    found = _LENGTHS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a length; use a number or LOW:HIGH")
    lengths = Lengths(int(found.group(1)), int(found.group(2) or found.group(1)))
    if not low <= lengths.low <= lengths.high <= MAX_LEN:
        raise ValueError(f"{text!r} is out of range; use {low} to {MAX_LEN}, the smaller one first")
    return lengths


def enough_at_once(concurrency: int) -> int:
    """Number of requests of a closed loop, so that most of them run at full concurrency."""
    return max(MIN_REQUESTS, REQUESTS_PER_PLACE * concurrency)


def enough_of_rate(rate: float) -> int:
    """Number of requests of an open loop."""
    return max(MIN_REQUESTS, ceil(SECONDS_OF_RATE * rate))


def make_requests(
    workload: Workload, count: int, *, level: str, words: WordScale | None = None
) -> list[Completion]:
    """Sample the requests of one level.

    Args:
        workload: lengths and contents; without a file.
        count: number of requests.
        level: name of the level, which changes the contents and not the lengths.
        words: scale to write words instead of token ids.
    """
    assert workload.input_len is not None
    lengths = random.Random(f"{workload.seed} lengths")
    contents = random.Random(f"{workload.seed} {level}")
    requests = []
    for _ in range(count):
        input_len = _draw(lengths, workload.input_len)
        output_len = _draw(lengths, workload.output_len)
        prompt: str | list[int]
        if words is not None:
            prompt = " ".join(contents.choices(WORDS, k=words.words(input_len)))
        else:
            assert workload.token_ids is not None
            ids = range(workload.token_ids.low, workload.token_ids.high + 1)
            prompt = contents.choices(ids, k=input_len)
        requests.append(Completion(prompt, output_len))
    return requests


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times of a Poisson process of `rate` per second, in seconds; the first is 0."""
    draw = random.Random(f"{seed} arrivals {rate!r}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return times


class _Line(msgspec.Struct):
    prompt: str | list[int]
    max_tokens: int | None = None


def read_requests(path: Path, workload: Workload) -> list[Completion]:
    """Read prompts from a file of JSON lines: {"prompt": text or token ids, "max_tokens": 64}.

    Raises:
        ArgumentError: a line has another form, or the file is empty or too large.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ArgumentError(f"{path}: the file has over {MAX_FILE_BYTES} bytes.", hint="Cut it.")
    lengths = random.Random(f"{workload.seed} lengths")
    requests = []
    with path.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), b""), 1):
            if not line.strip():
                continue
            try:
                value = msgspec.json.decode(line, type=_Line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise ArgumentError(
                    f"{path}: line {number} is not a request: {error!s:.100}.",
                    hint='Write {"prompt": "text", "max_tokens": 64} on each line.',
                ) from error
            drawn = _draw(lengths, workload.output_len)
            output_len = value.max_tokens if value.max_tokens is not None else drawn
            if not value.prompt or not 1 <= output_len <= MAX_LEN:
                raise ArgumentError(
                    f"{path}: line {number} has an empty prompt or max_tokens={output_len}.",
                    hint=f"Use 1 to {MAX_LEN} tokens.",
                )
            requests.append(Completion(value.prompt, output_len))
    if not requests:
        raise ArgumentError(f"{path}: the file holds no request.", hint="Write one on each line.")
    return requests


def file_sha256(path: Path) -> str:
    """The hash that identifies the file in a result."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def taken(requests: Sequence[Completion], count: int) -> list[Completion]:
    """The first `count` requests, repeated from the start if there are fewer."""
    return [requests[index % len(requests)] for index in range(count)]


def _draw(source: random.Random, lengths: Lengths) -> int:
    return source.randint(lengths.low, lengths.high)
