"""Records what a step enqueues as a CUDA graph.

Graphs of one recorder share their memory: a replay may overwrite what another one left, so what is
read behind a replay is copied out of it, or read before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# Of a graph beside what its kernels write: 1.5 MiB with 36 layers of 11 kernels (H200).
GRAPH_BYTES = 4 * 2**20


class GraphRecorder:
    """A stream to record on, and memory for what is recorded; of one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run something once eagerly, which loads its kernels, record it, and replay it once.

        Returns:
            The graph, and what `run` returned while it was recorded: tensors that each replay
            fills anew.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another engine of this process may use its device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = run()
        graph.replay()  # the first replay brings the graph to the device: 1 ms of a request's time
        return graph, result
