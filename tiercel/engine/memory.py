"""Memory of a device: how much there is, how it is shared, and errors for what does not fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tiercel.cache.manager import span_blocks
from tiercel.cache.spec import CacheGroup
from tiercel.errors import OutOfMemoryError
from tiercel.machine import Memory, read_memory
from tiercel.models.footprint import Footprint

# Share of the memory that is free on a CPU when the model starts. The remaining memory is for
# activations and other programs.
CPU_SHARE = 0.8
GIB = 2**30
MOST_STEPS: Final = 2  # whose tokens have blocks at once: one runs, the next one is planned


@dataclass(frozen=True, slots=True)
class Demand:
    """The least memory in which a model runs: its weights and the cache of one sequence.

    Attributes:
        weights: in one dtype.
        num_tokens: of the longest sequence.
        sequence_bytes: bytes of a sequence by its tokens, which more tokens never lower.
        num_gpus: that share the model; the bytes are those of one.
    """

    weights: Footprint
    num_tokens: int
    sequence_bytes: Callable[[int], int]
    num_gpus: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.weights.nbytes + self.sequence_bytes(self.num_tokens)

    def longest(self, available: int) -> int:
        """Tokens of the longest sequence for which `available` bytes are enough, or 0."""
        lengths = range(1, self.num_tokens + 1)
        return bisect_right(lengths, available - self.weights.nbytes, key=self.sequence_bytes)


class MemoryBudget:
    """The memory that this process may take of a device, counted from when this object was made.

    On a GPU it is a share of the whole memory, and not more than is free. Memory counts as taken
    when PyTorch took it in this process: free memory also depends on other processes, which may
    start or end meanwhile. On a CPU it is a share of the memory that is available within the limits
    of control groups, and as much for each other engine of the model that starts.
    """

    def __init__(
        self,
        device: torch.device,
        utilization: float,
        read_main: Callable[[], Memory | None] = read_memory,
        *,
        num_engines: int = 1,
    ) -> None:
        """Start to count.

        Args:
            device: whose memory.
            utilization: share of a GPU's memory.
            read_main: reads the main memory, for a CPU.
            num_engines: engines that start on a CPU together.
        """
        self._device = device
        self._utilization = utilization
        self._read_main = read_main
        self._cpu_share = CPU_SHARE / num_engines
        self._reserved = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()  # memory that earlier work cached is free too
            self._held_at_start = torch.cuda.memory_reserved(device)

    def reserve(self, num_bytes: int) -> None:
        """Keep bytes for later."""
        self._reserved += num_bytes

    def left(self) -> int:
        """Bytes that may still be taken; negative if too much is."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            taken = torch.cuda.memory_reserved(self._device) - self._held_at_start
            return min(int(self._utilization * total) - taken, free) - self._reserved
        return int(self._main().available * self._cpu_share) - self._reserved

    def check(
        self,
        needed: Demand,
        others: Sequence[Demand],
        fitting: Callable[[int], Sequence[int]] = lambda _: (),
    ) -> None:
        """Refuse a model that does not fit, before its weights are read.

        Args:
            needed: with the weights in the dtype that was chosen.
            others: in the other dtypes of the device.
            fitting: numbers of GPUs that could share the model, each with so many bytes.

        Raises:
            OutOfMemoryError: with all figures, and what would fit.
        """
        left = max(0, self.left())
        if needed.nbytes <= left:
            return
        sequence = needed.sequence_bytes(needed.num_tokens)
        raise OutOfMemoryError(
            f"the weights need about {_gib(needed.weights.nbytes)} in {needed.weights.dtype} and "
            f"one sequence of {needed.num_tokens} tokens {_gib(sequence)}{_on_each(needed)}, but "
            f"{self._device} has {_gib(left)} to use{self._origin()}.",
            hint=self._remedy(needed, others, left, fitting(left)),
        )

    def _main(self) -> Memory:
        memory = self._read_main()
        if memory is None:
            raise OutOfMemoryError("the system does not tell how much memory is available.")
        return memory

    def _origin(self) -> str:
        """The origin of a CPU's figure."""
        if self._device.type == "cuda":
            return ""
        memory = self._main()
        limit = "" if memory.limit is None else f" within a limit of {_gib(memory.limit)}"
        return f" ({self._cpu_share:.0%} of the {_gib(memory.available)} available{limit})"

    def _remedy(
        self, needed: Demand, others: Sequence[Demand], left: int, fitting: Sequence[int]
    ) -> str:
        smallest = min((needed, *others), key=lambda demand: demand.nbytes)
        dtype = smallest.weights.dtype
        if smallest.nbytes <= left:
            return f"Use --dtype {dtype}: it needs {_gib(smallest.nbytes)}."
        shared = ""
        if fitting:
            shared = f", or share it: {min(fitting)} such GPUs fit it (--tensor-parallel-size)"
        if longest := needed.longest(left):
            return (
                f"Lower max_model_len: {longest} tokens would fit without any other memory{shared}."
            )
        least = "" if smallest is needed else f" (--dtype {dtype})"
        if self._device.type == "cpu":
            needs = f"It takes {_gib(smallest.nbytes / self._cpu_share)} of free memory{least}"
        else:
            needs = f"It takes {_gib(smallest.nbytes)}{least}"
        return f"{needs}{shared}; or use a smaller model or a smaller quantisation."


