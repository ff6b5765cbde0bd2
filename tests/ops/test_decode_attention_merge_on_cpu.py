"""The CUDA source that merges splits, lane by lane on a processor, with partial results made up.

No keys: so rows of many splits, whose maxima rise and fall as they like, cost nothing.
"""

import ctypes
import math

import pytest
import torch

from tests.ops.test_decode_attention_split import split_of
from tiercel.kernels.attention import decode_attention_split as kernel
from tiercel.kernels.attention.decode_attention_split import MergeConfig
from tiercel.kernels.runtime import rtc

# Each takes a compiler 2 s: splits loaded together, columns of a lane, heads, results.
KINDS = {
    "8 of 64": (MergeConfig(8, 8, 1, 5), 64, torch.float16),
    "32 of 128": (MergeConfig(32, 8, 1, 3), 128, torch.bfloat16),
    "48 of 256": (MergeConfig(48, 4, 2, 2), 256, torch.float16),
    "72 of 64": (MergeConfig(72, 4, 1, 3), 64, torch.bfloat16),
    "16 of 128": (MergeConfig(16, 8, 2, 4), 128, torch.float16),
}
SLOW = ("72 of 64", "16 of 128")
# One rounding of the result; of float32 sums before it, and of exponents as large as 100.
TOLERANCE = {torch.float16: 2**-11 + 2e-5, torch.bfloat16: 2**-8 + 2e-5}
# New tokens and length: borders of splits and of groups, where splits grow, padding without keys.
REQUESTS = [
    (1, 1), (1, 2), (3, 3), (2, 129), (16, 16), (2, 0), (5, 1024), (1, 1025), (2, 2049), (3, 2305),
    (1, 6145), (2, 10500), (1, 33500),
]  # fmt: skip


def make_maxima(rows, splits):
    """Base-2 exponents: alike, rising, falling, far apart, and of splits that saw nothing."""
    kind = torch.arange(rows).unsqueeze(1) % 5
    place = torch.arange(splits)
    maxima = torch.randn(rows, splits) * 2
    maxima += torch.where(kind == 1, 0.8 * place, 0.0) - torch.where(kind == 2, 0.8 * place, 0.0)
    maxima += torch.where(kind == 3, 30 * torch.randn(rows, splits), 0.0)
    is_blind = (kind == 4) & (torch.rand(rows, splits) < 0.4)
    return maxima.masked_fill(is_blind, -math.inf)


def expected(partials, stats):
    """(rows, head_dim) float64 of a row's visible splits: (rows, splits, head_dim) and (.., 2)."""
    maxima, sums = stats.double().unbind(dim=2)
    top = maxima.amax(dim=1, keepdim=True)
    weights = torch.exp2(maxima - top.masked_fill(top == -math.inf, 0.0))
    total = (weights * sums).sum(dim=1, keepdim=True)
    out = torch.einsum("rs,rsd->rd", weights, partials.double())
    return out / total.masked_fill(total == 0.0, 1.0)


@pytest.mark.parametrize("window", [0, 1, 150, 3000])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS]
)
def test_rows_are_the_sums_of_their_splits(kind, window, processor):
    """Only slots of splits that a row sees are read, and each row is written to its own slot."""
    merge, head_dim, dtype = KINDS[kind]
    kv_heads, group = 2, 3
    heads, most = kv_heads * group, max(queries for queries, _ in REQUESTS)
    starts = torch.tensor([0, *(queries for queries, _ in REQUESTS)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in REQUESTS], dtype=torch.int32)
    tokens = int(starts[-1])
    slots = max(kernel.num_splits(int(lengths.max()), most, window), 1)
    partials = torch.full((tokens, heads, slots, head_dim), math.nan)
    stats = torch.full((tokens, heads, slots, 2), math.nan)
    wanted = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    for request, (queries, length) in enumerate(REQUESTS):
        low = max(length - queries - window + 1, 0) if window else 0
        for query in range(queries):
            token, position = int(starts[request]) + query, length - queries + query
            if position < 0:
                continue
            count = split_of(position) - split_of(low) + 1
            maxima = make_maxima(heads, count)
            is_seen = (maxima > -math.inf).float()
            own = torch.stack((maxima, is_seen * (torch.rand(heads, count) + 0.5)), dim=2)
            values = is_seen.unsqueeze(2) * torch.randn(heads, count, head_dim)
            stats[token, :, :count], partials[token, :, :count] = own, values
            wanted[token] = expected(values, own)
    guarded = torch.full((tokens + 2, heads * head_dim), math.nan, dtype=dtype)
    out = guarded[1:-1]
    config = kernel.select_decode_attention_split(head_dim, 8)
    source = kernel.merge_source(head_dim, dtype, config, merge, folds=False)
    sizes = (len(REQUESTS), kv_heads, group, slots, window or kernel.NO_WINDOW, most)
    processor.seed += 1
    processor.launch(
        processor.load_kernel(source, torch.device("cpu")),
        -(-heads * head_dim // (32 * merge.columns * merge.warps)),
        32 * merge.warps,
        [*map(rtc.pointer, (starts, lengths, partials, stats, out)), *map(ctypes.c_int, sizes)],
        grid_y=len(REQUESTS) * most,
    )
    assert guarded[[0, -1]].isnan().all()  # nothing outside of the rows is written
    size = wanted.abs().amax(dim=2, keepdim=True).clamp(min=1e-3)
    error = (out.view(wanted.shape).double() - wanted).abs() / size
    assert error.max() < TOLERANCE[dtype]  # not of NaN
