"""How DeepSeek-V4 is split: heads, output groups, experts and the vocabulary.

    wq_b, attn_sink   rows, by heads
    wo_a              rows, by output groups: heads of a group stay together
    wo_b              columns; its outputs are added
    experts           w1 and w3 by rows and w2 by columns of the inner width, or whole experts
    shared expert     rows of w1 and w3, columns of w2; its outputs join those of the experts
    embed, head       rows

All else is whole on every rank: one vector a position serves all heads, so what makes, compresses
and indexes these vectors is not split, and neither is their cache. Free of PyTorch.
"""

from __future__ import annotations

from typing import Final

from tiercel.models.config import ModelConfig
from tiercel.models.deepseek_v4 import DeepseekV4Config
from tiercel.models.sharding import (
    COLUMNS,
    EXPERTS,
    ROWS,
    Cut,
    Sharding,
    ShardRules,
    indivisible,
    refuse_vocabulary,
)


def _refuse(config: ModelConfig, sharding: Sharding) -> str:
    assert isinstance(config, DeepseekV4Config), "the registry pairs config and rules"
    counts = {"moe_intermediate_size": config.intermediate_size}
    if sharding.expert_parallel:
        counts["experts"] = config.num_experts
    if not sharding.tensor_parallel:
        return indivisible(sharding.size, counts)
    counts["attention heads"] = config.num_heads
    counts["output groups"] = config.num_output_groups
    return indivisible(sharding.size, counts) or refuse_vocabulary(config.vocab_size, sharding.size)


def _cut(config: ModelConfig, sharding: Sharding, name: str) -> Cut | None:
    assert isinstance(config, DeepseekV4Config), "the registry pairs config and rules"
    if ".ffn." in name:
        return _expert_cut(config, sharding, name)
    if not sharding.tensor_parallel:
        return None
    if name in ("embed.weight", "head.weight"):
        return Cut(ROWS, *sharding.vocab_part(config.vocab_size))
    inner = config.num_output_groups * config.o_lora_rank
    cuts = {
        "wq_b.weight": (ROWS, config.num_heads * config.head_dim),
        "attn_sink": (COLUMNS, config.num_heads),
        "wo_a.weight": (ROWS, inner),
        "wo_b.weight": (COLUMNS, inner),
    }
    found = cuts.get(name.partition(".attn.")[2])
    return None if found is None else Cut(found[0], *sharding.part(found[1]))


def _expert_cut(config: DeepseekV4Config, sharding: Sharding, name: str) -> Cut | None:
    owner, _, part = name.partition(".ffn.")[2].partition(".")
    if owner == "experts" and sharding.expert_parallel:
        return Cut(EXPERTS, *sharding.part(config.num_experts))
    if owner in ("experts", "shared_experts"):
        axis = COLUMNS if part == "w2.weight" else ROWS
        return Cut(axis, *sharding.part(config.intermediate_size))
    return None


RULES: Final = ShardRules(_refuse, _cut)
