"""Device-to-host copies of a step's results, after the step and beside the next one."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Device-to-host copies of one step's results, on a stream of their own, with one event."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """Begin after everything enqueued so far; stream: for copies, None on a CPU."""
        self._stream = stream
        self._event = None if stream is None else torch.cuda.Event()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def add(self, tensor: Tensor) -> Tensor:
        """Enqueue the copy of a tensor; the result may be read after `wait`."""
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not reused before the copy
        return host

    def finish(self) -> None:
        """Note that all copies are enqueued."""
        if self._event is not None and self._stream is not None:
            self._event.record(self._stream)

    def wait(self) -> None:
        """Wait for this object's copies alone."""
        if self._event is not None:
            self._event.synchronize()
