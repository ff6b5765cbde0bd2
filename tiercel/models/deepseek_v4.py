"""DeepSeek-V4: its config, read from a `config.json` or GGUF metadata. Free of PyTorch.

    streams = four copies of the embedding; each block mixes them before and after attention and FFN
    attention: one key/value vector a position for all heads; a window, and beside it
        ratio 0 (``window``)  nothing
        ratio 4 (``csa``)     the best `index_topk` entries of 4 tokens each, chosen by an indexer
        ratio 128 (``hca``)   every entry of 128 tokens
    FFN: `num_experts_per_tok` of `num_experts` experts, by the token id in the first
        `num_hash_layers` layers, by scores after them, and one shared expert

A released `config.json` lists `compress_ratios` and `num_hash_layers`; transformers writes
`layer_types`, `mlp_layer_types`, `compress_rates`, `partial_rotary_factor` and `rope_parameters` of
``main`` and ``compress`` in their place. GGUF files have keys under ``deepseek4.``.

Source: the inference code published with the checkpoints; transformers (DeepseekV4Config);
llama.cpp (src/models/deepseek4.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, TypeVar

from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.loader.mapped import TensorInfo
from tiercel.models.config import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_INNER,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Architecture,
    Fields,
    ModelConfig,
    RopeConfig,
    check_config,
    check_rope,
    is_integer,
)
from tiercel.quant_types import INDEX_GROUP, KV_GROUP, SCALE_PAD

BLOCK_SIZE: Final = 128  # tokens of a cache block: the least that both ratios divide
CSA_RATIO: Final = 4
HCA_RATIO: Final = 128
KINDS: Final = {0: "window", CSA_RATIO: "csa", HCA_RATIO: "hca"}
NUM_STREAMS: Final = 4
FP4_COLUMNS: Final = 32  # of a scale of MXFP4
MAX_EXPERTS: Final = 4096
MAX_WINDOW: Final = 4096  # a step has a table of its tokens by the positions of their windows
MAX_LIMIT: Final = 1e30  # where gate and up are clamped: a float32
NO_DSPARK: Final = "this checkpoint's block-draft head (dspark) is not supported"

_LAYER_TYPES: Final = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}
_MLP_TYPES: Final = {"hash_moe": True, "moe": False}
_RATIO_RULE: Final = "0 (window only), 4 or 128"
# Fields of a `config.json` with the one value that runs, which is also the default.
_FIXED_HF: Final[dict[str, Any]] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_FIXED_GGUF: Final[dict[str, Any]] = {
    "attention.head_count_kv": 1,
    "expert_shared_count": 1,
    "expert_gating_func": 4,  # sqrtsoftplus
    "expert_weights_norm": True,
}
_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config(ModelConfig):
    """The shape of DeepSeek-V4.

    Of the fields of `ModelConfig`, `layer_types` has ``window``, ``csa`` or ``hca`` per main layer,
    `rope` is that of window layers, `sliding_window` that of all layers, `intermediate_size` that
    of an expert, and `num_mtp_layers` is 1 only if the file has the block.

    Attributes:
        num_streams: residual streams.
        sinkhorn_iters: row and column normalisations of the mix of streams, the first included.
        hc_eps: added in them.
        q_lora_rank: width between the two query projections.
        num_output_groups: groups of heads with a first output projection each.
        o_lora_rank: its rows in one group.
        rotary_dim: the last dimensions of a head, which rotate in adjacent pairs.
        num_experts: routed experts of a layer.
        num_experts_per_tok: of them for a token.
        num_shared_experts: experts for every token, 1.
        routed_scaling_factor: multiplies the normed weights of routed experts.
        swiglu_limit: routed experts clamp gate and up at it; None: no clamp.
        shared_swiglu_limit: the same of the shared expert.
        index_num_heads: of the indexer.
        index_head_dim: of the indexer, a power of two.
        index_topk: entries that it chooses.
        compress_ratios: 0, 4 or 128 for each main layer, then for the MTP block if there is one.
        num_hash_layers: the first layers, which route by token id.
        rope_compress: of layers with compressed entries.
        fp8_block: (rows, columns) of a scale of FP8 weights.
    """

    num_streams: int
    sinkhorn_iters: int
    hc_eps: float
    q_lora_rank: int
    num_output_groups: int
    o_lora_rank: int
    rotary_dim: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    routed_scaling_factor: float
    swiglu_limit: float | None
    shared_swiglu_limit: float | None
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    compress_ratios: tuple[int, ...]
    num_hash_layers: int
    rope_compress: RopeConfig
    fp8_block: tuple[int, int]

    @property
    def can_encode_cache(self) -> bool:
        """Whether vectors and index keys are whole groups of the released cache entries."""
        plain = self.head_dim - self.rotary_dim
        return plain > 0 and plain % KV_GROUP == 0 and self.index_head_dim % INDEX_GROUP == 0


# --- config.json -------------------------------------------------------------------------------


def read_hf(values: Mapping[str, Any], file: str) -> DeepseekV4Config:
    """Read a config from a `config.json`, as released or as transformers writes it.

    Args:
        values: of the file.
        file: its name, for errors.

    Raises:
        ModelFormatError: a field is missing, of the wrong type or out of range.
        UnsupportedModelError: a sound value that Tiercel does not run.
    """
    fields = Fields(values, file)
    _check_fixed(fields, _FIXED_HF)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    has_dspark = any(key.startswith("dspark_") for key in values)
    # Checkpoints with that head count its blocks in a field of their own, or here.
    num_mtp_layers = 0 if has_dspark else _num_mtp_layers(fields, "num_nextn_predict_layers")
    head_dim = fields.integer("head_dim", 2, MAX_WIDTH)
    rotary_dim = _hf_rotary_dim(fields, head_dim)
    rope, rope_compress = _hf_ropes(fields, rotary_dim)
    limit = _limit(fields, "swiglu_limit")
    ratios = _hf_ratios(fields, num_layers, num_mtp_layers)
    config = DeepseekV4Config(
        arch="deepseek4",
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=fields.integer("hidden_size", 1, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=fields.integer("num_attention_heads", 1, MAX_HEADS),
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_INNER),
        norm_eps=fields.number("rms_norm_eps", high=1.0),
        max_position=fields.integer("max_position_embeddings", 1, MAX_CONTEXT),
        tie_embeddings=False,
        activation="silu",
        rope=rope,
        layer_types=tuple(KINDS[ratio] for ratio in ratios[:num_layers]),
        sliding_window=fields.integer("sliding_window", 1, MAX_WINDOW),
        attention_scale=head_dim**-0.5,
        num_mtp_layers=num_mtp_layers,
        no_draft_head=NO_DSPARK if has_dspark else "",
        num_streams=_num_streams(fields, "hc_mult"),
        sinkhorn_iters=fields.integer("hc_sinkhorn_iters", 1, 1000),
        hc_eps=fields.number("hc_eps", high=1.0),
        q_lora_rank=fields.integer("q_lora_rank", 1, MAX_WIDTH),
        num_output_groups=fields.integer("o_groups", 1, MAX_HEADS),
        o_lora_rank=fields.integer("o_lora_rank", 1, MAX_WIDTH),
        rotary_dim=rotary_dim,
        num_experts=fields.integer("n_routed_experts", 1, MAX_EXPERTS),
        num_experts_per_tok=fields.integer("num_experts_per_tok", 1, MAX_EXPERTS),
        num_shared_experts=1,
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        swiglu_limit=limit,
        shared_swiglu_limit=limit,
        index_num_heads=fields.integer("index_n_heads", 1, MAX_HEADS),
        index_head_dim=fields.integer("index_head_dim", 1, MAX_WIDTH),
        index_topk=fields.integer("index_topk", 1, MAX_CONTEXT),
        compress_ratios=ratios,
        num_hash_layers=_hf_hash_layers(fields, num_layers),
        rope_compress=rope_compress,
        fp8_block=_fp8_block(fields),
    )
    names = ("num_attention_heads", "o_groups", "index_head_dim", "num_experts_per_tok")
    _check(config, fields, names)
    if fields.get("expert_dtype") == "fp4":
        check_fp4_columns(config, file)
    return config


def _check_fixed(fields: Fields, fixed: Mapping[str, Any]) -> None:
    for key, value in fixed.items():
        found = fields.get(key)
        # GGUF files may say a number for each block.
        entries = found.tolist() if hasattr(found, "tolist") else [found]
        # True is 1 in Python, not in a file.
        wrong = [e for e in entries if e != value or isinstance(e, bool) != isinstance(value, bool)]
        if found is not None and (wrong or not entries):
            raise UnsupportedModelError(
                f"{fields.file}: {fields.prefix}{key} is {found!r:.60}.",
                hint=f"Tiercel runs DeepSeek-V4 with {value!r} alone.",
            )


def _num_mtp_layers(fields: Fields, key: str) -> int:
    count = fields.integer(key, 0, MAX_LAYERS, 0)
    if count > 1:
        raise UnsupportedModelError(
            f"{fields.file}: {fields.prefix}{key} is {count}.",
            hint="Tiercel runs DeepSeek-V4 with one such layer or none.",
        )
    return count


def _num_streams(fields: Fields, key: str) -> int:
    count = fields.integer(key, 1, MAX_WIDTH)
    if count != NUM_STREAMS:
        raise UnsupportedModelError(
            f"{fields.file}: {fields.prefix}{key} is {count}.",
            hint=f"Tiercel runs DeepSeek-V4 with {NUM_STREAMS} streams.",
        )
    return count


def _hf_rotary_dim(fields: Fields, head_dim: int) -> int:
    key = "qk_rope_head_dim"
    if fields.get(key) is None and fields.get("partial_rotary_factor") is not None:
        share = fields.number("partial_rotary_factor", high=math.nextafter(1, 2))
        return round(head_dim * share)
    return fields.integer(key, 2, head_dim)


def _hf_ropes(fields: Fields, rotary_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Rotary embeddings of window layers and of layers with compressed entries."""
    nested = fields.mapping("rope_parameters")
    if isinstance(nested.get("main"), Mapping) and isinstance(nested.get("compress"), Mapping):
        main, scaled = nested.mapping("main"), nested.mapping("compress")
        kind = main.text("rope_type", "default")
        if kind != "default":
            raise UnsupportedModelError(
                f"{fields.file}: rope_parameters.main.rope_type is {kind[:40]!r}.",
                hint="Tiercel runs DeepSeek-V4 without scaling in window layers.",
            )
        base, compress_base = main.number("rope_theta"), scaled.number("rope_theta")
    else:
        scaled = fields.mapping("rope_scaling")
        scaled = scaled if scaled.values else nested
        base, compress_base = fields.number("rope_theta"), fields.number("compress_rope_theta")
    rope = RopeConfig(base, rotary_dim)
    kind = scaled.text("rope_type", scaled.text("type", "default"))
    if kind == "default":
        return rope, RopeConfig(compress_base, rotary_dim)
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{fields.file}: rope type {kind[:40]!r}.", hint="Tiercel knows default and yarn here."
        )
    if scaled.number("attention_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{fields.file}: {scaled.prefix}attention_factor is {scaled.get('attention_factor')}.",
            hint="DeepSeek-V4 scales no attention: it must be 1 or absent.",
        )
    return rope, RopeConfig(
        compress_base,
        rotary_dim,
        "yarn",
        scaled.number("factor"),
        scaled.integer("original_max_position_embeddings", 1, MAX_CONTEXT),
        attention_factor=1.0,
        beta_fast=scaled.number("beta_fast", 32.0),
        beta_slow=scaled.number("beta_slow", 1.0),
        truncate=scaled.boolean("truncate", default=True),
    )


