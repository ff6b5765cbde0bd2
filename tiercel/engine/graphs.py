"""Steps of single new tokens, replayed from CUDA graphs captured at start.

A step is padded with the scratch row to the next bucket of rows, and runs from the rows' lengths on
the device to their logits: `prepare_step`, all layers, the head. Its addresses are fixed, so a
replay is preceded by one copy, of the row numbers. Sampling follows eagerly: which of its stages
run depends on what the requests ask. Without graphs (TIERCEL_CUDA_GRAPH=0) the same padded step
runs eagerly, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.engine.config import EngineConfig
from tiercel.engine.rows import Rows, to_device
from tiercel.models.decoder import Decoder
from tiercel.ops.prepare_step import prepare_step

LARGEST_BUCKET = 256  # rows; larger steps run unpadded and eagerly


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the rows it reads and the logits it leaves."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    logits: Tensor


def buckets(max_num_seqs: int) -> list[int]:
    """Sizes that decode steps are padded to: 1, 2, 4, 8, then by 8 to 64, then by 16 to 256."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, LARGEST_BUCKET + 1, 16)]
    last = min(max_num_seqs, LARGEST_BUCKET)
    return [size for size in sizes if size < last] + [last]


class DecodeSteps:
    """Runs one token each of some rows, up to their logits."""

    def __init__(self, model: Decoder, rows: Rows, config: EngineConfig) -> None:
        self._model = model
        self._rows = rows
        self._config = config
        self._graphs: dict[int, _Captured] = {}
        self._buckets = buckets(config.max_num_seqs) if config.device.type == "cuda" else []
        most = max(config.max_num_seqs, *self._buckets, 1)
        self._places = torch.arange(most + 1, dtype=torch.int32, device=config.device)
        self._logits = torch.empty(0)  # of whichever graph ran last; made by capture

    def __call__(self, rows: Sequence[int], context_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Enqueue the step.

        Args:
            rows: engine rows, R.
            context_lens: of each, this token included.

        Returns:
            (B,) int32 rows and (B, vocab_size) float32 logits, B >= R; the first R lines are
            those of `rows`, in this order. They hold until the next step is enqueued.
        """
        size = self._padded(len(rows))
        padding = size - len(rows)
        host_rows = np.array([*rows, *[self._rows.scratch] * padding], np.int32)
        captured = self._graphs.get(size)
        if captured is None:
            on_device = to_device(host_rows, self._config.device)
            return on_device, self._run(on_device, (*context_lens, *(1,) * padding))
        captured.rows.copy_(to_device(host_rows, self._config.device))
        captured.graph.replay()
        return captured.rows, captured.logits

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Run every bucket eagerly, then record it, largest first; one pool of memory for all.

        progress: called with (done, total).
        """
        # Without this copy each graph would keep logits of its own, 1.5 GB together at 151,936
        # tokens of vocabulary; it costs 17 us at 64 rows.
        shape = (self._buckets[-1], self._model.config.vocab_size)
        self._logits = torch.empty(shape, dtype=torch.float32, device=self._config.device)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._config.device)
        for done, size in enumerate(reversed(self._buckets)):
            if progress is not None:
                progress(done, len(self._buckets))
            rows = torch.full(
                (size,), self._rows.scratch, dtype=torch.int32, device=self._config.device
            )
            lengths = (1,) * size
            stream.wait_stream(torch.cuda.current_stream(self._config.device))
            with torch.cuda.stream(stream):
                self._run(rows, lengths)
            torch.cuda.current_stream(self._config.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._logits[:size].copy_(self._run(rows, lengths))
            self._graphs[size] = _Captured(graph, rows, self._logits[:size])
        if progress is not None:
            progress(len(self._buckets), len(self._buckets))

    def _padded(self, count: int) -> int:
        return next((size for size in self._buckets if size >= count), count)

    def _run(self, rows: Tensor, context_lens: tuple[int, ...]) -> Tensor:
        config, state, count = self._config, self._rows, rows.shape[0]
        starts = self._places[: count + 1]
        inputs = prepare_step(
            state.token_ids,
            state.num_computed,
            state.block_tables,
            rows,
            starts,
            count,
            config.block_size,
        )
        is_cpu = config.device.type == "cpu"
        batch = Batch(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            cu_seqlens_q=starts,
            seq_lens=inputs.seq_lens,
            rows=rows,
            logits_rows=self._places[:count],
            slot_mapping=inputs.slot_mapping,
            block_tables=state.block_tables,
            query_lens=(1,) * count,
            context_lens=context_lens,
            num_tokens=count,
            num_reqs=count,
            max_query_len=1,
            # A graph serves every length; the attention kernel's result is blind to the bound.
            max_seq_len=max(context_lens) if is_cpu else config.max_model_len,
        )
        return self._model.logits(self._model.forward(batch), batch.logits_rows)