def _on_each(needed: Demand) -> str:
    return f" on each of {needed.num_gpus} GPUs" if needed.num_gpus > 1 else ""


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def cache_blocks(
    groups: Sequence[CacheGroup],
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_step_tokens: int,
    available: int,
) -> list[int]:
    """The number of blocks of each group, the null block included.

    Memory is shared in proportion to what sequences of `max_model_len` need of each group, and up
    to what `max_num_seqs` of them need. A sliding group holds a window of each sequence. The tokens
    of a step count once for all sequences, and twice if there are several: a step is planned while
    another one runs, whose blocks are not free yet.

    Args:
        groups: of the model.
        block_size: tokens of a block.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: sequences that run together.
        max_step_tokens: positions of a sequence that a step writes, at most.
        available: bytes.

    Raises:
        OutOfMemoryError: not one sequence of `max_model_len` fits; names the length that would.
    """

    def blocks_of(group: CacheGroup, num_tokens: int, step_tokens: int) -> int:
        """Of one sequence in a step with so many of its tokens."""
        most = -(-num_tokens // block_size)
        if group.spec.policy == "sliding":
            most = min(most, span_blocks(group.spec.window - 1 + step_tokens, block_size))
        return most

    def bytes_of(num_tokens: int, step_tokens: int = max_step_tokens) -> int:
        return sum(
            blocks_of(group, num_tokens, step_tokens) * group.bytes_per_block(block_size)
            for group in groups
        )

    fixed = sum(group.bytes_per_block(block_size) for group in groups)  # null blocks
    needed, left = bytes_of(max_model_len), available - fixed
    if left < needed:
        fits = bisect_right(range(0, max_model_len, block_size), left, key=bytes_of) - 1
        longest = max(0, fits) * block_size
        raise OutOfMemoryError(
            f"the cache of one sequence of {max_model_len} tokens needs "
            f"{needed / GIB:.2f} GiB but {max(0, left) / GIB:.2f} GiB are left.",
            hint=f"Lower max_model_len to {longest} or less."
            if longest
            else "Use a smaller model.",
        )
    # In full up to `num_whole` sequences, each with a step; after them a token of each.
    num_whole = min(MOST_STEPS, max_num_seqs, left / needed)
    spare = max(0.0, left - num_whole * needed)
    num_more = min(max_num_seqs - num_whole, spare / bytes_of(max_model_len, 1))
    return [
        1
        + int(
            num_whole * blocks_of(group, max_model_len, max_step_tokens)
            + num_more * blocks_of(group, max_model_len, 1)
        )
        for group in groups
    ]
