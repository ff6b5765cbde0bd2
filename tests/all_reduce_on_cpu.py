"""Runs the source of the all-reduce on a CPU, all ranks in one memory; see cuda_on_cpu/."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.launches_on_cpu import compile_library, describe_failure, read_kernel
from tiercel.kernels.collectives import all_reduce as kernel

HERE = Path(__file__).parent / "cuda_on_cpu"
GUARD = 16  # elements beside a result


@dataclass(frozen=True)
class Norm:
    """What follows a sum: the residual of each rank, mutated, the norm's weight, and its eps."""

    residuals: Sequence[Tensor]
    weight: Tensor
    eps: float


def build(
    ranks: int, dtype: torch.dtype, warps: int, folder: Path, *, has_norm: bool = False
) -> ctypes.CDLL:
    """Compile the source with the headers that replace GPUs; skip where that is impossible."""
    source = kernel.all_reduce_source(ranks, dtype, warps, has_norm=has_norm)
    device = [
        HERE / f"{name}.hpp" for name in ("device", "q4k_device", "peers_device", "ranks_device")
    ]
    macros = (*source.macros, ("KERNEL", source.name))
    text = "".join(f"#define {name} {value}\n" for name, value in macros)
    text += "".join(part.read_text() for part in device) + read_kernel(source.name)
    return compile_library(text + (HERE / "run_ranks.cpp").read_text(), folder, "ranks")


def launch_type(ranks: int, *, has_norm: bool) -> type[ctypes.Structure]:
    """Launch of cuda_on_cpu/run_ranks.cpp."""
    arguments = kernel.arguments_type(ranks, has_norm=has_norm)
    fields = (("args", arguments), ("x", ctypes.c_void_p), ("ctas", ctypes.c_int))
    return type("Launch", (ctypes.Structure,), {"_fields_": fields})


class Ranks:
    """The memory of ranks, which keeps its contents and counts from run to run."""

    def __init__(
        self, ranks: int, library: ctypes.CDLL, warps: int, *, gathers: bool = False
    ) -> None:
        self.ranks, self.library, self.warps, self.gathers = ranks, library, warps, gathers
        size = kernel.exchange_bytes(ranks)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
        self.epochs = torch.zeros(ranks, kernel.CHANNELS, dtype=torch.int32)
        self.addresses = [[memory.data_ptr() for memory in self.memory] for _ in range(ranks)]

    def run(
        self, calls: Sequence[Sequence[Tensor]], seed: int, norm: Norm | None = None
    ) -> list[list[Tensor]]:
        """Reduce or gather the parts of each call; results of each call and rank.

        Args:
            calls: of each call the parts of all ranks, of one size and dtype.
            seed: seed of the order in which ranks and warps run and stores arrive.
            norm: what follows each sum, of a library that has it.
        """
        launch = launch_type(self.ranks, has_norm=norm is not None)
        assert ctypes.sizeof(launch) == self.library.launch_bytes()
        launches = (launch * (self.ranks * len(calls)))()
        inputs = [[torch.full_like(part, float("nan")) for part in parts] for parts in calls]
        copies = self.ranks if self.gathers else 1
        wide = [
            [
                torch.full((copies * part.numel() + 2 * GUARD,), float("nan")).to(part)
                for part in parts
            ]
            for parts in calls
        ]
        for rank in range(self.ranks):
            for number, parts in enumerate(calls):
                num_bytes = parts[rank].nbytes
                one = launches[rank * len(calls) + number]
                one.args.x = inputs[number][rank].data_ptr()
                one.args.out = wide[number][rank][GUARD:].data_ptr()
                one.args.epochs = self.epochs[rank].data_ptr()
                one.args.memory[:] = self.addresses[rank]
                one.args.num_bytes, one.args.rank = num_bytes, rank
                if norm is not None:
                    one.args.residual = norm.residuals[rank].data_ptr()
                    one.args.weight, one.args.eps = norm.weight.data_ptr(), norm.eps
                one.x, one.ctas = parts[rank].data_ptr(), kernel.num_ctas(num_bytes, self.warps)
        failure = self.library.run(launches, self.ranks, len(calls), seed)
        assert failure == 0, describe_failure(self.library, failure)
        for result in (one for results in wide for one in results):  # nothing else was written
            assert result[:GUARD].isnan().all()
            assert result[-GUARD:].isnan().all()
        return [[result[GUARD:-GUARD] for result in results] for results in wide]
