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
from tiercel.models.sharding import WHOLE, Sharding, sharding_kind

if TYPE_CHECKING:
    from tiercel.models.source import ModelSource
    from tiercel.quant_types import QuantType

SIZES: Final = tuple(1 << power for power in range(MAX_RANKS.bit_length()))

_OWN_ROWS: Final = "data_parallel_attention"
# The option that asks for each kind of sharding.
_OPTIONS: Final = {
    WHOLE: "",
    sharding_kind(expert_parallel=True, data_parallel_attention=False): "expert_parallel",
    sharding_kind(expert_parallel=False, data_parallel_attention=True): _OWN_ROWS,
}


def check_sharding(source: ModelSource, size: int, kind: Sharding = WHOLE) -> None:
    """Refuse a number of ranks that cannot share a model.

    Args:
        source: a checked file.
        size: ranks; 1 is always right where `kind` is `WHOLE`.
        kind: how they do, see `sharding_kind`.

    Raises:
        ArgumentError: says what does not divide, and which sizes do.
    """
    option = _OPTIONS[kind.of(0, 1)]
    reason = refuse_sharding(source, size, kind)
    if not reason and (size > 1 or not option):
        return
    # One rank has nothing to share, so an option asks for more of them.
    fitting = [count for count in possible_sizes(source, kind) if count > 1 or not option]
    shown = f"Use {' or '.join(map(str, fitting))}"
    if not fitting:
        instead = "Run whole engines (replicas), or leave" if option == _OWN_ROWS else "Leave"
        shown = f"{instead} {option} out"
    elif option:
        shown += f", or no {option}"
    message = f"tensor_parallel_size={size}: {source.path.name} cannot be split so: {reason}."
    if not reason:
        message = f"tensor_parallel_size={size}: {option}=True needs several ranks."
    raise ArgumentError(message, hint=f"{shown}.")


def possible_sizes(source: ModelSource, kind: Sharding = WHOLE) -> list[int]:
    """Those of `SIZES` that can share a model."""
    return [size for size in SIZES if not refuse_sharding(source, size, kind)]


def refuse_sharding(source: ModelSource, size: int, kind: Sharding = WHOLE) -> str:
    """Why so many ranks cannot share a model, as a clause; empty if they can."""
    if size not in SIZES:
        return f"{size} is not a power of two up to {MAX_RANKS}"
    if size == 1:
        return ""
    ranks = [kind.of(rank, size) for rank in range(size)]
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
