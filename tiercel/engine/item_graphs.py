"""Steps with items, replayed from CUDA graphs of padded sizes.

Launching some 17 kernels per layer costs the host more than a small step costs the device: 34 ms
for 10 items behind 300 tokens that take 2.2 ms (0.6 B parameters, H200). A graph runs all layers of
a padded number of tokens, whatever its requests, prefixes and items are: which rows attend to what
is a table of tiles in device memory, written before each replay beside ids, positions and slots.
What is padded belongs to a request without a prefix, whose tokens see nothing and write nothing.

A size is recorded when it comes for the second time, so who never scores pays nothing. There are
as many graphs per size as there are kernels to choose from: for long prefixes, or cut into parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tiercel.batch import Batch, PackedItems
from tiercel.engine.config import EngineConfig
from tiercel.layers.attention import Attention, AttentionShape
from tiercel.models.decoder import Decoder

if TYPE_CHECKING:
    from tiercel.kernels.attention_tiles import PlanBuffer, PlannedTiles

LARGEST = 4096  # tokens; a larger step keeps the device busy for longer than the host
MOST_REQUESTS = 64  # of a step, with the padding
MOST_GRAPHS = 48  # the one that was not used for longest goes first


def padded_size(num_tokens: int) -> int:
    """Tokens that a step is padded to: by 64 to 512, by 128 to 2048, by 256 above."""
    step = 64 if num_tokens <= 512 else 128 if num_tokens <= 2048 else 256
    return -(-num_tokens // step) * step


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and the plans that it reads."""

    graph: torch.cuda.CUDAGraph
    plans: Mapping[AttentionShape, PlanBuffer]


@dataclass(frozen=True, slots=True)
class _Static:
    """What all graphs share.

    Attributes:
        inputs: that they read.
        hidden: (largest, hidden_size) float32 that they leave.
        pool: of memory, PyTorch's handle.
    """

    inputs: Batch
    hidden: Tensor
    pool: Any


class ItemSteps:
    """Passes steps with items through all layers."""

    def __init__(self, model: Decoder, config: EngineConfig) -> None:
        self._model = model
        self._graphs: OrderedDict[object, _Captured] = OrderedDict()
        self._seen: set[object] = set()
        self._largest = 0
        if config.cuda_graphs:
            self._largest = min(LARGEST, padded_size(config.max_num_batched_tokens))
        self._static: _Static | None = None  # made for the first graph

    def __call__(self, batch: Batch) -> Tensor:
        """Enqueue the step; it has items.

        Returns:
            (T' >= T, hidden) float32, the residual before the last norm. It holds until the next
            step with items is enqueued.
        """
        size = padded_size(batch.num_tokens)
        if size > self._largest or batch.num_reqs >= MOST_REQUESTS:
            return self._model.forward(batch)
        layers = self._layers()
        lengths = padded_lengths(batch, size)
        plans = {shape: layer.tiles(*lengths) for shape, layer in layers.items()}
        key = (size, *(plan.kind for plan in plans.values()))
        if key not in self._graphs:
            if key not in self._seen:
                self._seen.add(key)
                return self._model.forward(batch)
            try:
                self._static = self._static or self._make_static(batch)
                self._graphs[key] = self._capture(self._static, batch, size, plans)
            except torch.OutOfMemoryError:
                self._largest = size - 1  # what the cache leaves is not enough for such steps
                return self._model.forward(batch)
            if len(self._graphs) > MOST_GRAPHS:
                self._graphs.popitem(last=False)
        assert self._static is not None, "made for the first graph"
        self._graphs.move_to_end(key)
        captured = self._graphs[key]
        _write(self._static.inputs, batch, size)
        for shape, plan in plans.items():
            captured.plans[shape].fill(plan)
        captured.graph.replay()
        return self._static.hidden[:size]

    def _layers(self) -> dict[AttentionShape, Attention]:
        """A layer of each shape: those of a shape share their plans."""
        layers: dict[AttentionShape, Attention] = {}
        for layer in self._model.layers:
            layers.setdefault(layer.attention.shape, layer.attention)
        return layers

    def _make_static(self, batch: Batch) -> _Static:
        most = self._largest
        inputs = replace(
            batch,
            input_ids=batch.input_ids.new_zeros(most),
            positions=batch.positions.new_zeros(most),
            rows=batch.rows.new_zeros(MOST_REQUESTS),
            slot_mapping=batch.slot_mapping.new_full((len(batch.slot_mapping), most), -1),
        )
        hidden = torch.empty(
            (most, self._model.config.hidden_size),
            dtype=torch.float32,
            device=batch.input_ids.device,
        )
        return _Static(inputs, hidden, torch.cuda.graph_pool_handle())

    def _capture(
        self,
        static: _Static,
        batch: Batch,
        size: int,
        plans: Mapping[AttentionShape, PlannedTiles],
    ) -> _Captured:
        """Run a size eagerly on what graphs read, then record it."""
        device = batch.input_ids.device
        buffers = {
            kind: plan.make_buffer(size, MOST_REQUESTS, device) for kind, plan in plans.items()
        }
        for kind, plan in plans.items():
            buffers[kind].fill(plan)
        _write(static.inputs, batch, size)
        step = _cut(static.inputs, size, buffers)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._model.forward(step)  # writes the batch's keys, as the replay will
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=static.pool, stream=stream):
            static.hidden[:size].copy_(self._model.forward(step))
        return _Captured(graph, buffers)


def padded_lengths(batch: Batch, size: int) -> tuple[tuple[int, ...], tuple[int, ...], PackedItems]:
    """New tokens, lengths and items of a step, with a request for what is missing to `size`.

    Its tokens see nothing: each would begin behind itself, and there is no prefix.
    """
    items, missing = batch.items, size - batch.num_tokens
    assert items is not None, "a step with items"
    if not missing:
        return batch.query_lens, batch.context_lens, items
    blind = torch.arange(1, missing + 1, dtype=torch.int32)
    padded = PackedItems((*items.prefix_len, 0), torch.cat((items.item_start, blind)))
    return (*batch.query_lens, missing), (*batch.context_lens, missing), padded


def _write(inputs: Batch, batch: Batch, size: int) -> None:
    """Bring a step's inputs to where graphs read them.

    Old ids, positions and rows may stay behind them: they are valid, and nobody looks at what
    becomes of them.
    """
    count = batch.num_tokens
    inputs.input_ids[:count].copy_(batch.input_ids)
    inputs.positions[:count].copy_(batch.positions)
    inputs.rows[: batch.num_reqs].copy_(batch.rows)
    inputs.slot_mapping[:, :count].copy_(batch.slot_mapping)
    inputs.slot_mapping[:, count:size].fill_(-1)


def _cut(inputs: Batch, size: int, buffers: Mapping[AttentionShape, PlanBuffer]) -> Batch:
    """The part that a graph of one size reads, under lengths that any step could have."""
    lengths = (*(1,) * (MOST_REQUESTS - 1), size - MOST_REQUESTS + 1)
    starts = np.concatenate([np.arange(1, length + 1, dtype=np.int32) for length in lengths])
    return replace(
        inputs,
        input_ids=inputs.input_ids[:size],
        positions=inputs.positions[:size],
        slot_mapping=inputs.slot_mapping[:, :size],
        query_lens=lengths,
        context_lens=lengths,
        num_tokens=size,
        num_reqs=MOST_REQUESTS,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        items=PackedItems((0,) * MOST_REQUESTS, torch.from_numpy(starts)),
        plans={shape: buffer.plan for shape, buffer in buffers.items()},
    )
