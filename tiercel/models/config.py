"""A model's shape as data, read from GGUF metadata or a Hugging Face `config.json`.

Free of PyTorch: a file can be judged before anything heavy is imported. What differs between
families is an `Architecture` record (`models/llama.py`, `qwen3.py`, `gemma3.py`); what differs
between models of one family is a `ModelConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Final

from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.loader.mapped import TensorInfo

MAX_LAYERS, MAX_WIDTH, MAX_HEADS, MAX_CONTEXT = 1024, 2**17, 1024, 2**26
MAX_VOCAB, MAX_INNER = 2**24, 2**20
# Of a pair over the original context, which beta_slow and beta_fast compare: more overflow float64.
_YARN_TURNS: Final = (1e-6, 1e6)
# Fields of GGUF files on rotary scaling beyond factor and context, with the one value that runs.
_ROPE_FIXED = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}
_ROPE_FIXED |= {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
# Activations by their names in transformers.
_HF_ACTIVATIONS = {"silu": "silu", "swish": "silu"}
_HF_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: angle = position * base^(-2i / rotary_dim), scaled.

    Attributes:
        base: finite, above 0.
        rotary_dim: leading dimensions of a head that rotate, even.
        scaling: ``none``, ``linear``, ``yarn`` or ``llama3``.
        factor: ratio of the context to the original one, >= 1; unused with ``none``.
        original_context: tokens of the original training, for ``yarn`` and ``llama3``.
        low_freq_factor: ``llama3`` only.
        high_freq_factor: ``llama3`` only.
        attention_factor: ``yarn``: multiplies cos and sin; None for 1 + 0.1 ln(factor).
        beta_fast: ``yarn``: pairs that turn more often over the original context are kept.
        beta_slow: ``yarn``: pairs that turn less often are divided by the factor.
        truncate: ``yarn``: the bounds between both are rounded to whole pairs, outwards.
    """

    base: float
    rotary_dim: int
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder; other models add fields in a class of their own.

    Attributes:
        arch: name in the registry.
        vocab_size: rows of the embedding table.
        activation: ``silu`` or ``gelu_tanh``.
        rope: of full-attention layers.
        layer_types: ``full`` or ``sliding`` per layer; other models have words of their own.
        rope_sliding: of sliding layers, if any.
        sliding_window: a query at position p sees keys p - window + 1 .. p; 0 without such layers.
        attention_scale: multiplies q k^T.
        embedding_scale: multiplies the embedding rows.
        logit_softcap: c in c * tanh(logits / c); 0 is none.
        qk_norm: RMSNorm of each q and k head, before the rotation.
        qkv_bias: q, k, v projections have biases.
        sandwich_norms: RMSNorm of attention and MLP outputs before the residual add.
        num_mtp_layers: 1 if the file has a head that drafts the token after next (`mtp.py`).
        no_draft_head: why a head that one may expect cannot draft, as a clause; else empty.
    """

    arch: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_position: int
    tie_embeddings: bool
    activation: str
    rope: RopeConfig
    layer_types: tuple[str, ...]
    rope_sliding: RopeConfig | None = None
    sliding_window: int = 0
    attention_scale: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    qk_norm: bool = False
    qkv_bias: bool = False
    sandwich_norms: bool = False
    num_mtp_layers: int = 0
    no_draft_head: str = ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The record of a family of models: what it does differently. A model file defines only this.

    Attributes:
        name: the registry's and GGUF's name (`general.architecture`).
        interleaved_gguf: its GGUF files hold q and k rows permuted for rotation of adjacent pairs.
        hf_norm_offset: added to RMSNorm weights of Hugging Face files (GGUF files include it).
        hf_names_override: tensor suffixes of Hugging Face files that differ from the usual ones.
        hf_rope_theta: rotary base where a `config.json` names none.
        hf_ties_head: whether a `config.json` without the field means that there is no head tensor.
        hf_activation_key: the field of a `config.json` that names the activation.
        refine_gguf: completes a config from GGUF metadata.
        refine_hf: completes a config from a `config.json`.
        model: ``module:Class`` that runs it.
        read_hf: reads the config from a `config.json` and its name, in place of `from_hf`.
        read_gguf: reads it from the metadata, the name and the tensor table of a GGUF file, in
            place of `from_gguf`.
        find_weights: ``module:function`` that checks the tensor table of a file and says where each
            weight is (`models/stored.py:FindWeights`), in place of the names of dense families.
        shards: ``module`` with `RULES` of how its weights are split (`models/sharding.py`).
        auto_dtypes: what ``auto`` means by type of device, where it is not the usual dtype.
        cache_bytes: bytes that one sequence keeps, of the arguments of `footprint.cache_bytes`.
    """

    name: str
    activation: str = "silu"
    qk_norm: bool = False
    qkv_bias: bool = False
    sandwich_norms: bool = False
    interleaved_gguf: bool = False
    hf_norm_offset: float = 0.0
    hf_names_override: Mapping[str, str] = field(default_factory=dict)
    hf_rope_theta: float = 10000.0
    hf_ties_head: bool = False
    hf_activation_key: str = "hidden_act"
    refine_gguf: Callable[[ModelConfig, Fields], ModelConfig] | None = None
    refine_hf: Callable[[ModelConfig, Fields], ModelConfig] | None = None
    model: str = "tiercel.models.decoder:Decoder"
    read_hf: Callable[[Mapping[str, Any], str], ModelConfig] | None = None
    read_gguf: Callable[[Mapping[str, Any], str, Mapping[str, TensorInfo]], ModelConfig] | None = (
        None
    )
    find_weights: str = ""
    shards: str = "tiercel.models.dense_shards"
    auto_dtypes: Mapping[str, str] = field(default_factory=dict)
    cache_bytes: Callable[[ModelConfig, int, str, str, str], int] | None = None


