"""Upload of a mapped file to a GPU: threads copy pieces into pinned memory, the GPU fetches them.

A plain copy from a map goes through one buffer of the driver on one thread, which also takes the
page faults: 6.8 GB/s, while pinned memory crosses the bus at 50 (H200, PCIe 5).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiercel.machine import usable_cpus

# Only pieces of one tensor are under way together. They are small: most tensors have several.
_PIECE_BYTES: Final = 2 << 20
_MOST_THREADS: Final = 16


class Uploader:
    """Copies to one device; make one for a whole file."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        count = min(_MOST_THREADS, usable_cpus())
        # A thread that returned to the first GPU would take memory of it.
        self._pool = ThreadPoolExecutor(count, "upload", torch.cuda.set_device, (device,))
        self._pieces = torch.empty((count, _PIECE_BYTES), dtype=torch.uint8, pin_memory=True)
        self._fetched = [torch.cuda.Event() for _ in range(count)]

    def __call__(self, data: Tensor) -> Tensor:
        """Copy to the device.

        Args:
            data: uint8 of any shape on the CPU, contiguous; it may be read-only.

        Returns:
            The same on the device, ready for the current stream.
        """
        out = torch.empty(data.shape, dtype=torch.uint8, device=self._device)
        self.fill(data, out)
        return out

    def fill(self, data: Tensor, out: Tensor) -> None:
        """Copy to memory on the device; both uint8 of one size, contiguous."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # whose memory it may have been
        flat, flat_out = data.numpy().reshape(-1), out.view(-1)
        count = len(self._fetched)
        list(self._pool.map(lambda i: self._copy(flat, flat_out, i, count), range(count)))
        current.wait_stream(self._stream)

    def _copy(self, data: npt.NDArray[np.uint8], out: Tensor, worker: int, count: int) -> None:
        """Copy every `count`-th piece through the worker's own pinned memory."""
        fetched = self._fetched[worker]
        for start in range(worker * _PIECE_BYTES, data.size, count * _PIECE_BYTES):
            part = data[start : start + _PIECE_BYTES]
            staged = self._pieces[worker, : part.size]
            fetched.synchronize()
            np.copyto(staged.numpy(), part)
            with torch.cuda.stream(self._stream):
                out[start : start + part.size].copy_(staged, non_blocking=True)
                fetched.record()
