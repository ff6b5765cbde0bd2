"""Requests with and without items for prefill attention, their arguments and their tolerances."""

from dataclasses import dataclass

import torch

from tiercel.kernels.attention import prefill_attention as kernel
from tiercel.kernels.attention.prefill_attention_tiles import cut_tiles, make_tiles
from tiercel.ops.prefill_attention import prefill_attention
from tiercel.ops.prefill_attention_plan import PlannedTiles
from tiercel.reference import prefill_attention as oracle

# A request: (cached tokens, P, item lengths); 0 is a token that sees the prefix alone. Without
# items P is the whole length.
PLAIN = {
    "one token": [(0, 1, [])],
    "prompt": [(0, 70, [])],
    "chunk": [(23, 30, [])],
    "chunk from a block's end": [(64, 130, [])],
    "decode step": [(66, 67, [])],
    "mixed": [(16, 17, []), (0, 9, []), (65, 66, []), (24, 29, []), (0, 2, [])],
}
ITEMS = {
    "worked example": [(5, 5, [0, 3, 0, 2, 0, 4, 0])],
    "no prefix": [(0, 0, [5, 1, 29])],
    "no prefix, delimiters": [(0, 0, [0, 3, 0, 0, 2, 0])],
    "prefix computed here": [(0, 33, [4, 1, 7])],
    "prefix computed in part": [(20, 41, [3, 17])],
    "one-token items": [(64, 64, [1] * 21)],
    "one item over tiles": [(3, 3, [40])],
    "among plain requests": [(13, 30, []), (20, 20, [7, 7, 3]), (0, 0, [6]), (0, 5, [])],
}
# What the CUDA kernel can get wrong: page ends, tile ends, steps of 64 and 128 keys.
LARGE = [
    [(512, 512, [16] * 20)],
    [(0, 0, [5, 1, 129, 64])],
    [(1, 1, [3, 2, 4])],
    [(127, 127, [1, 129, 127, 40, 2])],
    [(0, 300, [])],
    [(513, 513, [33] * 9 + [128, 1])],
    [(0, 129, [17, 1, 90])],
    [(256, 513, [31, 129])],
    [(2048, 2048, [1] * 70)],
    [(0, 2000, [])],
    [(700, 1500, []), (1000, 1001, []), (63, 65, []), (64, 128, [])],
    [(0, 130, []), (200, 200, [7] * 13), (64, 64, [0, 129, 0]), (0, 1, [1]), (700, 1500, [100, 3])],
    [(0, 0, [0] * 40 + [3]), (2500, 2501, [])],
]
HEADS = [(9, 3, 64), (14, 2, 64), (8, 2, 128), (4, 1, 256), (4, 1, 64), (3, 3, 40)]
WINDOWS = (0, 6, 64)
# Relative, of whole results (norms): weights are rounded to 16 bits before they meet the values,
# and the result once more; each costs up to half a unit.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-8 + 2**-9, torch.float16: 2**-11 + 2**-12}
SCALE = 0.15  # not 1 / sqrt(head_dim): scale is an argument