class Fields:
    """Typed, bounded access to a mapping from a file; a refusal names file, key, value and rule."""

    def __init__(self, values: Mapping[str, Any], file: str, prefix: str = "") -> None:
        self.values = values
        self.file = file
        self.prefix = prefix

    def fail(self, key: str, value: object, rule: str) -> ModelFormatError:
        """The error for a value that breaks `rule`."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ModelFormatError(
            f"{self.file}: {self.prefix}{key} is {shown}.", hint=f"It must be {rule}."
        )

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not is_integer(value) or not low <= value <= high:
            raise self.fail(key, value, f"an integer {low} to {high}")
        return int(value)

    def layer_integer(
        self, key: str, high: int, num_blocks: int, default: int | None = None
    ) -> int:
        """An integer in [1, high], or an array of one per block that are all equal."""
        value = self.get(key)
        if isinstance(value, str | Mapping) or not hasattr(value, "__len__"):
            return self.integer(key, 1, high, default)
        is_right = all(is_integer(entry) and 1 <= entry <= high for entry in value)
        if len(value) != num_blocks or not is_right:
            raise self.fail(key, list(value), f"{num_blocks} integers 1 to {high}")
        if len({int(entry) for entry in value}) > 1:
            raise UnsupportedModelError(
                f"{self.file}: {self.prefix}{key} differs from layer to layer.",
                hint="Tiercel runs models whose layers have equal sizes.",
            )
        return int(value[0])

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float = math.inf
    ) -> float:
        """A finite number with low < value < high."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low < value < high:
            raise self.fail(key, value, f"a finite number above {low:g} and below {high:g}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, value, "text")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false")
        return value

    def mapping(self, key: str) -> Fields:
        """A nested mapping (empty if absent), whose errors name the path."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.fail(key, value, "an object")
        nested = {f"{self.prefix}{key}.{name}": item for name, item in (value or {}).items()}
        return Fields(nested, self.file, f"{self.prefix}{key}.")


def is_integer(value: object) -> bool:
    """Whether a value of a file is an integer, which true and false are not."""
    # Entries of metadata arrays are numpy integers, which are not `int`.
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_config(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Check the rules that concern more than one field."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFormatError(
            f"{fields.file}: {config.num_heads} heads cannot share "
            f"{config.num_kv_heads} key/value heads.",
            hint="The number of key/value heads must divide the number of heads.",
        )
    for rope in (config.rope, config.rope_sliding):
        if rope is not None:
            check_rope(rope, config.head_dim, fields.file)
    return config


def check_rope(rope: RopeConfig, head_dim: int, file: str) -> None:
    """Check the rules of a rotary embedding that concern more than one field."""
    if rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= head_dim:
        raise ModelFormatError(
            f"{file}: {rope.rotary_dim} rotary dimensions in a head of {head_dim}.",
            hint="The number must be even, at least 2 and at most the head size.",
        )
    # Both scalings divide by what is 0 here.
    if rope.scaling == "yarn" and rope.base <= 1:
        raise ModelFormatError(
            f"{file}: rotary scaling yarn with a base of {rope.base:g}.",
            hint="The base must be above 1.",
        )
    low, high = _YARN_TURNS
    if rope.scaling == "yarn" and not low <= rope.beta_slow < rope.beta_fast <= high:
        raise ModelFormatError(
            f"{file}: rotary scaling yarn with beta_fast {rope.beta_fast:g} and beta_slow "
            f"{rope.beta_slow:g}.",
            hint=f"They must be {low:g} to {high:g}, and the fast one above the slow one.",
        )
    if rope.scaling == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelFormatError(
            f"{file}: rotary scaling llama3 with low_freq_factor {rope.low_freq_factor:g} and "
            f"high_freq_factor {rope.high_freq_factor:g}.",
            hint="The high one must be above the low one.",
        )


def from_gguf(
    architecture: Architecture, metadata: Mapping[str, Any], file: str, vocab_size: int
) -> ModelConfig:
    """Read a config from GGUF metadata.

    Args:
        architecture: the family, found by `general.architecture`.
        metadata: all keys of the file.
        file: the file's name, for errors.
        vocab_size: rows of `token_embd.weight`, which decide (not the key).

    Raises:
        ModelFormatError: a key is missing, of the wrong type or out of range.
        UnsupportedModelError: a sound value that Tiercel does not run.

    Source: the GGUF format document of ggml (docs/gguf.md).
    """
    fields = Fields(metadata, file, f"{architecture.name}.")
    hidden_size = fields.integer("embedding_length", 1, MAX_WIDTH)
    num_mtp_layers = fields.integer("nextn_predict_layers", 0, 1, 0)  # counted as blocks too
    num_blocks = fields.integer("block_count", 1 + num_mtp_layers, MAX_LAYERS)
    num_layers = num_blocks - num_mtp_layers
    num_heads = fields.layer_integer("attention.head_count", MAX_HEADS, num_blocks)
    head_dim = fields.integer(
        "attention.key_length", 1, MAX_WIDTH, max(1, hidden_size // num_heads)
    )
    value_dim = fields.integer("attention.value_length", 1, MAX_WIDTH, head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{file}: keys have {head_dim} dimensions and values {value_dim}.",
            hint="Tiercel runs models whose keys and values have equal sizes.",
        )
    config = ModelConfig(
        arch=architecture.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.layer_integer(
            "attention.head_count_kv", MAX_HEADS, num_blocks, num_heads
        ),
        head_dim=head_dim,
        intermediate_size=fields.layer_integer("feed_forward_length", MAX_INNER, num_blocks),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        max_position=fields.integer("context_length", 1, MAX_CONTEXT),
        tie_embeddings=False,  # decided by the presence of output.weight
        activation=architecture.activation,
        rope=_rope_from_gguf(fields, head_dim),
        layer_types=("full",) * num_layers,
        attention_scale=head_dim**-0.5,
        qk_norm=architecture.qk_norm,
        qkv_bias=architecture.qkv_bias,
        sandwich_norms=architecture.sandwich_norms,
        num_mtp_layers=num_mtp_layers,
    )
    if architecture.refine_gguf is not None:
        config = architecture.refine_gguf(config, fields)
    return check_config(config, fields)


def _rope_from_gguf(fields: Fields, head_dim: int) -> RopeConfig:
    base = fields.number("rope.freq_base", 10000.0)
    rotary_dim = fields.integer("rope.dimension_count", 2, head_dim, head_dim)
    for name, fixed in _ROPE_FIXED.items():
        value = fields.number(f"rope.scaling.{name}", fixed, low=-math.inf)
        if value != fixed:
            raise UnsupportedModelError(
                f"{fields.file}: {fields.prefix}rope.scaling.{name} is {value:g}.",
                hint=f"Tiercel knows {fixed:g} alone.",
            )
    # Older files have a factor without a type, also under an older key: it is linear.
    key = "rope.scaling.factor"
    if fields.get(key) is None and fields.get("rope.scale_linear") is not None:
        key = "rope.scale_linear"
    untyped = "none" if fields.get(key) is None else "linear"
    scaling = fields.text("rope.scaling.type", untyped)
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{fields.file}: {fields.prefix}rope.scaling.type is {scaling[:40]!r}.",
            hint="Tiercel knows none, linear and yarn.",
        )
    if scaling == "none":
        return RopeConfig(base, rotary_dim)
    factor = fields.number(key)
    default = None if scaling == "yarn" else 0  # linear has no use for it
    original = fields.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, default)
    return RopeConfig(base, rotary_dim, scaling, factor, original)


def from_hf(architecture: Architecture, values: Mapping[str, Any], file: str) -> ModelConfig:
    """Read a config from a Hugging Face `config.json`, older or newer.

    Raises:
        ModelFormatError: a field is missing, of the wrong type or out of range.
        UnsupportedModelError: a sound value that Tiercel does not run.

    Source: the configuration classes of transformers (LlamaConfig, Qwen2Config, Qwen3Config,
    Gemma3TextConfig).
    """
    fields = Fields(values, file)
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    head_dim = fields.integer("head_dim", 1, MAX_WIDTH, max(1, hidden_size // num_heads))
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    config = ModelConfig(
        arch=architecture.name,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INNER),
        norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
        max_position=fields.integer("max_position_embeddings", 1, MAX_CONTEXT),
        tie_embeddings=fields.boolean("tie_word_embeddings", default=architecture.hf_ties_head),
        activation=_hf_activation(architecture, fields),
        rope=read_hf_rope(
            fields, head_dim, fields.number("rope_theta", architecture.hf_rope_theta)
        ),
        layer_types=("full",) * num_layers,
        attention_scale=head_dim**-0.5,
        qk_norm=architecture.qk_norm,
        qkv_bias=architecture.qkv_bias,
        sandwich_norms=architecture.sandwich_norms,
        num_mtp_layers=fields.integer("num_nextn_predict_layers", 0, 1, 0),
    )
    if architecture.refine_hf is not None:
        config = architecture.refine_hf(config, fields)
    return check_config(config, fields)


def _hf_activation(architecture: Architecture, fields: Fields) -> str:
    key = architecture.hf_activation_key
    if fields.get(key) is None:
        return architecture.activation
    name = fields.text(key, "")
    if name not in _HF_ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.file}: {key} is {name[:40]!r}.",
            hint=f"Tiercel knows {', '.join(_HF_ACTIVATIONS)}.",
        )
    return _HF_ACTIVATIONS[name]


def read_hf_rope(
    fields: Fields, head_dim: int, base: float, kind: str = "full_attention"
) -> RopeConfig:
    """The rotary embedding of layers of `kind`.

    The older form is `rope_theta` with `rope_scaling`; the newer one `rope_parameters`, either flat
    or one object per layer type.

    Args:
        fields: of the `config.json`.
        head_dim: size of a head.
        base: where the parameters name none.
        kind: of the layers.
    """
    parameters = fields.mapping("rope_parameters")
    if isinstance(parameters.get(kind), Mapping):
        parameters = parameters.mapping(kind)
    if not parameters.values:
        parameters = fields.mapping("rope_scaling")
    base = parameters.number("rope_theta", base)
    scaling = parameters.text("rope_type", parameters.text("type", "default"))
    share = parameters.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if scaling == "default":
        return RopeConfig(base, rotary_dim)
    if scaling not in ("linear", "yarn", "llama3"):
        raise UnsupportedModelError(
            f"{fields.file}: rope type {scaling[:40]!r}.",
            hint="Tiercel knows default, linear, yarn and llama3.",
        )
    factor = parameters.number("factor")
    if scaling == "linear":
        return RopeConfig(base, rotary_dim, scaling, factor)
    fallback = fields.integer("max_position_embeddings", 1, MAX_CONTEXT)
    key = "original_max_position_embeddings"  # in older files beside the parameters
    fallback = fields.integer(key, 1, MAX_CONTEXT, fallback)
    original = parameters.integer(key, 1, MAX_CONTEXT, fallback)
    rope = RopeConfig(base, rotary_dim, scaling, factor, original)
    if scaling == "llama3":
        return replace(
            rope,
            low_freq_factor=parameters.number("low_freq_factor", 1.0),
            high_freq_factor=parameters.number("high_freq_factor", 4.0),
        )
    return replace(
        rope,
        attention_factor=_attention_factor(parameters, factor),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.boolean("truncate", default=True),
    )


def _attention_factor(parameters: Fields, factor: float) -> float | None:
    """Of YaRN; the ratio of two scales counts only where both are there and not 0."""
    if parameters.get("attention_factor") is not None:
        return parameters.number("attention_factor")
    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        return None
    growth = 0.1 * math.log(max(1.0, factor))
    mscale, of_all = parameters.number("mscale"), parameters.number("mscale_all_dim")
    return (1 + mscale * growth) / (1 + of_all * growth)
