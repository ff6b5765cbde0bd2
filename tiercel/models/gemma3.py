"""Gemma 3 (text): sandwich norms, q/k norm, GELU gate, five sliding layers to a full one.

    x0 = embedding * sqrt(hidden_size)
    x = x + norm(Wo attention(...));  x = x + norm(Wdown(gelu(Wgate h) * Wup h))

Sliding layers have a rotary base of their own and no rotary scaling. RMSNorm weights are stored as
w - 1 in Hugging Face files and as w in GGUF files.

Source: "Gemma 3 Technical Report", arXiv 2503.19786.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tiercel.errors import UnsupportedModelError
from tiercel.models.config import (
    MAX_CONTEXT,
    Architecture,
    Fields,
    ModelConfig,
    RopeConfig,
    read_hf_rope,
)

LAYERS_OF_27B = (
    62  # this size alone scales attention by hidden_size / num_heads instead of head_dim
)
DEFAULT_PATTERN = 6
SLIDING_BASE = 10000.0  # rotary base of sliding layers


def _pattern_types(num_layers: int, pattern: int) -> tuple[str, ...]:
    """Every `pattern`-th layer is full; 0 makes all sliding."""
    return tuple(
        "full" if pattern and i % pattern == pattern - 1 else "sliding" for i in range(num_layers)
    )


def _softcap(fields: Fields) -> float:
    """Files without a soft cap leave it out, or say 0."""
    key = "final_logit_softcapping"
    value = fields.get(key)
    if value is None or (isinstance(value, int | float) and value == 0):
        return 0.0
    return fields.number(key)


def _refine_gguf(config: ModelConfig, fields: Fields) -> ModelConfig:
    key = "attention.sliding_window_pattern"
    pattern = fields.get(key)
    if pattern is None or isinstance(pattern, int):
        period = fields.integer(key, 0, 2**16, DEFAULT_PATTERN)
        layer_types = _pattern_types(config.num_layers, period)
    else:
        flags = pattern.tolist() if isinstance(pattern, np.ndarray) else []
        if len(flags) != config.num_layers or not all(
            isinstance(flag, int) and flag in (0, 1) for flag in flags
        ):
            raise fields.fail(key, pattern, f"an integer or {config.num_layers} booleans")
        layer_types = tuple("sliding" if flag else "full" for flag in flags)
    scale = config.head_dim**-0.5
    if config.num_layers == LAYERS_OF_27B:
        scale = (config.hidden_size / config.num_heads) ** -0.5
    base = fields.number("rope.freq_base_swa", SLIDING_BASE)
    return replace(
        config,
        layer_types=layer_types,
        sliding_window=fields.integer("attention.sliding_window", 1, MAX_CONTEXT),
        rope_sliding=RopeConfig(base, config.rope.rotary_dim),
        attention_scale=scale,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=_softcap(fields),
    )


def _refine_hf(config: ModelConfig, fields: Fields) -> ModelConfig:
    if fields.boolean("use_bidirectional_attention", default=False):
        raise UnsupportedModelError(
            f"{fields.file}: use_bidirectional_attention is true.",
            hint="Tiercel runs this family with causal attention only.",
        )
    names = fields.get("layer_types")
    if names is None:
        period = fields.integer("sliding_window_pattern", 0, 2**16, DEFAULT_PATTERN)
        layer_types = _pattern_types(config.num_layers, period)
    else:
        known = {"sliding_attention": "sliding", "full_attention": "full"}
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or len(names) != config.num_layers or any(n not in known for n in names):
            raise fields.fail("layer_types", names, f"{config.num_layers} of {sorted(known)}")
        layer_types = tuple(known[name] for name in names)
    base = fields.number("rope_local_base_freq", SLIDING_BASE)
    if isinstance(fields.mapping("rope_parameters").get("sliding_attention"), dict):
        rope_sliding = read_hf_rope(fields, config.head_dim, base, "sliding_attention")
    else:
        rope_sliding = RopeConfig(base, config.rope.rotary_dim)
    return replace(
        config,
        layer_types=layer_types,
        sliding_window=fields.integer("sliding_window", 1, MAX_CONTEXT, 4096),
        rope_sliding=rope_sliding,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=_softcap(fields),
    )


ARCHITECTURE = Architecture(
    name="gemma3",
    activation="gelu_tanh",
    qk_norm=True,
    sandwich_norms=True,
    hf_norm_offset=1.0,
    hf_rope_theta=1e6,
    hf_ties_head=True,
    hf_activation_key="hidden_activation",
    hf_names_override={
        "post_attention_layernorm": "post_attn_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    },
    refine_gguf=_refine_gguf,
    refine_hf=_refine_hf,
)