def _hf_ratios(fields: Fields, num_layers: int, num_mtp_layers: int) -> tuple[int, ...]:
    names = fields.get("layer_types")
    if fields.get("compress_ratios") is not None or names is None:
        return _ratios(fields, "compress_ratios", num_layers, num_mtp_layers)
    found = _named(fields, "layer_types", num_layers, _LAYER_TYPES)
    rates = fields.mapping("compress_rates")
    for name, ratio in _LAYER_TYPES.items():
        rate = rates.get(name)
        if ratio and rate is not None and rate != ratio:
            raise UnsupportedModelError(
                f"{fields.file}: compress_rates.{name} is {rate!r:.60}.",
                hint=f"Tiercel runs DeepSeek-V4 with {ratio}.",
            )
    return (*found, *(0,) * num_mtp_layers)


def _hf_hash_layers(fields: Fields, num_layers: int) -> int:
    if fields.get("num_hash_layers") is not None or fields.get("mlp_layer_types") is None:
        return fields.integer("num_hash_layers", 0, num_layers)
    is_hash = _named(fields, "mlp_layer_types", num_layers, _MLP_TYPES)
    count = sum(is_hash)
    if any(is_hash[count:]):
        raise UnsupportedModelError(
            f"{fields.file}: mlp_layer_types has hash_moe after moe.",
            hint="Layers that route by token id must be the first ones.",
        )
    return count


