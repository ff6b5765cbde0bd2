"""Random decoders of a few layers and requests of one new token each, for fused_batch_step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.fused_layer_tail_model import EPS, Model, make_model
from tiercel.batch import Batch
from tiercel.ops.fused_batch_step import (
    BatchStepLayer,
    BatchStepWeights,
    Heads,
    Refusal,
    prepare_batch_step,
)
from tiercel.reference import fused_batch_step as oracle

HEAD_DIM, BLOCK = 128, 64
HEAD_EPS = 0.3  # of norms of heads: large enough to matter
SCALE = 1.3 * HEAD_DIM**-0.5


@dataclass
class Step:
    """A decoder and the requests of a step."""

    weights: BatchStepWeights
    models: list[Model]
    batch: Batch
    heads: Tensor
    x: Tensor

    def with_caches(self) -> Step:
        """The same with caches, and memory of an exchange, of its own."""
        layers = [
            replace(layer, k_cache=layer.k_cache.clone(), v_cache=layer.v_cache.clone())
            for layer in self.weights.layers
        ]
        return replace(self, weights=_prepare(layers, self.weights))

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, keys and values."""
        return [(layer.k_cache, layer.v_cache) for layer in self.weights.layers]

    def some(self, order: Sequence[int]) -> tuple[Tensor, Tensor, Batch]:
        """Heads, residual and batch of some of the requests, in another order."""
        which = torch.tensor(order, device=self.x.device)
        batch = make_batch(
            self.batch.positions[which],
            self.batch.seq_lens[which],
            self.batch.slot_mapping[0, which],
            self.batch.rows[which],
            self.batch.block_tables,
        )
        return self.heads[which].contiguous(), self.x[which].contiguous(), batch


def make_batch(
    positions: Tensor, seq_lens: Tensor, slots: Tensor, rows: Tensor, tables: Tensor
) -> Batch:
    """A step of one token a request."""
    tokens = len(positions)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=positions.device)
    return Batch(
        input_ids=starts[:-1],
        positions=positions,
        cu_seqlens_q=starts,
        seq_lens=seq_lens,
        rows=rows,
        logits_rows=starts[:-1],
        slot_mapping=slots[None].contiguous(),
        block_tables=tables,
        query_lens=(1,) * tokens,
        context_lens=tuple(seq_lens.tolist()),
        num_tokens=tokens,
        num_reqs=tokens,
        max_query_len=1,
        max_seq_len=int(seq_lens.max()),
    )


def make_step(
    shape, kv_heads, lengths, sixes, device, *, has_norms=True, num_sms=128, positions=None
):
    """Layers with `sixes` of `make_model`; older keys in blocks anywhere, what is not theirs NaN.

    Padding has no slot, as in graphs: of a request of length 0, whose one key is its own.
    """
    generator = torch.Generator().manual_seed(len(lengths))
    counts = [-(-length // BLOCK) for length in lengths]
    free = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = torch.zeros(len(lengths) + 1, max(counts) + 1, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 1, generator=generator)[: len(lengths)]
    owned, slots = [], []
    for row, length, count in zip(rows.tolist(), lengths, counts, strict=True):
        own, free = free[:count], free[count:]
        tables[row, :count] = torch.tensor(own, dtype=torch.int32)
        owned.append(own)
        last = length - 1
        slots.append(own[last // BLOCK] * BLOCK + last % BLOCK if length else -1)
    models, layers = [], []
    for index, six in enumerate(sixes):
        is_last = index + 1 == len(sixes)
        model = make_model(six, shape, device, index, is_last=is_last, num_sms=num_sms)
        caches = []
        for size in (2, 1):
            cache = torch.full((sum(counts) + 1, BLOCK, kv_heads, HEAD_DIM), float("nan")).half()
            for own, length in zip(owned, lengths, strict=True):
                older = size * torch.randn(
                    max(length - 1, 0), kv_heads, HEAD_DIM, generator=generator
                )
                for first in range(0, length - 1, BLOCK):
                    part = older[first : first + BLOCK].half()
                    cache[own[first // BLOCK], : len(part)] = part
            caches.append(cache.to(device))
        norms = [0.7 + 0.6 * torch.rand(HEAD_DIM, generator=generator) for _ in range(2)]
        models.append(model)
        layers.append(
            BatchStepLayer(
                model.weights, *caches, tuple(n.to(device) for n in norms) if has_norms else ()
            )
        )
    count = max(positions or 0, max(lengths) + 1)
    angles = 6.28 * torch.rand(count, HEAD_DIM // 2, generator=generator)
    num_heads = shape.attended // HEAD_DIM
    weights = prepare_batch_step(
        layers,
        Heads(num_heads, kv_heads, HEAD_DIM, HEAD_DIM, BLOCK, has_norms),
        torch.stack([angles.cos(), angles.sin()], 1).contiguous().to(device),
        num_sms,
        head_eps=HEAD_EPS,
        scale=SCALE,
    )
    assert not isinstance(weights, Refusal), weights.reason
    batch = make_batch(
        torch.tensor([max(length - 1, 0) for length in lengths], dtype=torch.int32).to(device),
        torch.tensor(lengths, dtype=torch.int32).to(device),
        torch.tensor(slots).to(device),
        rows.int().to(device),
        tables[None].contiguous().to(device),
    )
    heads = torch.randn(len(lengths), shape.heads_width, generator=generator).half()
    x = torch.randn(len(lengths), shape.hidden, generator=generator)
    return Step(weights, models, batch, heads.to(device), x.to(device))


def _prepare(layers: Sequence[BatchStepLayer], like: BatchStepWeights) -> BatchStepWeights:
    weights = prepare_batch_step(
        layers,
        like.geometry.heads,
        like.rope_table,
        like.geometry.tail.ctas,
        head_eps=like.head_eps,
        scale=like.scale,
    )
    assert not isinstance(weights, Refusal), weights.reason
    return weights


def expected_step(step: Step) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """By the oracle: the residual, and each layer's new keys and values."""
    batch, weights = step.batch, step.weights
    seen = []
    for caches in step.caches():
        olds = []
        for cache in caches:
            flat = []
            for row, length in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True):
                blocks = batch.block_tables[0, row].long().cpu()
                flat.append(cache.double().cpu()[blocks].flatten(0, 1)[: max(length - 1, 0)])
            olds.append(flat)
        seen.append((olds[0], olds[1]))
    layers = []
    for index, model in enumerate(step.models):
        dense = {name: tensor.cpu() for name, tensor in model.dense().items()}
        if index + 1 == len(step.models):
            del dense["qkv"]
        layers.append(dense)
    table = weights.rope_table.double().cpu()[batch.positions.long().cpu()]
    norms = [
        (layer.head_norms[0].cpu(), layer.head_norms[1].cpu()) if layer.head_norms else None
        for layer in weights.layers
    ]
    return oracle.fused_batch_step(
        step.heads.cpu().unflatten(1, (-1, HEAD_DIM)),
        step.x.cpu(),
        layers,
        seen,
        torch.atan2(table[:, 1], table[:, 0]),
        norms,
        EPS,
        weights.head_eps,
        weights.scale,
    )
