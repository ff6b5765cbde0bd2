"""Prefill attention on random layouts: batches, caches, items, delimiters, windows, soft-caps.

Tensors are cut out of one random pool per shape, so that a layout costs about as much as its calls
and thousands of them fit into a minute of a GPU. A key read from a wrong place is a random one.
"""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.ops.multi_item_attention import multi_item_attention
from tiercel.ops.prefill_attention import prefill_attention
from tiercel.reference import prefill_attention as oracle

NUM_CHUNKS, CHUNK = 20, 500  # of the whole sweep
# (heads, kv_heads, head_dim), block size, dtype; the first two run the CUDA kernel on Hopper.
GPU_KINDS = [
    ((4, 1, 128), 64, torch.bfloat16),
    ((4, 2, 128), 16, torch.float16),
    ((3, 1, 64), 64, torch.bfloat16),
    ((4, 2, 256), 64, torch.float16),
]
CPU_KINDS = [((4, 2, 16), 16, torch.float32), ((3, 1, 40), 64, torch.float32)]
# Of a row, relative: 16-bit weights and results, whose rounding does not average out in a row.
ROW_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SCALE = 0.15


@dataclass(frozen=True)
class Layout:
    """One call: (cached tokens, P, item lengths) per request; 0 is a delimiter."""

    requests: list[tuple[int, int, list[int]]]
    window: int
    softcap: float


def log_uniform(rng, most):
    """1 to `most`, as many short ones as long ones."""
    return min(most, int(2 ** rng.uniform(0, np.log2(most + 1))))


