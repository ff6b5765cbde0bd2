"""`tiercel score`: the order of items, lines at their size limit; the sums of `inspect`."""

import io
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

from tests.tiny_llm import DATA
from tiercel.cli import score
from tiercel.cli.inspect import _quantisation_mix
from tiercel.errors import ArgumentError
from tiercel.models.footprint import cache_bytes
from tiercel.models.source import open_source


@pytest.mark.parametrize("seed", range(10))
def test_items_come_best_first_and_those_without_a_score_last(seed):
    """Of equal scores the earlier item is first; NaN is worse than a probability of 0."""
    rng = random.Random(seed)
    first = [rng.choice([0.0, 0.25, 0.5, 1.0, math.nan]) for _ in range(rng.randint(1, 12))]
    probs = np.array([[value, rng.random()] for value in first])
    output = SimpleNamespace(probs=probs)
    expected = []
    for value in (1.0, 0.5, 0.25, 0.0):
        expected += [i for i, p in enumerate(first) if p == value]
    expected += [i for i, p in enumerate(first) if math.isnan(p)]
    assert score._best_first(output, None) == expected
    for top in (1, 2, len(first), len(first) + 1):
        assert score._best_first(output, top) == expected[:top]


def test_a_line_is_read_to_its_bound(monkeypatch):
    monkeypatch.setattr(score, "MAX_LINE_BYTES", 40)
    line = b'{"query": "q", "items": ["a"]}'.ljust(39) + b"\n"
    assert score._read_line(line, io.BytesIO()) == {"query": "q", "items": ["a"]}
    rest = io.BytesIO(b"x" * 100 + b"\nnext\n")
    with pytest.raises(ArgumentError, match="the line is over 40 bytes"):
        score._read_line(b" " + line[:-1] + b"x", rest)
    assert rest.readline() == b"next\n"  # the remainder of the long line was skipped


@pytest.mark.parametrize("name", ["gemma3-tiny", "llama-tiny", "qwen3-tiny"])
def test_the_cache_of_a_context_is_foretold(name):
    """Two bytes for each number; a sliding layer keeps what its window sees."""
    source = open_source(DATA / f"{name}.gguf")
    config = source.config
    for num_tokens in (1, 3, 5, 6, 7, 100):
        expected = 0
        for kind in config.layer_types:
            kept = num_tokens
            if kind == "sliding" and num_tokens > config.sliding_window:
                kept = config.sliding_window
            expected += kept * config.num_kv_heads * config.head_dim * 2 * 2
        assert cache_bytes(config, num_tokens, "bfloat16") == expected
        assert cache_bytes(config, num_tokens, "float32") == 2 * expected


def test_the_mix_of_types_adds_up_and_begins_with_the_largest():
    source = open_source(DATA / "gemma3-tiny.gguf")
    mix = _quantisation_mix(source)
    infos = list(source.tensors.values())
    assert sum(row["tensors"] for row in mix) == len(infos)
    assert sum(row["bytes"] for row in mix) == sum(info.nbytes for info in infos)
    weights = sum(math.prod(info.dims) for info in infos)
    assert sum(row["weights"] for row in mix) == weights
    sizes = [row["bytes"] for row in mix]
    assert sizes == sorted(sizes, reverse=True)
    assert len({row["type"] for row in mix}) == len(mix)