@dataclass
class Case:
    """Arguments of the op, and each request's unpaged keys and values."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    prefix_len: list[int]
    item_start: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def op(self, window=0, **changes):
        items = {
            "prefix_len": self.prefix_len,
            "item_start": self.item_start,
            "k_new": self.k_new,
            "v_new": self.v_new,
        }
        caches = (self.k_cache, self.v_cache, self.tables)
        lengths = (self.query_lens, self.context_lens)
        options = {"window": window, "scale": SCALE, **items, **changes}
        return prefill_attention(self.q, *caches, *lengths, **options)

    def expected(self, window=0, softcap=0.0):
        return self.expected_both(window, softcap)[0]

    def expected_both(self, window=0, softcap=0.0):
        lengths = (self.query_lens, SCALE, window, self.prefix_len, self.item_start, softcap)
        return oracle.prefill_attention(self.q, self.keys, self.values, *lengths)

    def launch(self, config, window=0, *, heads_first=None, softcap=0.0, steps=0):
        """A kernel in a variant of choice, on an output of NaN; `steps` > 0: in parts."""
        group = self.q.shape[1] // self.k_cache.shape[2]
        starts = self.item_start.numpy()
        lengths = (self.query_lens, self.context_lens, self.prefix_len)
        tiles = make_tiles(*lengths, starts, config.block_m // group)
        step, parts, buffers = config.block_m // group, None, None
        if steps:
            tiles, parts = cut_tiles(tiles, steps, step)
        model = (self.q.dtype, self.q.shape[2], group, self.k_cache.shape[1])
        plan = PlannedTiles(config, model, tiles, starts, parts, step).upload(self.q.device)
        if heads_first is not None:
            plan.counter[3] = int(heads_first)

        whole = []

        def poisoned(count, *shape, dtype=torch.float32):
            """With rows after it that must stay as they are."""
            shape = (count + 64, *shape)
            whole.append(torch.full(shape, float("nan"), dtype=dtype, device=self.q.device))
            return whole[-1][:count]

        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        if steps:
            rows = (plan.num_part_rows, *self.q.shape[1:])
            lse = poisoned(*self.q.shape[:2])
            buffers = kernel.PartBuffers(poisoned(*rows), poisoned(*rows[:2]), lse)
        tensors = (self.q, self.k_cache, self.v_cache, self.tables, self.k_new, self.v_new, out)
        kernel.launch_prefill_attention(*tensors, plan, SCALE, window, softcap, buffers)
        assert all(rows[-64:].isnan().all() for rows in whole)
        return (out.flatten(1), lse) if steps else out.flatten(1)


def item_starts(cached, prefix, items):
    """item_start of the new tokens; entries below P are never read and hold nonsense."""
    starts, at = [(-7, 10**6)[i % 2] for i in range(prefix)], prefix
    for length in items:
        starts += [at] * length if length else [at + 1]
        at += max(1, length)
    return starts[cached:], at


def make_case(
    requests, shape, block_size, dtype, device, *, poison=float("nan"), q_scale=1.0, is_run=False
):
    """Blocks in random order; poison in every slot and new row that no token may read."""
    heads, kv_heads, head_dim = shape
    counts = [-(-request[1] // block_size) for request in requests]
    num_blocks, most = sum(counts) + 4, max(counts) + 1
    free = (1 + (torch.arange if is_run else torch.randperm)(num_blocks - 1)).tolist()
    tables = torch.zeros(len(requests), most + 3, dtype=torch.int32)
    caches = torch.full((2, num_blocks, block_size, kv_heads, head_dim), poison).to(dtype)
    fused, starts, query_lens, context_lens, keys, values = [], [], [], [], [], []
    for request, (cached, prefix, items) in enumerate(requests):
        own, length = item_starts(cached, prefix, items)
        entries = torch.randn(2, length, kv_heads, head_dim).to(dtype)
        blocks = torch.tensor(free[: counts[request]], dtype=torch.int32)
        free = free[counts[request] :]
        tables[request, : len(blocks)] = blocks
        places = torch.arange(prefix)
        slots = blocks[places // block_size].long() * block_size + places % block_size
        caches.flatten(1, 2)[:, slots] = entries[:, :prefix]
        rows = torch.full((length, heads + 2 * kv_heads, head_dim), poison).to(dtype)
        rows[:, :heads] = q_scale * torch.randn(length, heads, head_dim)
        rows[prefix:, heads:] = entries[:, prefix:].transpose(0, 1).flatten(1, 2)
        fused.append(rows[cached:])
        starts += own
        query_lens.append(length - cached)
        context_lens.append(length)
        keys.append(entries[0].to(device))
        values.append(entries[1].to(device))
    q, k_new, v_new = torch.cat(fused).to(device).split((heads, kv_heads, kv_heads), dim=1)
    k_cache, v_cache = caches.to(device)
    return Case(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        tables=tables.to(device)[:, :most],
        query_lens=query_lens,
        context_lens=context_lens,
        prefix_len=[request[1] for request in requests],
        item_start=torch.tensor(starts, dtype=torch.int32),
        k_new=k_new,
        v_new=v_new,
        keys=keys,
        values=values,
    )


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def assert_lse(actual, expected, atol):
    """Equal sums; where nothing is seen both are minus infinity."""
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


def triton_config(block_m=16, block_n=16):
    return kernel.PrefillAttentionConfig("triton", block_m, block_n, 4, 1)


def cuda_config(variant):
    return kernel.PrefillAttentionConfig(variant, 128, 128, 12, 5)
