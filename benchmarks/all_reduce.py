"""All-reduce of small tensors over GPUs of one host, beside NCCL and PyTorch's symmetric memory.

    python -m benchmarks.all_reduce --ranks 2 --out benchmarks/results/all_reduce_h100.json

A process per GPU. Microseconds a call: of 20 calls in a row from the host, and of 100 in a CUDA
graph; of the ranks' medians the largest. Floor: the cost of a graph node, a store to another GPU
and the bytes over the links (docs/notes/collectives.md). The peers need their input in memory of
their own, and NCCL adds in place, so its values grow from call to call. Then gathers, and the sum
with the residual's norm, in one launch and in two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import environment
from benchmarks.figures import save
from tiercel import env
from tiercel.kernels.collectives.symmetric_memory import make_symmetric_memory
from tiercel.ops.all_reduce import SmallAllReduce, make_small_all_reduce
from tiercel.ops.rms_norm import rms_norm
from tiercel.reference import all_reduce as oracle

SIZES = (8, 2 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)  # bytes
DTYPE = torch.bfloat16
GATHERED = (8, 8 << 10, 256 << 10)  # bytes of a rank
NORMED_ROWS, HIDDEN, EPS = (1, 8, 64, 128), 4096, 1e-6
EAGER_CALLS, GRAPH_CALLS, SAMPLES = 20, 100, 20
Run = Callable[[], Tensor]


def join_ranks(rank: int, ranks: int, place: str) -> tuple[dist.ProcessGroup, torch.device]:
    """This process's group, of NCCL, and its GPU; `place` is a file for all ranks."""
    env.forbid_multicast()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{place}", rank=rank, world_size=ranks, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    return group, device


def time_us(run: Callable[[], object], calls: int) -> float:
    """Microseconds a call of something that makes so many calls; ranks begin together."""
    times = []
    for _ in range(SAMPLES + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[3:])


def time_both_us(run: Run) -> dict[str, float]:
    """Microseconds a call from the host and in a graph: the slowest rank's."""

    def run_eagerly() -> None:
        for _ in range(EAGER_CALLS):
            run()

    run_eagerly()
    dist.barrier()
    eager = time_us(run_eagerly, EAGER_CALLS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            run()
    dist.barrier()
    in_graph = time_us(graph.replay, GRAPH_CALLS)
    slowest = torch.tensor([eager, in_graph], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    eager, in_graph = slowest.tolist()
    return {"eager_us": eager, "graph_us": in_graph}


def methods(
    part: Tensor, reducer: SmallAllReduce, symmetric: Tensor, group: dist.ProcessGroup
) -> dict[str, Run]:
    """Each way to reduce a part, out of place or in its own memory."""
    shared = symmetric[: part.nbytes].view(part.dtype)
    own = part.clone()

    def run_nccl() -> Tensor:
        dist.all_reduce(own, group=group)
        return own

    torch_ops, name = torch.ops.symm_mem, group.group_name
    found: dict[str, Run] = {"nccl": run_nccl}
    if part.nbytes % 16 == 0:  # what PyTorch's kernels take
        shared.copy_(part)
        found["torch one-shot"] = lambda: torch_ops.one_shot_all_reduce(shared, "sum", name)
    if part.nbytes <= reducer.max_bytes:
        found["tiercel"] = lambda: reducer.all_reduce(part)
    return found


def gathers(part: Tensor, reducer: SmallAllReduce, ranks: int) -> dict[str, Run]:
    """Each way to gather parts."""
    found = torch.empty((ranks, *part.shape), dtype=part.dtype, device=part.device)

    def run_nccl() -> Tensor:
        dist.all_gather_into_tensor(found, part)
        return found

    return {"nccl gather": run_nccl, "tiercel gather": lambda: reducer.all_gather(part)}


def norms(part: Tensor, reducer: SmallAllReduce) -> dict[str, Run]:
    """The sum, the residual and its norm, in one launch and in two."""
    rows, hidden = part.shape
    residual = torch.randn(rows, hidden, device=part.device)
    weight = torch.ones(hidden, device=part.device)

    def run_two() -> Tensor:
        return rms_norm(residual, weight, EPS, DTYPE, update=reducer.all_reduce(part))

    return {
        "sum, then norm": run_two,
        "sum with norm": lambda: reducer.add_norm(part, residual, weight, EPS),
    }


def more_rows(rank: int, ranks: int, reducer: SmallAllReduce, device: torch.device) -> list[Any]:
    """Rows of gathers and of norms; tests/all_reduce_on_gpus.py compares their results."""
    found = []
    for size in GATHERED:
        part = torch.randn(size // DTYPE.itemsize, device=device).to(DTYPE)
        for name, run in gathers(part, reducer, ranks).items():
            found.append({"size_bytes": size, "ranks": ranks, "method": name, **time_both_us(run)})
    for count in NORMED_ROWS:
        part = torch.randn(count, HIDDEN, device=device).to(DTYPE)
        for name, run in norms(part, reducer).items():
            size = part.nbytes
            found.append({"size_bytes": size, "ranks": ranks, "method": name, **time_both_us(run)})
    if rank == 0:
        for row in found:
            print(" ".join(map(str, row.values())), flush=True)
    return found


def measure(rank: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """A row for each size and method; all results are checked before they are timed."""
    reducer = make_small_all_reduce(group, device)
    symmetric = make_symmetric_memory(max(SIZES), group, device)
    if isinstance(reducer, str) or isinstance(symmetric, str):
        raise SystemExit(f"all_reduce: {reducer if isinstance(reducer, str) else symmetric}.")
    rows = []
    for size in SIZES:
        generator = torch.Generator(device).manual_seed(size)
        shape = (ranks, size // DTYPE.itemsize)
        parts = torch.randn(shape, generator=generator, device=device).to(DTYPE)
        expected = oracle.all_reduce(list(parts)).float()
        part = parts[rank].clone()  # at an even address: an odd one is copied in each call
        for name, run in methods(part, reducer, symmetric.buffer, group).items():
            torch.cuda.current_stream().synchronize()
            dist.barrier()  # every rank's input is in place
            error = (run().float() - expected).norm() / expected.norm()
            assert error.item() <= (0 if name == "tiercel" else 1e-2), (name, size, error)
            rows.append({"size_bytes": size, "ranks": ranks, "method": name, **time_both_us(run)})
            if rank == 0:
                print(" ".join(map(str, rows[-1].values())), flush=True)
    return rows + more_rows(rank, ranks, reducer, device)


def run_rank(rank: int, ranks: int, place: str, out: Path | None) -> None:
    group, device = join_ranks(rank, ranks, place)
    rows = measure(rank, ranks, group, device)
    if rank == 0:
        save(out, environment(device), rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    parser.add_argument("--out", type=Path, help="where to write the figures")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.ranks:
        raise SystemExit(
            f"all_reduce: {args.ranks} GPUs are needed, {torch.cuda.device_count()} found."
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, str(Path(folder) / "ranks"), args.out)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=args.ranks)


if __name__ == "__main__":
    main()
