"""Requests depend only on the seed: the same lengths everywhere, other contents each time."""

import itertools
import json
import statistics

import pytest

from tiercel.bench.completions import Completion
from tiercel.bench.workload import (
    WORDS,
    Lengths,
    WordScale,
    Workload,
    arrival_times,
    enough_at_once,
    enough_of_rate,
    file_sha256,
    make_requests,
    parse_lengths,
    read_requests,
    taken,
)
from tiercel.errors import ArgumentError

SHAPE = Workload(Lengths(3, 9), Lengths(1, 5), seed=7, token_ids=Lengths(100, 109))


def lengths(requests):
    return [(len(request.prompt), request.output_len) for request in requests]


def test_lengths_depend_on_the_seed_and_contents_on_the_level_too():
    one = make_requests(SHAPE, 50, level="a")
    assert one == make_requests(SHAPE, 50, level="a")
    other = make_requests(SHAPE, 60, level="b")
    assert lengths(other)[:50] == lengths(one)
    assert [r.prompt for r in other[:50]] != [r.prompt for r in one]
    reseeded = Workload(SHAPE.input_len, SHAPE.output_len, 8, token_ids=SHAPE.token_ids)
    assert lengths(make_requests(reseeded, 50, level="a")) != lengths(one)


def test_lengths_and_ids_cover_their_ranges_and_no_more():
    requests = make_requests(SHAPE, 500, level="a")
    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert {request.output_len for request in requests} == set(range(1, 6))
    assert {token for request in requests for token in request.prompt} == set(range(100, 110))


def test_words():
    scale = WordScale(fixed=1.0, per_word=2.0)
    assert [scale.words(n) for n in (1, 2, 21, 22)] == [1, 1, 10, 10]
    requests = make_requests(SHAPE, 50, level="a", words=scale)
    counts = [len(request.prompt.split()) for request in requests]
    ids = make_requests(SHAPE, 50, level="a")
    assert counts == [scale.words(len(request.prompt)) for request in ids]
    assert {word for request in requests for word in request.prompt.split()} <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_arrivals_are_a_seeded_poisson_process():
    times = arrival_times(4.0, 4001, seed=3)
    assert times == arrival_times(4.0, 4001, seed=3)
    assert times != arrival_times(4.0, 4001, seed=4)
    assert times[0] == 0.0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    # the mean of 4,000 exponential gaps is off by 1.6% (one standard deviation)
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.12)


def test_how_many_are_enough():
    assert [enough_at_once(n) for n in (1, 8, 9, 64)] == [32, 32, 36, 256]
    assert [enough_of_rate(rate) for rate in (0.5, 3.2, 10.01)] == [32, 32, 101]


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1, 1)), ("128:1024", (128, 1024)), ("7:7", (7, 7))]
)
def test_lengths_are_read(text, expected):
    assert parse_lengths(text) == Lengths(*expected)


def test_token_ids_begin_at_0():
    assert parse_lengths("0:299", 0) == Lengths(0, 299)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "9:3", ":3", "3:", "1:2:3", "1.5", "x", "\u0661", "1" * 10, "16777217"]
)
def test_what_is_no_length(text):
    with pytest.raises(ValueError, match=r"is not a length|is out of range"):
        parse_lengths(text)


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_file_of_requests(tmp_path):
    shape = Workload(None, Lengths(6, 6))
    path = write(
        tmp_path / "r.jsonl",
        json.dumps({"prompt": "two words", "max_tokens": 3, "model": "ignored"}),
        "",
        json.dumps({"prompt": [5, 6]}),
    )
    requests = read_requests(path, shape)
    assert requests == [Completion("two words", 3), Completion([5, 6], 6)]
    assert [request.output_len for request in taken(requests, 5)] == [3, 6, 3, 6, 3]
    assert len(file_sha256(path)) == 64


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not a request"),
        ('{"max_tokens": 1}', "line 2 is not a request"),
        ('{"prompt": 5}', "line 2 is not a request"),
        ('{"prompt": ["a"]}', "line 2 is not a request"),
        ('{"prompt": ""}', "line 2 has an empty prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0"),
        ("[" * 100_000, "line 2 is not a request"),
    ],
)
def test_files_that_are_refused(tmp_path, line, words):
    path = write(tmp_path / "r.jsonl", '{"prompt": "a"}', line)
    with pytest.raises(ArgumentError, match=words):
        read_requests(path, Workload(None, Lengths(1, 1)))
    with pytest.raises(ArgumentError, match="holds no request"):
        read_requests(write(path), Workload(None, Lengths(1, 1)))
