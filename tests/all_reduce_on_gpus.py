"""Checks all-reduce and gather on GPUs of this machine, a process each; ends with 0 if right.

    python -m tests.all_reduce_on_gpus --ranks 2 --rounds 10000 --replays 1000

Eager calls of random sizes and dtypes, then graphs whose calls have other inputs at each replay,
between eager ones. Each rank compares its results with the oracle, bit by bit.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.all_reduce import join_ranks
from tiercel.kernels.collectives.all_reduce import DTYPES, MAX_BYTES, NORM_DTYPES
from tiercel.ops.all_reduce import SmallAllReduce, make_small_all_reduce
from tiercel.reference import all_reduce as oracle
from tiercel.reference import rms_norm as norm_oracle

SIZES = (1, 3, 8, 100, 257, 1024, 4096, 8192, 8193, 20_000, 40_001, 65_536)  # elements
GRAPH_CALLS = 12


class Parts:
    """The parts of all ranks, which each rank computes for itself from one seed."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.generator = torch.Generator(device).manual_seed(1)

    def make(self, size: int, dtype: torch.dtype) -> Tensor:
        """(ranks, size)."""
        shape = (self.ranks, size)
        parts = torch.randn(shape, generator=self.generator, device=self.device)
        scales = torch.rand((self.ranks, 1), generator=self.generator, device=self.device)
        return (parts * 10 ** (2 * scales)).to(dtype)


def check_eagerly(reducer: SmallAllReduce, parts: Parts, rounds: int) -> Tensor:
    """The number of wrong results; results are compared on the device, so ranks may lag."""
    chooser, wrong = random.Random(2), torch.zeros((), dtype=torch.int64, device=parts.device)
    for number in range(rounds):
        dtype = chooser.choice(DTYPES)
        size = min(chooser.choice(SIZES), MAX_BYTES // dtype.itemsize)
        each = parts.make(size, dtype)
        if number % 100 == 99 and number // 100 % parts.ranks == parts.rank:
            torch.cuda._sleep(2_000_000)  # cycles, 1 ms: this rank lags
        wrong += (reducer.all_reduce(each[parts.rank]) != oracle.all_reduce(list(each))).any()
        wrong += (reducer.all_gather(each[parts.rank]) != each).any()
    return wrong


def check_norms(reducer: SmallAllReduce, parts: Parts, rounds: int) -> Tensor:
    """The number of rounds whose residual or norm is far from the oracle, or not that of rank 0."""
    device, wrong = parts.device, torch.zeros((), dtype=torch.int64, device=parts.device)
    for number in range(rounds):
        rows, hidden = 1 + number % 40, (4096, 2560, 8192)[number % 3]
        dtype = NORM_DTYPES[number % 2]
        each = parts.make(rows * hidden, dtype).view(parts.ranks, rows, hidden)
        start = parts.make(rows * hidden, torch.float32)[0].view(rows, hidden)
        weight = parts.make(hidden, torch.float32)[0]
        residual = start.clone()
        out = reducer.add_norm(each[parts.rank], residual, weight, 1e-6)
        expected = start.double() + each.double().sum(0)
        normed = norm_oracle.rms_norm(expected, weight, 1e-6)
        wrong += (residual - expected).norm() > 1e-5 * expected.norm()
        wrong += (out - normed).norm() > 1e-2 * normed.norm()
        for mine in (residual, out):
            zero = mine.clone()
            dist.broadcast(zero, 0)
            wrong += (zero != mine).any()
    return wrong.to(device)


def check_replays(reducer: SmallAllReduce, parts: Parts, replays: int) -> Tensor:
    """The number of wrong results of graphs; every tenth replay is followed by an eager call."""
    device, rank = parts.device, parts.rank
    chooser, wrong = random.Random(3), torch.zeros((), dtype=torch.int64, device=device)
    dtypes = [chooser.choice(DTYPES) for _ in range(GRAPH_CALLS)]
    sizes = [chooser.choice(SIZES) for _ in range(GRAPH_CALLS)]
    inputs = [parts.make(*case) for case in zip(sizes, dtypes, strict=True)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [reducer.all_reduce(each[rank]) for each in inputs]
        gathered = [reducer.all_gather(each[rank]) for each in inputs]
    for number in range(replays):
        for each in inputs:
            each.copy_(parts.make(each.shape[1], each.dtype))
        graph.replay()
        for each, result in zip(inputs, results, strict=True):
            wrong += (result != oracle.all_reduce(list(each))).any()
        for each, result in zip(inputs, gathered, strict=True):
            wrong += (result != each).any()
        if number % 10 == 0:
            wrong += check_eagerly(reducer, parts, 1)
    return wrong


def run_rank(rank: int, ranks: int, place: str, rounds: int, replays: int) -> None:
    group, device = join_ranks(rank, ranks, place)
    reducer = make_small_all_reduce(group, device)
    assert not isinstance(reducer, str), reducer
    parts = Parts(rank, ranks, device)
    assert check_eagerly(reducer, parts, rounds).item() == 0, "eager calls"
    assert check_norms(reducer, parts, 60).item() == 0, "norms"
    assert check_replays(reducer, parts, replays).item() == 0, "replays of graphs"
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10_000, help="eager calls")
    parser.add_argument("--replays", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, str(Path(folder) / "ranks"), args.rounds, args.replays)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=args.ranks)


if __name__ == "__main__":
    main()
