"""Batches over a paged cache for tests of attention: poisoned wherever a slot has no owner."""

import torch

from tiercel.batch import Batch

# Limits of the decode kernels: up to 16 new tokens a request, in blocks of 16 or more.
DECODES = {
    "decodes": [(1, 3), (1, 64), (1, 65), (1, 1), (1, 129)],
    "mixed": [(1, 17), (3, 3), (5, 129), (2, 65)],
    "verify": [(16, 40)],
}
# Relative, of whole results (norms): softmax is float32, but weights are rounded to 16 bits before
# the product with values, and the result is rounded once more; each costs up to half a unit.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-8 + 2**-9, torch.float16: 2**-11 + 2**-12}
POISON = 1000.0  # in every slot that no request owns: if attended to once, it dominates the softmax


def make_batch(requests, block_size, device, *, is_run=False):
    """A batch over blocks in random order, or in one run per request; rows are shuffled too.

    Returns:
        The batch and the slots of each request's context.
    """
    rows = torch.randperm(len(requests) + 2)[: len(requests)]
    counts = [-(-context // block_size) for _, context in requests]
    num_blocks = sum(counts) + 7
    order = torch.arange(num_blocks - 1) if is_run else torch.randperm(num_blocks - 1)
    free, slots = (1 + order).tolist(), []
    tables = torch.zeros(len(requests) + 2, max(counts, default=0) + 3)
    for row, count, (_, context) in zip(rows.tolist(), counts, requests, strict=True):
        blocks, free = torch.tensor(free[:count]), free[count:]
        tables[row, :count] = blocks
        places = torch.arange(context)
        slots.append(blocks[places // block_size] * block_size + places % block_size)
    query_lens = tuple(queries for queries, _ in requests)
    contexts = tuple(context for _, context in requests)
    mapping = [places[-queries:] for places, queries in zip(slots, query_lens, strict=True)]
    num_tokens = sum(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    positions = [torch.arange(context)[-queries:] for queries, context in requests]
    int32 = {"dtype": torch.int32, "device": device}
    batch = Batch(
        input_ids=torch.zeros(num_tokens, **int32),
        positions=torch.cat([torch.empty(0), *positions]).to(**int32),
        cu_seqlens_q=starts.to(**int32),
        seq_lens=torch.tensor(contexts).to(**int32),
        rows=rows.to(**int32),
        logits_rows=(starts[1:] - 1).to(**int32),
        slot_mapping=torch.cat([torch.empty(0), *mapping]).long().unsqueeze(0).to(device),
        block_tables=tables.unsqueeze(0).to(**int32),
        query_lens=query_lens,
        context_lens=contexts,
        num_tokens=num_tokens,
        num_reqs=len(requests),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(contexts, default=0),
    )
    return batch, slots


def make_case(requests, shape, block_size, dtype, device, *, is_run=False, poison=POISON):
    """Queries cut out of a fused row, poisoned caches with each request's keys in its slots."""
    heads, kv_heads, head_dim = shape
    batch, slots = make_batch(requests, block_size, device, is_run=is_run)
    fused = torch.randn(batch.num_tokens, heads + 2 * kv_heads, head_dim).to(dtype).to(device)
    num_blocks = sum(-(-context // block_size) for _, context in requests) + 7
    caches = torch.full((2, num_blocks, block_size, kv_heads, head_dim), poison).to(dtype)
    entries = [torch.randn(2, len(places), kv_heads, head_dim).to(dtype) for places in slots]
    for places, entry in zip(slots, entries, strict=True):
        caches.flatten(1, 2)[:, places] = entry
    keys, values = [entry[0] for entry in entries], [entry[1] for entry in entries]
    k_cache, v_cache = caches.to(device)
    return fused[:, :heads], k_cache, v_cache, batch, keys, values


def relative_error(actual, expected):
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()
