"""The floor (roofline): the least time that a device allows for the trials of `bench speed`.

A step reads every matrix once, as the file stores it, and the keys and values that its tokens see.
A token costs two operations for each weight of a layer and four for each key and dimension of a
head; the head costs only for logits that are used. The floor is the longer of the bytes at the
read bandwidth and the operations at the rate of a large product, on a CPU the fastest product that
a model may use. Activations are left out.

Of routed experts a step reads those that its tokens choose on average, if all are as likely. With
compressed attention a token sees its window, entries in place of earlier tokens, at most so many,
and the index keys of all entries that it chooses from.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from tiercel.models.deepseek_v4 import (
    CSA_RATIO,
    HCA_RATIO,
    KINDS,
    DeepseekV4Config,
    entry_bytes,
)

if TYPE_CHECKING:
    from tiercel.models.source import ModelSource
    from tiercel.profiling.device_timing import Ceilings


class Entries(msgspec.Struct, frozen=True, kw_only=True):
    """Compressed entries in some layers of a model.

    Attributes:
        layers: how many layers.
        ratio: tokens of an entry.
        most: entries that a token sees at most; 0 for all.
        index_bytes: of an entry's index key; 0 where all entries are seen.
        index_width: heads of the index times their dimensions.
    """

    layers: int
    ratio: int
    most: int = 0
    index_bytes: int = 0
    index_width: int = 0


class ModelCost(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and operations of a model's steps.

    Attributes:
        weight_bytes: bytes of layers and head, as the file stores them, without routed experts.
        expert_bytes: bytes of all routed experts.
        expert_share: share of them that one token chooses.
        layer_weights: number of weights in the matrices of all layers, of experts a token's.
        head_weights: number of weights of the head.
        key_bytes: bytes of keys and values of one position in one layer.
        attention_width: number of heads times their dimensions.
        windows: number of layers by the number of keys that a token sees in them; 0 is all.
        entries: compressed entries that it sees beside them.
    """

    weight_bytes: int
    layer_weights: int
    head_weights: int
    key_bytes: int
    attention_width: int
    windows: dict[int, int]
    expert_bytes: int = 0
    expert_share: float = 1.0
    entries: tuple[Entries, ...] = ()


def model_cost(source: ModelSource, key_itemsize: int) -> ModelCost:
    """The cost of a model whose keys and values take `key_itemsize` bytes each."""
    config = source.config
    if isinstance(config, DeepseekV4Config):
        return _sparse_cost(source, config)
    head = source.tensors[source.names.get("head.weight", source.names["embed.weight"])]
    used = {f"layers.{i}" for i in range(config.num_layers)}  # without the MTP head
    layers = [
        source.tensors[name]
        for ours, name in source.names.items()
        if ours.rpartition(".")[0].rpartition(".")[0] in used
    ]
    seen = Counter(config.sliding_window if kind == "sliding" else 0 for kind in config.layer_types)
    return ModelCost(
        weight_bytes=head.nbytes + sum(info.nbytes for info in layers),
        layer_weights=sum(out * inner for out, inner in (i.shape for i in layers) if out > 1),
        head_weights=head.shape[0] * head.shape[1],
        key_bytes=2 * config.num_kv_heads * config.head_dim * key_itemsize,
        attention_width=config.num_heads * config.head_dim,
        windows=dict(seen),
    )


def _sparse_cost(source: ModelSource, config: DeepseekV4Config) -> ModelCost:
    """The same of DeepSeek-V4, in the encoded cache."""
    share = config.num_experts_per_tok / config.num_experts
    head = source.stored["head.weight"]
    num_bytes, expert_bytes, num_weights = head.nbytes, 0, 0.0
    for name, weight in source.stored.items():
        if not name.startswith("layers.") or weight.limit:
            continue
        is_stack = len(weight.shape) == 3
        expert_bytes += weight.nbytes if is_stack else 0
        num_bytes += 0 if is_stack else weight.nbytes
        if len(weight.shape) > 1:
            num_weights += (share if is_stack else 1.0) * math.prod(weight.shape)
    entry, index_key = entry_bytes(config, "fp8")
    width = config.index_num_heads * config.index_head_dim
    counts = Counter(config.layer_types)
    csa = {"most": config.index_topk, "index_bytes": index_key, "index_width": width}
    return ModelCost(
        weight_bytes=num_bytes,
        expert_bytes=expert_bytes,
        expert_share=share,
        layer_weights=round(num_weights),
        head_weights=math.prod(head.shape),
        key_bytes=entry,
        attention_width=config.num_heads * config.head_dim,
        windows={config.sliding_window: config.num_layers},
        entries=(
            Entries(layers=counts[KINDS[CSA_RATIO]], ratio=CSA_RATIO, **csa),
            Entries(layers=counts[KINDS[HCA_RATIO]], ratio=HCA_RATIO),
        ),
    )


def floor_seconds(
    cost: ModelCost, ceilings: Ceilings, batch: int, prompt_tokens: int, steps: int
) -> float:
    """The least time of a trial.

    Args:
        cost: cost of the model.
        ceilings: measured rates of the device.
        batch: number of sequences.
        prompt_tokens: tokens of each sequence: the timed prompt, or the cache before the steps.
        steps: steps of one token for each sequence; 0 for the prompt.
    """
    if steps:
        contexts = range(prompt_tokens + 1, prompt_tokens + steps + 1)
        passes, tokens, logits = steps, batch * steps, batch * steps
    else:
        contexts = range(1, prompt_tokens + 1)
        passes, tokens, logits = 1, batch * prompt_tokens, batch
    seen = sum(
        count * sum(min(length, window or length) for length in contexts)
        for window, count in cost.windows.items()
    )
    index_bytes, index_flops = 0, 0
    for kind in cost.entries:
        counts = [length // kind.ratio for length in contexts]
        seen += kind.layers * sum(min(count, kind.most or count) for count in counts)
        index_bytes += kind.layers * sum(counts) * kind.index_bytes
        index_flops += 2 * kind.layers * sum(counts) * kind.index_width
    chosen: float = 1 - (1 - cost.expert_share) ** (tokens / passes)
    num_bytes = passes * (cost.weight_bytes + chosen * cost.expert_bytes)
    num_bytes += batch * (seen * cost.key_bytes + index_bytes) if steps else 0
    flops = 2 * (tokens * cost.layer_weights + logits * cost.head_weights)
    flops += batch * (4 * seen * cost.attention_width + index_flops)
    return max(num_bytes / ceilings.read_gbps / 1e9, flops / ceilings.tflops / 1e12)
