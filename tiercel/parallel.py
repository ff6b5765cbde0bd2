"""Groups of processes that hold parts of one model: sums, gathers and broadcasts among them.

A group is made once by `connect` and passed to what needs it. A group of one (`SINGLE`) is the same
code without a process: its methods return what they are given. All ranks must call the same methods
in the same order with tensors of the same shapes. Results have the same bits on every rank:

    CPU    gloo: parts are gathered, and added in the order of ranks in float32
    GPU    NCCL: every element is summed once, and the sum is sent to all; or, up to some size, a
           kernel that reads the parts of all GPUs in the order of ranks (`SmallSums`)

Everything a GPU does here is enqueued on the current stream and can be captured in a CUDA graph.

Where ranks have rows of their own, each sends its rows to all (`gather_rows`), and gets back the
sums of what all made of them (`scatter_sums`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from tiercel.errors import ArgumentError, RankLostError

TIMEOUT_S: Final = 30.0  # of a collective on a CPU, and for all ranks to connect
_LENGTH_BYTES: Final = 8
_SHORT_BYTES: Final = 4096  # of `exchange`: the results of a step of some 100 tokens


class SmallSums(Protocol):
    """Kernels that sum and gather small tensors of all ranks faster than the backend does."""

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest tensor it takes."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, contiguous on the GPU, in the order of ranks; x may change."""

    def all_gather(self, x: Tensor) -> Tensor:
        """(ranks, *shape of x), the parts of all ranks; x has an even number of bytes."""

    def norms(self, x: Tensor) -> bool:
        """Whether `add_norm` takes a tensor."""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of `residual`, after the sum over ranks of x is added to it."""


@dataclass(frozen=True, slots=True)
class Group:
    """One process of several that compute together.

    Attributes:
        rank: of this process, from 0.
        size: processes.
        processes: PyTorch's handle of them, of CPU and GPU tensors; None in a group of one.
        small_sums: sums and gathers tensors on a GPU up to its `max_bytes`; None: the backend
            takes all.
        timeout_s: after which a collective on a CPU fails.
    """

    rank: int = 0
    size: int = 1
    processes: dist.ProcessGroup | None = None
    small_sums: SmallSums | None = None
    timeout_s: float = TIMEOUT_S

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks.

        Args:
            x: contiguous floats; what it holds afterwards is undefined.

        Returns:
            Of the shape and dtype of x, possibly x itself. On a CPU the sum is made in float32 and
            rounded once.

        Raises:
            RankLostError: another rank did not answer.
        """
        if self.size == 1:
            return x
        if not x.is_cuda:
            parts = self._gather(x, "the sum of")
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            return total.to(x.dtype)
        small = self._small(x)
        if small is not None:
            return small.all_reduce(x)
        with self._waiting_for("the sum of", x):
            dist.all_reduce(x, group=self.processes)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The parts of all ranks along a dimension, in the order of ranks.

        Args:
            x: of the same shape on every rank.
            dim: along which parts are joined.
        """
        if self.size == 1:
            return x
        parts = self._gather(x.contiguous(), "parts of")
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim=dim)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, one rank's after the other's.

        Args:
            x: (T, ...), at most `counts[rank]` rows; zeros are added to them.
            counts: rows of each rank, the same on every rank.

        Returns:
            (sum of counts, ...).
        """
        # A collective takes equal parts; what is padded is left out of everything else.
        parts = self._gather(_padded(x, max(counts)), "rows of")
        if len(set(counts)) == 1:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def scatter_sums(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The sums over ranks of this rank's rows, added in the order of ranks in float32.

        Args:
            x: (sum of counts, ...) floats, a part of each sum, in the order of `gather_rows`.
            counts: as given there.

        Returns:
            (counts[rank], ...), dtype of x.
        """
        most = max(counts)
        ends = np.cumsum(counts).tolist()
        own = [x[end - count : end] for end, count in zip(ends, counts, strict=True)]
        given = x if len(set(counts)) == 1 else torch.cat([_padded(part, most) for part in own])
        given = given.contiguous()
        parts = torch.empty_like(given)
        if given.numel():
            with self._waiting_for("sums of rows", x):
                dist.all_to_all_single(parts.view(-1), given.view(-1), group=self.processes)
        total = parts[:most].float()
        for rank in range(1, self.size):
            total = total + parts[rank * most : (rank + 1) * most].float()
        return total[: counts[self.rank]].to(x.dtype)

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, of any lengths, by their CPUs; mostly in one collective."""
        if self.size == 1:
            return [data]
        first = self._gather_bytes(len(data).to_bytes(_LENGTH_BYTES, "little") + data, _SHORT_BYTES)
        lengths = [int.from_bytes(part[:_LENGTH_BYTES], "little") for part in first]
        longest = max(lengths)
        if longest <= _SHORT_BYTES - _LENGTH_BYTES:
            starts = [part[_LENGTH_BYTES:] for part in first]
        else:
            starts = self._gather_bytes(data, longest)
        return [start[:length] for start, length in zip(starts, lengths, strict=True)]

    def merge_top(self, values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest values of all ranks' largest ones; of equal values the lowest id first.

        Args:
            values: (L, k) float32, descending; of equal ones the lowest id first.
            ids: (L, k) integers that 32 bits hold; any id of a rank is below those of the next.
            count: values to return, at most `size` * k.

        Returns:
            (L, count) values, and (L, count) ids in their dtype.
        """
        if self.size == 1:
            return values[:, :count], ids[:, :count]
        # Both in one collective: what small ones cost is their number.
        pairs = torch.stack((values.view(torch.int32), ids.to(torch.int32)), dim=-1)
        joined = self.all_gather(pairs, dim=1)
        # Equal values come in the order of ids: the first of them, or a stable sort that keeps it.
        found = joined[..., 0].contiguous().view(torch.float32)
        if count == 1:
            order = found.max(dim=1, keepdim=True).indices
        else:
            order = found.sort(dim=1, descending=True, stable=True).indices[:, :count]
        best = joined.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
        return best[..., 0].contiguous().view(torch.float32), best[..., 1].to(ids.dtype)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """What x holds on one rank, written to x on all others."""
        if self.size == 1:
            return x
        with self._waiting_for(f"rank {source} to send", x):
            dist.broadcast(x, group=self.processes, group_src=source)
        return x

    def meet(self, what: str, timeout_s: float) -> None:
        """Wait on the CPU until every rank gets here.

        Args:
            what: ranks do before, such as ``loading``; for the error.
            timeout_s: in place of the group's: some things take long.

        Raises:
            RankLostError: a rank did not get here.
        """
        if self.processes is None:
            return
        try:
            # Of gloo, also where the group has NCCL too: `dist.monitored_barrier` refuses that.
            self.processes.monitored_barrier(  # type: ignore[attr-defined]
                timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise self._lost(f"all ranks to finish {what}", timeout_s, error) from error

    def close(self) -> None:
        """Leave; nothing may be called afterwards."""
        if self.size > 1:
            dist.destroy_process_group(self.processes)

    def _gather(self, x: Tensor, what: str) -> Tensor:
        """(size, *shape of x), the parts of all ranks."""
        small = self._small(x)
        if small is not None and x.nbytes % 2 == 0:
            return small.all_gather(x)
        # As bytes: not every backend knows every dtype, and none looks into them.
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if not x.numel():
            return parts
        flat, flat_parts = x.view(-1).view(torch.uint8), parts.view(self.size, -1).view(torch.uint8)
        with self._waiting_for(what, x):
            if x.is_cuda:
                dist.all_gather_into_tensor(flat_parts, flat, group=self.processes)
            else:
                dist.all_gather(list(flat_parts.unbind()), flat, group=self.processes)
        return parts

    def _gather_bytes(self, data: bytes, length: int) -> list[bytes]:
        """The first `length` bytes of all ranks, with zeros behind what is shorter."""
        own = torch.zeros(length, dtype=torch.uint8)
        known = np.frombuffer(data[:length], np.uint8)
        own[: len(known)] = torch.from_numpy(known.copy())
        return [part.numpy().tobytes() for part in self._gather(own, "results of").unbind()]

    def _small(self, x: Tensor) -> SmallSums | None:
        """The kernels for a tensor, if they take it."""
        small = self.small_sums
        return small if small is not None and x.is_cuda and x.nbytes <= small.max_bytes else None

    @contextmanager
    def _waiting_for(self, what: str, x: Tensor) -> Iterator[None]:
        """Turn a failed collective into an error that names it."""
        try:
            yield
        except RuntimeError as error:
            shape = f"{what} {tuple(x.shape)} {x.dtype}".replace("torch.", "")
            raise self._lost(shape, self.timeout_s, error) from error

    def _lost(self, what: str, timeout_s: float, error: RuntimeError) -> RankLostError:
        return _lost(f"rank {self.rank} of {self.size}", what, timeout_s, error)


SINGLE: Final = Group()


def _padded(x: Tensor, count: int) -> Tensor:
    """X with rows of zeros after it, up to `count`; contiguous."""
    missing = count - x.shape[0]
    if not missing:
        return x.contiguous()
    return torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


def connect(
    rank: int,
    size: int,
    device: torch.device,
    address: str,
    timeout_s: float = TIMEOUT_S,
) -> Group:
    """Meet the other processes; `replace(group, small_sums=...)` adds a kernel for small sums.

    Args:
        rank: of this process, 0 to size - 1.
        size: processes; with 1 nothing is connected.
        device: of this process: CPU tensors go through gloo, and those of a GPU through NCCL.
        address: ``tcp://host:port`` on which rank 0 listens, or ``file:///path`` of a new file.
        timeout_s: of this call and of each collective on a CPU.

    Raises:
        ArgumentError: there is no such rank, or no such kind of address.
        RankLostError: not all ranks came.
    """
    if not 0 <= rank < size:
        raise ArgumentError(
            f"rank {rank} of {size} processes does not exist.", hint=f"Use 0 to {size - 1}."
        )
    if size == 1:
        return SINGLE
    if not address.startswith(("tcp://", "file://")):
        raise ArgumentError(
            f"no ranks can meet at {address!r}.", hint="Use tcp://host:port or file:///path."
        )
    is_gpu = device.type == "cuda"
    # Ranks find each other under the number of their group, and PyTorch keeps what GPUs share under
    # it, also after the group's end. Its own number counts attempts of this process, which other
    # ranks have not made.
    dist.distributed_c10d._world.group_count = crc32(address.encode())
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
            init_method=address,
            timeout=timedelta(seconds=timeout_s),
            world_size=size,
            rank=rank,
            device_id=device if is_gpu else None,
        )
    except RuntimeError as error:
        who = f"rank {rank} of {size}"
        raise _lost(who, f"the other ranks at {address}", timeout_s, error) from error
    return Group(rank, size, dist.group.WORLD, timeout_s=timeout_s)


def _lost(who: str, what: str, timeout_s: float, error: Exception) -> RankLostError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return RankLostError(
        f"{who} waited for {what}, up to {timeout_s:g} s, and did not get it: {lines[0]:.160}",
        hint="Another process ended or hangs: its own error says why.",
    )
