"""Bytes on their way to a GPU: all of them, whatever their number."""

import contextlib
import threading
from functools import partial

import numpy as np
import pytest
import torch

from tiercel.models import upload as upload_module
from tiercel.models.upload import Uploader

PIECE = 2 << 20
CPU = torch.device("cpu")
THREAD = threading.local()  # which device each thread has set


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (3, 1001), (5, PIECE), (7, 6 * PIECE + 13)], ids=str)
def test_bytes_arrive(shape, device):
    upload = Uploader(device)
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    for _ in range(2):  # its pinned memory is used again
        poisoned = torch.full(shape, 255, dtype=torch.uint8, device=device)
        del poisoned
        assert torch.equal(upload(data).cpu(), data)


class Stream:
    """Notes what it waits for."""

    def __init__(self, _device=None):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


class Event:
    """The GPU has not read a worker's pinned memory before this was waited for."""

    is_pending = False

    def record(self):
        self.is_pending = True

    def synchronize(self):
        self.is_pending = False


@pytest.fixture
def on_cpu(monkeypatch):
    """Copies on a CPU, in pieces of 10 bytes by 3 workers; returns the stream of the caller."""
    current = Stream()
    monkeypatch.setattr(upload_module, "_PIECE_BYTES", 10)
    monkeypatch.setattr(upload_module, "_MOST_THREADS", 3)
    monkeypatch.setattr(upload_module, "usable_cpus", lambda: 8)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(THREAD, "device", device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    real = torch.empty
    monkeypatch.setattr(
        upload_module.torch, "empty", lambda *sizes, pin_memory=False, **rest: real(*sizes, **rest)
    )
    return current


def copy_when_read(upload, target, source):
    """`np.copyto`, that refuses to write what the GPU has yet to read; on the device's threads."""
    assert THREAD.device == CPU
    at = (target.ctypes.data - upload._pieces.data_ptr()) // 10
    assert not upload._fetched[at].is_pending, "overwritten on its way"
    target[...] = source


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 29, 30, 31, 60, 61, 95])
def test_pieces_of_all_workers_make_the_whole(count, on_cpu, monkeypatch):
    upload = Uploader(CPU)
    assert upload._pieces.shape == (3, 10)
    monkeypatch.setattr(upload_module.np, "copyto", partial(copy_when_read, upload))
    for _ in range(2):
        data = torch.from_numpy(np.random.default_rng(count).integers(0, 256, count, np.uint8))
        data = data.view(1, -1) if count % 2 else data.view(-1, 1)
        on_cpu.waited.clear()
        out = upload(data)
        assert torch.equal(out, data)
        assert on_cpu.waited == [upload._stream], "the caller waits for the copies"
        assert upload._stream.waited[-1] is on_cpu, "and the copies for what used the memory before"
