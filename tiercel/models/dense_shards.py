"""How dense decoders are split: heads, the inner width of the MLP, and the vocabulary.

    q, k, v, gate, up   rows, so that a rank has whole heads; ranks share k and v heads where there
                        are fewer than ranks
    o, down             columns; their outputs are added. Parts of the inner width of gate, up and
                        down are whole blocks, of 256 if they are enough, and so not always equal
    embed, head         rows

Norms and the projection of the draft head are whole on every rank. Free of PyTorch.
"""

from __future__ import annotations

from typing import Final

from tiercel.models.config import ModelConfig
from tiercel.models.sharding import (
    COLUMNS,
    ROWS,
    Cut,
    Sharding,
    ShardRules,
    indivisible,
    refuse_vocabulary,
)


def _refuse(config: ModelConfig, sharding: Sharding) -> str:
    size, kv_heads = sharding.size, config.num_kv_heads
    if sharding.expert_parallel:
        return "it has no experts"
    counts = {"attention heads": config.num_heads}
    if kv_heads >= size or size % kv_heads:
        counts["key/value heads"] = kv_heads
    reason = indivisible(size, counts) or refuse_vocabulary(config.vocab_size, size)
    if not reason and config.intermediate_size < size:
        return f"{size} ranks cannot share {config.intermediate_size} inner columns"
    return reason


def _cut(config: ModelConfig, sharding: Sharding, name: str) -> Cut | None:
    if name in ("embed.weight", "head.weight"):
        return Cut(ROWS, *sharding.vocab_part(config.vocab_size))
    part, _, kind = name.rpartition(".")
    part = part.rpartition(".")[2]
    if part in ("q", "k", "v"):
        heads = (
            sharding.part(config.num_heads)
            if part == "q"
            else sharding.kv_part(config.num_kv_heads)
        )
        start, stop = (head * config.head_dim for head in heads)
        return Cut(COLUMNS if kind == "bias" else ROWS, start, stop)
    if part in ("gate", "up"):
        return Cut(ROWS, *sharding.inner_part(config.intermediate_size))
    if part == "o":
        return Cut(COLUMNS, *sharding.part(config.num_heads * config.head_dim))
    if part == "down":
        return Cut(COLUMNS, *sharding.inner_part(config.intermediate_size))
    return None


RULES: Final = ShardRules(_refuse, _cut)