def _named(fields: Fields, key: str, count: int, known: Mapping[str, _Value]) -> list[_Value]:
    names = fields.get(key)
    is_list = isinstance(names, list) and len(names) == count
    if not is_list or any(not isinstance(name, str) or name not in known for name in names):
        raise fields.fail(key, names, f"{count} of {', '.join(known)}")
    return [known[name] for name in names]


def _fp8_block(fields: Fields) -> tuple[int, int]:
    key = "weight_block_size"
    quantization = fields.mapping("quantization_config")
    if quantization.get(key) is None:
        return 128, 128
    block = quantization.get(key)
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and 1 <= size <= MAX_WIDTH for size in block):
        raise quantization.fail(key, block, f"two integers 1 to {MAX_WIDTH}")
    return block[0], block[1]


# --- GGUF --------------------------------------------------------------------------------------


def read_gguf(
    metadata: Mapping[str, Any], file: str, tensors: Mapping[str, TensorInfo]
) -> DeepseekV4Config:
    """Read a config from GGUF metadata.

    Args:
        metadata: all keys of the file.
        file: its name, for errors.
        tensors: of the file: the embedding's rows are the vocabulary, and some files count an MTP
            block that they do not have.

    Raises:
        ModelFormatError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a sound value that Tiercel does not run.
    """
    fields = Fields(metadata, file, "deepseek4.")
    _check_fixed(fields, _FIXED_GGUF)
    num_layers = fields.integer("block_count", 1, MAX_LAYERS)
    num_mtp_layers = _num_mtp_layers(fields, "nextn_predict_layers")
    if not any(name.startswith(f"blk.{num_layers - 1}.nextn.") for name in tensors):
        num_mtp_layers = 0
    num_layers -= num_mtp_layers
    if not num_layers:
        raise fields.fail("block_count", 1, "above nextn_predict_layers")
    head_dim = fields.integer("attention.key_length", 2, MAX_WIDTH)
    fields.integer("attention.value_length", head_dim, head_dim, head_dim)
    rotary_dim = fields.integer("rope.dimension_count", 2, head_dim)
    limit = _layer_limit(fields, "swiglu_clamp_exp", None)
    key = "attention.compress_ratios"
    ratios = _ratios(fields, key, num_layers, num_mtp_layers)
    config = DeepseekV4Config(
        arch="deepseek4",
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=fields.integer("embedding_length", 1, MAX_WIDTH),
        num_layers=num_layers,
        num_heads=fields.integer("attention.head_count", 1, MAX_HEADS),
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=fields.integer("expert_feed_forward_length", 1, MAX_INNER),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        max_position=fields.integer("context_length", 1, MAX_CONTEXT),
        tie_embeddings=False,
        activation="silu",
        rope=RopeConfig(fields.number("rope.freq_base"), rotary_dim),
        layer_types=tuple(KINDS[ratio] for ratio in ratios[:num_layers]),
        sliding_window=fields.integer("attention.sliding_window", 1, MAX_WINDOW),
        attention_scale=head_dim**-0.5,
        num_mtp_layers=num_mtp_layers,
        num_streams=_num_streams(fields, "hyper_connection.count"),
        sinkhorn_iters=fields.integer("hyper_connection.sinkhorn_iterations", 1, 1000),
        hc_eps=fields.number("hyper_connection.epsilon", high=1.0),
        q_lora_rank=fields.integer("attention.q_lora_rank", 1, MAX_WIDTH),
        num_output_groups=fields.integer("attention.output_group_count", 1, MAX_HEADS),
        o_lora_rank=fields.integer("attention.output_lora_rank", 1, MAX_WIDTH),
        rotary_dim=rotary_dim,
        num_experts=fields.integer("expert_count", 1, MAX_EXPERTS),
        num_experts_per_tok=fields.integer("expert_used_count", 1, MAX_EXPERTS),
        num_shared_experts=1,
        routed_scaling_factor=fields.number("expert_weights_scale"),
        swiglu_limit=limit,
        shared_swiglu_limit=_layer_limit(fields, "swiglu_clamp_shexp", limit),
        index_num_heads=fields.integer("attention.indexer.head_count", 1, MAX_HEADS),
        index_head_dim=fields.integer("attention.indexer.key_length", 1, MAX_WIDTH),
        index_topk=fields.integer("attention.indexer.top_k", 1, MAX_CONTEXT),
        compress_ratios=ratios,
        num_hash_layers=fields.integer("hash_layer_count", 0, num_layers),
        rope_compress=_gguf_compress_rope(fields, rotary_dim),
        fp8_block=(128, 128),
    )
    names = ("attention.head_count", "attention.output_group_count")
    _check(config, fields, (*names, "attention.indexer.key_length", "expert_used_count"))
    return config


