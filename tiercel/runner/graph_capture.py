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

    def record(
        self, run: Callable[[], T], load: Callable[[], object]
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """Record something and replay it once.

        Args:
            run: enqueues it.
            load: enqueues each of its kernels once or more, since none can be loaded while a graph
                is recorded.

        Returns:
            The graph, and what `run` returned while it was recorded: tensors that each replay
            fills anew.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            load()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`: it waits for the device and empties PyTorch's cache of memory
        # each time, while here the device runs what was enqueued as the host records on.
        with torch.cuda.stream(self._stream):
            # Thread-local: another engine of this process may use its device meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        graph.replay()  # the first replay brings the graph to the device: 1 ms of a request's time
        return graph, result

    def finish(self) -> None:
        """Give back what the eager runs kept: no other stream could use it."""
        torch.cuda.empty_cache()
