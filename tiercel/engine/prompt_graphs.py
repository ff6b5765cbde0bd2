"""Steps of a few short prompts, replayed from CUDA graphs captured at start.

A short prompt is bound by the host, which launches some ten kernels for each layer: 300 tokens of
an 8B model take 8 ms on an H200 and 15 ms to launch. So such a step is padded with tokens of the
scratch row to the next bucket of tokens and runs from the rows' lengths on the device to the hidden
states behind the last layer. What differs between steps lies in one buffer, which one copy fills:
the rows, where their tokens begin, and the tiles of the attention for each kind of layer. Without
graphs (TIERCEL_CUDA_GRAPH=0) the same padded step runs eagerly, with the same bits.

This is off (TIERCEL_PROMPT_GRAPH=1 turns it on) until it has run on a GPU.

Steps of at most 16 tokens a request stay with kernels whose rows are invariant; steps with items,
many requests or much context run unpadded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.engine.config import EngineConfig
from tiercel.engine.rows import Rows, lists_to_device
from tiercel.layers.attention import LayerKind, PromptPlan
from tiercel.models.decoder import Decoder
from tiercel.ops.paged_attention import MAX_DECODE_QUERIES
from tiercel.ops.prepare_step import prepare_step

if TYPE_CHECKING:
    from tiercel.kernels.attention_tiles import PromptTiles

MOST_PROMPTS: Final = 8
PLACES: Final = MOST_PROMPTS + 1  # of requests; the last one is padding
# Longer steps keep the GPU busy without help.
SIZES: Final = (*range(32, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the buffer that it reads and the hidden states that it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Step:
    """A padded step on the host.

    Attributes:
        size: its tokens, padding included.
        longest: bound of the lengths.
        tiles: of each kind of layer.
        lists: int32 numbers for the device, each a multiple of 16 bytes: rows of `PLACES` requests,
            where they start, and the tiles of each kind.
    """

    size: int
    longest: int
    tiles: dict[LayerKind, PromptTiles]
    lists: list[npt.NDArray[np.int32]]

    def runs_like(self, other: _Step) -> bool:
        """Whether the same kernels serve both."""
        return all(plan.config == other.tiles[kind].config for kind, plan in self.tiles.items())


class PromptSteps:
    """Runs steps of a few prompts up to the hidden states behind the last layer."""

    def __init__(self, model: Decoder, rows: Rows, config: EngineConfig) -> None:
        self._model = model
        self._rows = rows
        self._config = config
        self._graphs: dict[int, _Captured] = {}
        self._models: dict[int, _Step] = {}  # of each size: one prompt, nothing before it
        most = min(config.max_num_batched_tokens, config.max_model_len)
        most = most if config.prompt_graphs else 0
        self.sizes = [size for size in SIZES if size <= most]

    def __call__(
        self, rows: Sequence[int], query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> Tensor | None:
        """Enqueue the step; None if it is none of these, and nothing was enqueued.

        Args:
            rows: engine rows, without items.
            query_lens: new tokens of each.
            context_lens: its length with them.

        Returns:
            (T', hidden) float32, the step's tokens first. It holds until the next step.
        """
        total = sum(query_lens)
        size = next((size for size in self.sizes if size >= total), None)
        if size is None or len(rows) > MOST_PROMPTS or max(query_lens) <= MAX_DECODE_QUERIES:
            return None
        step = self._step(rows, query_lens, context_lens, size)
        if not step.runs_like(self._model_step(size)):
            return None
        captured = self._graphs.get(size)
        if captured is None:
            return self._run(lists_to_device(step.lists, self._config.device), step)
        (joined,) = lists_to_device([np.concatenate(step.lists)], self._config.device)
        captured.inputs.copy_(joined)
        captured.graph.replay()
        return captured.hidden

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Run every size eagerly, then record it, largest first; one pool of memory for all.

        progress: called with (done, total).
        """
        device = self._config.device
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        for done, size in enumerate(reversed(self.sizes)):
            if progress is not None:
                progress(done, len(self.sizes))
            step = self._model_step(size)
            (inputs,) = lists_to_device([np.concatenate(step.lists)], device)
            pieces = inputs.split([len(values) for values in step.lists])
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._run(pieces, step)
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                hidden = self._run(pieces, step)
            self._graphs[size] = _Captured(graph, inputs, hidden)
        if progress is not None:
            progress(len(self.sizes), len(self.sizes))

    def _model_step(self, size: int) -> _Step:
        """One prompt of the scratch row, which stands for all steps of a size."""
        if size not in self._models:
            self._models[size] = self._step([self._rows.scratch], [size], [size], size)
        return self._models[size]

    def _step(
        self, rows: Sequence[int], query_lens: Sequence[int], context_lens: Sequence[int], size: int
    ) -> _Step:
        """Pad a step; requests that are not there begin and end where the padding ends."""
        padding = [self._rows.scratch] * (PLACES - len(rows))
        ends = [*accumulate(query_lens), *[size] * len(padding)]
        rest = [size - sum(query_lens)] if sum(query_lens) < size else []
        longest = max(*context_lens, size - PLACES + 1)
        kinds = {layer.attention.kind: layer.attention for layer in self._model.layers}
        tiles = {
            kind: attention.prompt_tiles(
                [*query_lens, *rest], [*context_lens, *rest], longest=longest, spare=PLACES
            )
            for kind, attention in kinds.items()
        }
        tables = [plan.table.ravel() for plan in tiles.values()]
        lists = [_aligned([*rows, *padding]), _aligned([0, *ends]), *tables]
        return _Step(size, longest, tiles, lists)

    def _run(self, pieces: Sequence[Tensor], step: _Step) -> Tensor:
        """The padded step; its pieces are its lists, on the device."""
        state, config = self._rows, self._config
        rows, starts = pieces[0][:PLACES], pieces[1][: PLACES + 1]
        inputs = prepare_step(
            state.token_ids,
            state.num_computed,
            state.block_tables,
            rows,
            starts,
            step.size,
            config.block_size,
        )
        # Kernels read lengths and tiles on the device; these only have to add up.
        others = (1,) * (PLACES - 1)
        batch = Batch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            cu_seqlens_q=starts,
            seq_lens=inputs.seq_lens,
            rows=rows,
            logits_rows=rows,
            slot_mapping=inputs.slot_mapping,
            block_tables=state.block_tables,
            query_lens=(step.size - PLACES + 1, *others),
            context_lens=(step.longest, *others),
            num_tokens=step.size,
            num_reqs=PLACES,
            max_query_len=step.size,
            max_seq_len=step.longest,
        )
        plans = {}
        for (kind, plan), table in zip(step.tiles.items(), pieces[2:], strict=True):
            tables = state.block_tables[kind[1]].index_select(0, rows)
            plans[kind] = PromptPlan(plan.plan(table.view(-1, 8), step.size), tables)
        return self._model.forward(batch, plans)


def _aligned(values: Sequence[int]) -> npt.NDArray[np.int32]:
    """As int32, filled up to a multiple of 16 bytes."""
    return np.array([*values, *[0] * (-len(values) % 4)], np.int32)
