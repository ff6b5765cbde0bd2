"""Processes that run functions of tests as the ranks of a group, joined by gloo, on GPUs by NCCL.

One pool serves many cases: starting a process and importing PyTorch takes longer than most of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tiercel.parallel import TIMEOUT_S, connect

ANSWER_S = 120  # seconds for one case, on a busy machine


class RankError(AssertionError):
    """What a function raised on a rank, as text."""


class RankPool:
    """Processes, one a rank; a case runs on all of them together."""

    def __init__(self, size: int, folder: Path, timeout_s: float, device_type: str) -> None:
        # Forked from a process that has imported PyTorch and runs no threads. A driver of GPUs
        # that was asked for anything cannot be forked.
        context = multiprocessing.get_context("forkserver" if device_type == "cpu" else "spawn")
        if device_type == "cpu":
            context.set_forkserver_preload(["tests.parallel.ranks", "tests.parallel.shared_models"])
        self.size = size
        address = f"file://{folder}/ranks"
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, address, timeout_s, device_type, theirs)
            )
            process.daemon = True  # no orphan, whatever happens to the tests
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(group, *args)` returns on each rank; it must be at a module's top."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [self._answer(rank) for rank in range(self.size)]
        for rank, (is_good, value) in enumerate(answers):
            if not is_good:
                raise RankError(f"rank {rank} of {self.size}:\n{value}")
        return [value for _, value in answers]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        if not pipe.poll(ANSWER_S):
            return False, f"no answer within {ANSWER_S} s"
        try:
            return pipe.recv()
        except EOFError:
            return False, "the process ended"

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


@contextlib.contextmanager
def rank_pool(
    size: int, timeout_s: float = TIMEOUT_S, device_type: str = "cpu"
) -> Iterator[RankPool]:
    """A pool that ends with the block; on GPUs rank r has GPU r."""
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(size, Path(folder), timeout_s, device_type)
        try:
            yield pool
        finally:
            pool.close()


def _serve(
    rank: int, size: int, address: str, timeout_s: float, device_type: str, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    group = connect(rank, size, device, address, timeout_s)
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            pipe.send((True, function(group, *args)))
        except Exception:  # noqa: BLE001 - the caller raises it
            pipe.send((False, traceback.format_exc()))
    group.close()
