"""Which part of each weight a rank holds, where several processes share a model.

A family says by `ShardRules` how its weights are cut. The loader, the memory plan and the check of
a request all go by these rules, so a rank reads the bytes that were planned for it and no others.

    rows      of matrices whose outputs are split: q, k, v, gate, up, experts' w1 and w3; vocabulary
    columns   of matrices whose inputs are split, so that partial sums must be added: o, down, w2
    experts   whole ones of a stack, in consecutive runs

Free of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec
from msgspec import Struct

from tiercel.models.config import ModelConfig
from tiercel.models.stored import StoredWeight
from tiercel.quant_types import FP4_GROUPS, QuantType

ROWS: Final = -2
COLUMNS: Final = -1
EXPERTS: Final = -3


class Sharding(Struct, frozen=True):
    """A rank's place among those that share a model.

    Attributes:
        rank: of this process.
        size: processes.
        tensor_parallel: attention, dense MLPs, embedding and head are split; else every rank has
            them whole.
        expert_parallel: each rank has whole experts; else a part of the inner width of each.
    """

    rank: int = 0
    size: int = 1
    tensor_parallel: bool = True
    expert_parallel: bool = False

    def of(self, rank: int, size: int) -> Sharding:
        """The same split, as one of `size` ranks has it."""
        return msgspec.structs.replace(self, rank=rank, size=size)

    def part(self, count: int) -> tuple[int, int]:
        """[start, stop) of `count` equal things that the ranks share; `size` divides it."""
        share = count // self.size
        return self.rank * share, (self.rank + 1) * share

    def kv_part(self, num_kv_heads: int) -> tuple[int, int]:
        """[start, stop) of key/value heads; ranks share one where there are fewer than ranks."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return head, head + 1

    def inner_part(self, width: int) -> tuple[int, int]:
        """[start, stop) of the inner width of an MLP, in whole blocks of columns.

        Where the ranks do not divide the blocks some have one more; rank 0 is among them.
        """
        block = inner_block(width, self.size)
        count = width // block
        start, stop = (-(-rank * count // self.size) for rank in (self.rank, self.rank + 1))
        return start * block, stop * block

    def vocab_part(self, vocab_size: int) -> tuple[int, int]:
        """[start, stop) of token ids: equal parts but for the last rank's, which may be smaller."""
        share = -(-vocab_size // self.size)
        return min(vocab_size, self.rank * share), min(vocab_size, (self.rank + 1) * share)


WHOLE: Final = Sharding()


def sharding_kind(*, expert_parallel: bool, data_parallel_attention: bool) -> Sharding:
    """The way that options split a model, without a size; see `Sharding.of`."""
    return Sharding(
        tensor_parallel=not data_parallel_attention,
        expert_parallel=expert_parallel or data_parallel_attention,
    )


class Cut(Struct, frozen=True):
    """A part of a weight: [start, stop) along one of `ROWS`, `COLUMNS` and `EXPERTS`."""

    axis: int
    start: int
    stop: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a weight of shape `whole`."""
        sizes = list(whole)
        sizes[self.axis] = self.stop - self.start
        return tuple(sizes)

    def splits_blocks(self, qtype: QuantType) -> int:
        """Columns of the blocks that the cut would split, or 0.

        FP8 blocks are none of them: each part repeats the scale.
        """
        columns = FP4_GROUPS.get(qtype, qtype.block_weights)
        is_split = self.axis == COLUMNS and (self.start % columns or self.stop % columns)
        return columns if is_split else 0


class ShardRules(Struct, frozen=True):
    """How a family of models is split.

    Attributes:
        refuse: why sizes of a model cannot be split so, as a clause; empty if they can.
        cut: the part of a weight that a rank holds, by our name of it; None for all of it.
    """

    refuse: Callable[[ModelConfig, Sharding], str]
    cut: Callable[[ModelConfig, Sharding, str], Cut | None]


def inner_block(width: int, size: int) -> int:
    """What an inner width is cut into: the largest block of columns of which all ranks get one.

    Args:
        width: columns, at least as many as ranks.
        size: ranks.
    """
    blocks = {qtype.block_weights for qtype in QuantType}
    return max(block for block in blocks if width % block == 0 and width // block >= size)


def indivisible(size: int, counts: dict[str, int]) -> str:
    """The first of some counts that `size` does not divide, as a clause; empty if it divides all.

    Args:
        size: processes.
        counts: by name, in words.
    """
    for name, count in counts.items():
        if count % size:
            return f"{size} does not divide its {count} {name}"
    return ""


def refuse_vocabulary(vocab_size: int, size: int) -> str:
    """Why a vocabulary is too small for so many ranks, as a clause; empty if it is not."""
    if Sharding(size - 1, size).vocab_part(vocab_size)[0] < vocab_size:
        return ""
    return f"{size} ranks cannot share {vocab_size} token ids"


def cut_stored(stored: StoredWeight, cut: Cut) -> StoredWeight:
    """Where a part of a weight is, given where all of it is."""
    shape = cut.shape(stored.shape)
    part = replace(
        stored,
        shape=shape,
        nbytes=stored.nbytes * math.prod(shape) // math.prod(stored.shape),
    )
    if cut.axis == EXPERTS:
        if all(len(names) == stored.shape[0] for names in stored.planes.values()):
            planes = {key: names[cut.start : cut.stop] for key, names in stored.planes.items()}
            return replace(part, planes=planes)
        return replace(part, experts=(cut.start, cut.stop))
    first = stored.rows if cut.axis == ROWS else stored.cols
    offset = first[0] if first is not None else 0
    bounds = (offset + cut.start, offset + cut.stop)
    part = replace(part, rows=bounds) if cut.axis == ROWS else replace(part, cols=bounds)
    if stored.qtype is not QuantType.FP8_BLOCK or len(stored.shape) == 1:
        return part
    # Blocks of the part are as large as they can be and yet within blocks of the file.
    rows, columns = stored.block
    if cut.axis == ROWS:
        rows = math.gcd(rows, bounds[0])
    else:
        columns = math.gcd(columns, bounds[0])
    return replace(part, block=(rows, columns), file_block=stored.file_block or stored.block)