def _gguf_compress_rope(fields: Fields, rotary_dim: int) -> RopeConfig:
    base = fields.number("attention.compress_rope_freq_base")
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(base, rotary_dim)
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{fields.file}: {fields.prefix}rope.scaling.type is {kind[:40]!r}.",
            hint="Tiercel knows none and yarn here.",
        )
    return RopeConfig(
        base,
        rotary_dim,
        "yarn",
        fields.number("rope.scaling.factor"),
        fields.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT),
        attention_factor=1.0,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _layer_limit(fields: Fields, key: str, default: float | None) -> float | None:
    """A limit that GGUF files give once or for each layer."""
    value = fields.get(key)
    if value is None:
        return default
    if isinstance(value, str | Mapping) or not hasattr(value, "__len__"):
        return _limit(fields, key)
    if not all(isinstance(entry, Real) and not isinstance(entry, bool) for entry in value):
        raise fields.fail(key, value, "a number, or one for each block")
    entries = {float(entry) for entry in value}
    if len(entries) != 1:
        raise UnsupportedModelError(
            f"{fields.file}: {fields.prefix}{key} differs from layer to layer.",
            hint="Tiercel runs models whose layers clamp alike.",
        )
    whole = {fields.prefix + key: entries.pop()}
    return _limit(Fields(whole, fields.file, fields.prefix), key)


