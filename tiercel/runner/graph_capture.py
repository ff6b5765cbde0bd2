"""CUDA graph capture of what a step enqueues.

Graphs of one recorder share their memory: a replay may overwrite the results of another one. So
results that are needed later are copied out, or read before the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# Memory of a graph besides what its kernels write: 1.5 MiB with 36 layers of 11 kernels (H200).
GRAPH_BYTES = 4 * 2**20


class GraphRecorder:
    """A stream to capture on, and the memory of captured graphs, for one engine."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(
        self, run: Callable[[], T], load: Callable[[], object]
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture what a function enqueues, and replay it once.

        Args:
            run: enqueues it.
            load: enqueues each of its kernels once or more, since none can be loaded during a
                capture.

        Returns:
            The graph, and the result of `run` during the capture: tensors that each replay fills
            anew.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            load()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`, which waits for the device and empties PyTorch's cache of
        # memory each time. Here the device runs what was enqueued while the host captures the next
        # graph.
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
        """Give back the memory that the eager runs kept: no other stream could use it."""
        torch.cuda.empty_cache()
