"""Whether so many ranks can share a model: answered from its header, before anything is loaded.

A size must be a power of two, divide what the family splits (`ShardRules.refuse`), and cut no block
of a storage type. Free of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from tiercel.config import MAX_RANKS
from tiercel.errors import ArgumentError
from tiercel.models.registry import shard_rules
from tiercel.models.sharding import Sharding

if TYPE_CHECKING:
    from tiercel.models.source import ModelSource
    from tiercel.quant_types import QuantType

SIZES: Final = tuple(1 << power for power in range(MAX_RANKS.bit_length()))


def check_sharding(source: ModelSource, size: int, *, expert_parallel: bool = False) -> None:
    """Refuse a number of ranks that cannot share a model.

    Args:
        source: a checked file.
        size: ranks; 1 is always right.
        expert_parallel: whether each has whole experts.

    Raises:
        ArgumentError: says what does not divide, and which sizes do.
    """
    reason = refuse_sharding(source, size, expert_parallel=expert_parallel)
    if reason:
        fitting = possible_sizes(source, expert_parallel=expert_parallel)
        shown = " or ".join(map(str, fitting))
        shown += ", or no expert_parallel" if expert_parallel else ""
        raise ArgumentError(
            f"tensor_parallel_size={size}: {source.path.name} cannot be split so: {reason}.",
            hint=f"Use {shown}.",
        )


def possible_sizes(source: ModelSource, *, expert_parallel: bool = False) -> list[int]:
    """Those of `SIZES` that can share a model."""
    refuse = refuse_sharding
    return [size for size in SIZES if not refuse(source, size, expert_parallel=expert_parallel)]


def refuse_sharding(source: ModelSource, size: int, *, expert_parallel: bool = False) -> str:
    """Why so many ranks cannot share a model, as a clause; empty if they can."""
    if size < 1 or size & (size - 1):
        return f"{size} is not a power of two"
    if size == 1:
        return ""
    ranks = [Sharding(rank, size, expert_parallel=expert_parallel) for rank in range(size)]
    reason = shard_rules(source.family).refuse(source.config, ranks[0])
    return reason or _split_block(source, ranks)


def _split_block(source: ModelSource, ranks: Sequence[Sharding]) -> str:
    """The first weight whose blocks a cut would split, as a clause; empty if there is none."""
    rules = shard_rules(source.family)
    for name, qtype, columns in _weights(source):
        cuts = [rules.cut(source.config, rank, name) for rank in ranks]
        block = max(0 if cut is None else cut.splits_blocks(qtype) for cut in cuts)
        if block:
            return (
                f"{columns} columns of {name} in {len(ranks)} parts are no whole blocks of "
                f"{block} ({qtype.name})"
            )
    return ""


def _weights(source: ModelSource) -> Iterator[tuple[str, QuantType, int]]:
    """Yield our name, the storage type and the columns of each weight."""
    for name, weight in source.stored.items():
        yield name, weight.qtype, weight.shape[-1]
    for name, stored in source.names.items():
        info = source.tensors[stored]
        yield name, info.qtype, info.shape[1]