# --- Both --------------------------------------------------------------------------------------


def _limit(fields: Fields, key: str) -> float | None:
    limit = fields.number(key, 0.0, low=-math.inf, high=MAX_LIMIT)
    return limit if limit > 0 else None


def _ratios(fields: Fields, key: str, num_layers: int, num_mtp_layers: int) -> tuple[int, ...]:
    """The ratio of each main layer, then of the MTP block; a file may list more."""
    values = fields.get(key)
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
        raise fields.fail(key, values, f"a list of {_RATIO_RULE} for each layer")
    needed = num_layers + num_mtp_layers
    if len(values) < needed:
        blocks = f"{num_layers} layers" + (" and an MTP block" if num_mtp_layers else "")
        raise ModelFormatError(
            f"{fields.file}: {fields.prefix}{key} has {len(values)} entries for {blocks}.",
            hint=f"It must have at least {needed}.",
        )
    ratios = []
    for i, value in enumerate(values[:needed]):
        if not is_integer(value) or value not in KINDS:
            raise UnsupportedModelError(
                f"{fields.file}: {fields.prefix}{key}[{i}] is {value!r:.60}.",
                hint=f"It must be {_RATIO_RULE}.",
            )
        ratios.append(int(value))
    if num_mtp_layers and ratios[-1]:
        raise UnsupportedModelError(
            f"{fields.file}: {fields.prefix}{key}[{num_layers}], of the MTP block, is "
            f"{ratios[-1]}.",
            hint="Tiercel runs MTP blocks with a window only: it must be 0.",
        )
    return tuple(ratios)


def _check(config: DeepseekV4Config, fields: Fields, names: tuple[str, str, str, str]) -> None:
    """Check the rules that concern more than one field; `names` are the file's of four of them."""
    heads, groups, index_head_dim, experts_per_tok = (fields.prefix + name for name in names)
    check_config(config, fields)
    check_rope(config.rope_compress, config.head_dim, fields.file)
    if config.num_heads % config.num_output_groups:
        raise ModelFormatError(
            f"{fields.file}: {heads} is {config.num_heads} and {groups} "
            f"{config.num_output_groups}.",
            hint="The number of groups must divide the number of heads.",
        )
    size = config.index_head_dim
    if size & (size - 1) or size < config.rotary_dim:
        raise ModelFormatError(
            f"{fields.file}: {index_head_dim} is {size}.",
            hint=f"It must be a power of two, and at least the {config.rotary_dim} dimensions that "
            "rotate.",
        )
    if config.num_experts_per_tok > config.num_experts:
        raise ModelFormatError(
            f"{fields.file}: {experts_per_tok} is {config.num_experts_per_tok}.",
            hint=f"It must be at most the number of experts, {config.num_experts}.",
        )