def make_request(rng, most_prefix, most_item, most_tokens):
    prefix = log_uniform(rng, most_prefix + 1) - 1
    if rng.random() < 0.3:  # where steps and blocks end
        prefix = max(0, prefix // 64 * 64 + rng.choice((-1, 0, 1)))
    if rng.random() < 0.15:
        prefix = 0
    new = 0 if rng.random() < 0.5 else rng.randint(0, min(prefix, most_tokens // 2))
    if rng.random() < 0.15 and prefix:
        return prefix - max(1, new), prefix, []
    is_delimited = rng.random() < 0.3
    items, left = [0] * is_delimited, most_tokens - new
    longest = rng.choice((1, 4, 40, most_item))
    while left > 0:
        items.append(min(log_uniform(rng, longest), left))
        left -= items[-1]
        if is_delimited:
            items.append(0)
        if rng.random() < 0.03:
            break
    return prefix - new, prefix, items


def make_layout(rng, most_prefix=5000, most_item=300, most_tokens=900):
    batch = rng.choice((1, 1, 2, 3, 5, 8))
    requests = [
        make_request(rng, most_prefix, most_item, rng.randint(1, most_tokens // batch))
        for _ in range(batch)
    ]
    window = log_uniform(rng, 1000) if rng.random() < 0.25 else 0
    return Layout(requests, window, 2.0 if rng.random() < 0.1 else 0.0)


def positions_of(items):
    """Of all tokens after the prefix: 1 to L within an item, 0 for a delimiter."""
    return [p for length in items for p in (range(1, length + 1) if length else (0,))]


class Pool:
    """Random keys, values and rows of one kind."""

    def __init__(self, kind, device, num_blocks, num_rows):
        (self.heads, self.kv_heads, head_dim), self.block_size, dtype = kind
        self.device, self.dtype = device, dtype

        def normal(*shape):
            return torch.randn(*shape, device=device).to(dtype)

        cache = (num_blocks, self.block_size, self.kv_heads, head_dim)
        self.k_cache, self.v_cache = normal(*cache), normal(*cache)
        self.rows = normal(num_rows, self.heads + 2 * self.kv_heads, head_dim)

    def run(self, layout, rng):
        """The worst relative error of a row, on the device; not a number counts as infinite."""
        contexts = [prefix + sum(max(1, n) for n in own) for _, prefix, own in layout.requests]
        cached = [request[0] for request in layout.requests]
        prefixes = [request[1] for request in layout.requests]
        queries = [length - c for length, c in zip(contexts, cached, strict=True)]
        at = rng.randint(0, len(self.rows) - sum(queries))
        split = (self.heads, self.kv_heads, self.kv_heads)
        q, k_new, v_new = self.rows[at : at + sum(queries)].split(split, dim=1)
        most = -(-max(*prefixes, 1) // self.block_size)
        shape = (len(queries), most)
        tables = torch.randint(len(self.k_cache), shape, device=self.device, dtype=torch.int32)
        options = {"window": layout.window, "softcap": layout.softcap}
        options |= {"k_new": k_new, "v_new": v_new}
        lengths = (queries, contexts, SCALE)
        places = [positions_of(items) for *_, items in layout.requests]
        starts = [
            np.concatenate((np.zeros(prefix), np.arange(prefix, length) - own + 1))[c:]
            for own, prefix, length, c in zip(places, prefixes, contexts, cached, strict=True)
        ]
        item_start = torch.from_numpy(np.concatenate(starts).astype(np.int32))
        caches = (self.k_cache, self.v_cache, tables)
        if rng.random() < 0.5:
            stride = max(map(len, places)) + rng.randint(0, 3)
            padded = np.full((len(places), stride), 60000)
            for row, own in zip(padded, places, strict=True):
                row[: len(own)] = own
            longest = [max(own, default=0) for own in places]
            out = multi_item_attention(
                q,
                *caches,
                *lengths,
                prefix_len_ptr=torch.tensor(prefixes).to(torch.uint32),
                token_pos_in_items_ptr=torch.from_numpy(padded.ravel()).to(torch.uint16),
                token_pos_in_items_len=stride,
                max_item_len_ptr=torch.tensor(longest).to(torch.uint16),
                **options,
            )
        else:
            out = prefill_attention(
                q, *caches, *lengths, prefix_len=prefixes, item_start=item_start, **options
            )
        keys, values = (
            self._whole(cache, new, tables, layout, queries)
            for cache, new in ((self.k_cache, k_new), (self.v_cache, v_new))
        )
        window, softcap = layout.window, layout.softcap
        expected, _ = oracle.prefill_attention(
            q, keys, values, queries, SCALE, window, prefixes, item_start, softcap
        )
        error = (out - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-9)
        return error.nan_to_num(torch.inf).max()

    def _whole(self, cache, new, tables, layout, queries):
        """Keys or values of each request end to end."""
        result = []
        parts = zip(layout.requests, tables.long(), new.split(queries), strict=True)
        for (cached, prefix, _), table, rows in parts:
            pages = cache[table].flatten(0, 1)[:prefix]
            result.append(torch.cat((pages, rows[prefix - cached :])))
        return result


def check(kinds, device, seeds, *, num_blocks, **sizes):
    """Run a layout for each seed; kinds take turns."""
    torch.manual_seed(0)
    pools = [Pool(kind, device, num_blocks, 4096) for kind in kinds]
    errors = {kind: [] for kind in range(len(kinds))}
    for seed in seeds:
        rng, kind = random.Random(seed), seed % len(kinds)
        errors[kind].append(pools[kind].run(make_layout(rng, **sizes), rng))
    for kind, own in errors.items():
        worst = torch.stack(own)
        place = int(worst.argmax())
        tolerance = ROW_TOLERANCE[kinds[kind][2]]
        assert worst[place] < tolerance, f"seed {seeds[place * len(kinds) + kind]}: {worst[place]}"


@pytest.mark.parametrize(("start", "count", "most_tokens"), [(0, 100, 150), (100, 30, 1500)])
def test_a_sample_on_the_cpu(start, count, most_tokens):
    """Also of more rows than a block of the CPU's way."""
    sizes = {"most_prefix": 700, "most_item": 90, "most_tokens": most_tokens}
    check(CPU_KINDS, torch.device("cpu"), range(start, start + count), num_blocks=50, **sizes)


@pytest.mark.gpu
def test_a_sample_on_the_gpu(device):
    check(GPU_KINDS, device, range(200), num_blocks=200)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_ten_thousand_on_the_gpu(chunk, device):
    check(GPU_KINDS, device, range(CHUNK * chunk, CHUNK * (chunk + 1)), num_blocks=200)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_the_three_rules_are_one_mask(seed):
    """Published positions, groups of tokens, and item starts; and the keys that delimiters see."""
    rng = random.Random(seed)
    cached, prefix, items = make_request(rng, 40, 12, rng.randint(1, 60))
    places = np.array(positions_of(items), dtype=np.int64)
    length = prefix + len(places)
    i, k = np.arange(length)[:, None], np.arange(length)[None]
    whole = np.concatenate((np.zeros(prefix, np.int64), places))
    by_position = (k <= i) & ((i < prefix) | (k < prefix) | (i < k + whole[:, None]))
    # A group per item; a delimiter is in no group, so it sees the prefix alone.
    group = np.concatenate((np.zeros(prefix), 1 + np.cumsum(places <= 1))).astype(np.int64)
    is_delimiter = (np.arange(length) >= prefix) & (whole == 0)
    group[is_delimiter] = -1
    same = (group[:, None] == group[None]) & ~is_delimiter[:, None]
    by_group = (k <= i) & ((i < prefix) | (k < prefix) | same)
    assert np.array_equal(by_position, by_group)
    starts = torch.from_numpy(np.arange(length) - whole + 1)
    mask = oracle.make_mask(length - cached, length, prefix, starts[cached:]).numpy()
    assert np.array_equal(mask, by_position[cached:])
    assert not by_position[:, is_delimiter][prefix:].any(), "no token sees a delimiter"
    assert (by_position[is_delimiter].sum(axis=1) == prefix).all(), "it sees the prefix alone"
