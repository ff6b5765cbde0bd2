"""The sources of split attention where splits are as short as tiles: many groups of few keys.

Shares cut rows, groups and requests anywhere; a row's bits are the same for all of them.
"""

import itertools
import random

import pytest
import torch

from tests.launches_on_cpu import QUICK_TO_RUN
from tests.ops.test_decode_attention_split import check_case
from tests.ops.test_decode_attention_split_on_cpu import run
from tests.paged_batches import make_case
from tiercel.kernels.attention import decode_attention_split as kernel

LEVEL = QUICK_TO_RUN
CPU = torch.device("cpu")
# 8 splits of 64 keys, 4 of 128, then of 256.
SPLITS = {
    "FINE_KEYS": 64,
    "FINE_END": 512,
    "MIDDLE_KEYS": 128,
    "MIDDLE_END": 1024,
    "COARSE_KEYS": 256,
}
BORDERS = [*range(0, 513, 64), *range(512, 1025, 128), 1280, 1536]
# (heads, kv_heads, head_dim), new tokens at most: one tile of 8 rows, and two.
KINDS = {
    "128": ((8, 2, 128), 2, torch.bfloat16),
    "256": ((2, 1, 256), 8, torch.float16),
}
FOLDED = {"folds": True}
WAYS = (FOLDED, {"folds": False, "heads_inside": False}, {"folds": False, "heads_inside": True})


@pytest.fixture(autouse=True)
def _on_cpu(on_processor, monkeypatch):
    monkeypatch.setattr(kernel, "_num_sms", lambda device: 4)
    merge = kernel.MergeConfig(16, 8, 1, 4)  # one, for fewer compilations
    monkeypatch.setattr(kernel, "select_merge", lambda *_, **__: merge)
    for name, keys in SPLITS.items():
        monkeypatch.setattr(kernel, name, keys)


def some_requests(draw, most_queries, count):
    """Lengths at borders of splits, one less and one more, and anywhere."""
    for _ in range(count):
        length = draw.choice(BORDERS) + draw.choice((-1, 0, 1))
        length = draw.choice((length, length, draw.randrange(1, 1700), draw.randrange(1, 200)))
        length = max(1, length)
        yield min(length, draw.randrange(1, most_queries + 1)), length


@pytest.mark.parametrize(
    ("kind", "window"),
    [("128", 0), ("128", 1), ("128", 70), ("128", 600), ("256", 70)]
    + [pytest.param("256", window, marks=pytest.mark.slow) for window in (0, 1, 600)],
)
def test_rows_of_many_groups(kind, window, processor):
    """Against the oracle, and bit for bit however units are shared and where they are added."""
    shape, queries, dtype = KINDS[kind]
    draw = random.Random(f"{kind} {window}")
    for _ in range(2):
        requests = list(some_requests(draw, queries, 4))
        case = make_case(requests, shape, 64, dtype, CPU, poison=float("nan"))
        outs = [run(processor, case, window, 3, **FOLDED)]
        check_case(case, window, outs[0])
        for way, shares in itertools.product(WAYS, draw.sample(range(1, 24), 2)):
            outs.append(run(processor, case, window, shares, **way))
        assert all(torch.equal(outs[0], out) for out in outs)