def check_fp4_columns(config: DeepseekV4Config, file: str) -> None:
    """Check that rows of FP4 experts are whole groups of columns with a scale.

    Raises:
        ModelFormatError: they are not; names the key of a `config.json`.
    """
    sizes = {"hidden_size": config.hidden_size, "moe_intermediate_size": config.intermediate_size}
    for key, size in sizes.items():
        if size % FP4_COLUMNS:
            raise ModelFormatError(
                f"{file}: {key} is {size}, with FP4 experts.",
                hint=f"It must be a multiple of {FP4_COLUMNS}.",
            )


# --- Memory ------------------------------------------------------------------------------------


def entry_bytes(config: DeepseekV4Config, kv_dtype: str) -> tuple[int, int]:
    """Bytes of an entry, which is what the window keeps of a token too, and of an index key.

    ``fp8`` entries have E4M3 in groups of 64, the rotating dimensions in bfloat16, and an E8M0
    scale per group, padded to 8 bytes: 584 of 512 dimensions. Index keys have E2M1 in groups of 32.

    Args:
        config: the model's shape.
        kv_dtype: ``fp8``, ``bf16`` or ``float32``.
    """
    head_dim, index_dim = config.head_dim, config.index_head_dim
    if kv_dtype == "fp8":
        plain = head_dim - config.rotary_dim
        scales = -(-plain // (SCALE_PAD * KV_GROUP)) * SCALE_PAD
        return plain + 2 * config.rotary_dim + scales, index_dim // 2 + index_dim // INDEX_GROUP
    size = {"bf16": 2, "float32": 4}[kv_dtype]
    return head_dim * size, index_dim * size


def cache_bytes(
    config: ModelConfig, num_tokens: int, dtype: str, device_type: str, kv_dtype: str
) -> int:
    """Bytes of the blocks that one sequence holds: entries, the window, inputs of compressors.

    Sliding groups keep the blocks that their window touches. Inputs are float32 pairs of a value
    and a gate; those of HCA are kept only of the block that a token is in.
    """
    assert isinstance(config, DeepseekV4Config)
    del dtype  # entries have formats of their own
    if kv_dtype == "auto":
        kv_dtype = "fp8" if device_type == "cuda" else "float32"
    entry, index_key = entry_bytes(config, kv_dtype)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    num_csa, num_hca = config.layer_types.count("csa"), config.layer_types.count("hca")
    num_layers = config.num_layers + config.num_mtp_layers

    def kept(window: int) -> int:
        return min(num_blocks, -(-(window - 1) // BLOCK_SIZE) + 1)

    csa_entries = BLOCK_SIZE // CSA_RATIO * (entry + index_key)
    full = num_blocks * (num_csa * csa_entries + num_hca * entry)
    window = kept(config.sliding_window) * BLOCK_SIZE * num_layers * entry
    pair = 2 * 4  # a value and a gate, float32
    csa_row = 2 * (config.head_dim + config.index_head_dim) * pair  # entries overlap: twice
    csa_inputs = kept(2 * CSA_RATIO) * (BLOCK_SIZE // CSA_RATIO) * num_csa * csa_row
    hca_inputs = kept(1) * BLOCK_SIZE * num_hca * config.head_dim * pair
    return full + window + csa_inputs + hca_inputs


ARCHITECTURE = Architecture(
    name="deepseek4",
    model="tiercel.models.deepseek_v4_model:DeepseekV4",
    read_hf=read_hf,
    read_gguf=read_gguf,
    find_weights="tiercel.models.deepseek_v4_tensors:find_weights",
    shards="tiercel.models.deepseek_v4_shards",
    # Weights are decoded in each product, so a narrow dtype saves nothing on a CPU; on a GPU the
    # activations could pass the range of float16.
    auto_dtypes={"cpu": "float32", "cuda": "bfloat16"},
    cache_bytes=cache_bytes,
)
