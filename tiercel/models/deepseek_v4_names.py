"""Tensor names of DeepSeek-V4 files, translated to ours, which are the released ones.

    released      layers.0.attn.wq_a.weight                 layers.0.ffn.experts.3.w1.weight
    transformers  model.layers.0.self_attn.q_a_proj.weight  model.layers.0.mlp.experts.gate_up_proj
    GGUF          blk.0.attn_q_a.weight                     blk.0.ffn_gate_exps.weight

Released names may have ``model.`` before them, and what transformers writes to disk are released
names with a few of its own; so all names of safetensors files are read by one function. Beside a
weight a file may have scales: `.scale` or `.weight_scale_inv`, `.weight_scale` and
`.weight_scale_2` of NVFP4, `.weight_global_scale` and `.weight_packed` of compressed-tensors.

Experts are one weight of ours, `ffn.experts.w1.weight`, in any of the forms. Two weights exist
in files alone: `ffn.experts.w1w3.weight`, the rows of w1 and then w3, and `eh_proj.weight`, the
columns of e_proj and then h_proj.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# Within a block: ours, GGUF's, transformers'. Those with `.weight` may have scales.
_BLOCK: Final = (
    ("attn_norm.weight", "attn_norm", "input_layernorm"),
    ("ffn_norm.weight", "ffn_norm", "post_attention_layernorm"),
    ("hc_attn_fn", "hc_attn_fn", "attn_hc.fn"),
    ("hc_attn_base", "hc_attn_base", "attn_hc.base"),
    ("hc_attn_scale", "hc_attn_scale", "attn_hc.scale"),
    ("hc_ffn_fn", "hc_ffn_fn", "ffn_hc.fn"),
    ("hc_ffn_base", "hc_ffn_base", "ffn_hc.base"),
    ("hc_ffn_scale", "hc_ffn_scale", "ffn_hc.scale"),
    ("attn.wq_a.weight", "attn_q_a", "self_attn.q_a_proj"),
    ("attn.q_norm.weight", "attn_q_a_norm", "self_attn.q_a_norm"),
    ("attn.wq_b.weight", "attn_q_b", "self_attn.q_b_proj"),
    ("attn.wkv.weight", "attn_kv", "self_attn.kv_proj"),
    ("attn.kv_norm.weight", "attn_kv_a_norm", "self_attn.kv_norm"),
    ("attn.wo_a.weight", "attn_output_a", "self_attn.o_a_proj"),
    ("attn.wo_b.weight", "attn_output_b", "self_attn.o_b_proj"),
    ("attn.attn_sink", "attn_sinks", "self_attn.sinks"),
    ("attn.compressor.wkv.weight", "attn_compressor_kv", "self_attn.compressor.kv_proj"),
    ("attn.compressor.wgate.weight", "attn_compressor_gate", "self_attn.compressor.gate_proj"),
    ("attn.compressor.ape", "attn_compressor_ape", "self_attn.compressor.position_bias"),
    ("attn.compressor.norm.weight", "attn_compressor_norm", "self_attn.compressor.kv_norm"),
    ("attn.indexer.wq_b.weight", "indexer.attn_q_b", "self_attn.compressor.indexer.q_b_proj"),
    (
        "attn.indexer.weights_proj.weight",
        "indexer.proj",
        "self_attn.compressor.indexer.scorer.weights_proj",
    ),
    (
        "attn.indexer.compressor.wkv.weight",
        "indexer_compressor_kv",
        "self_attn.compressor.indexer.kv_proj",
    ),
    (
        "attn.indexer.compressor.wgate.weight",
        "indexer_compressor_gate",
        "self_attn.compressor.indexer.gate_proj",
    ),
    (
        "attn.indexer.compressor.ape",
        "indexer_compressor_ape",
        "self_attn.compressor.indexer.position_bias",
    ),
    (
        "attn.indexer.compressor.norm.weight",
        "indexer_compressor_norm",
        "self_attn.compressor.indexer.kv_norm",
    ),
    ("ffn.gate.weight", "ffn_gate_inp", "mlp.gate"),
    ("ffn.gate.bias", "exp_probs_b", "mlp.gate.e_score_correction_bias"),
    ("ffn.gate.tid2eid", "ffn_gate_tid2eid", "mlp.gate.tid2eid"),
    ("ffn.experts.w1.weight", "ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn.experts.w3.weight", "ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn.experts.w2.weight", "ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn.shared_experts.w1.weight", "ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn.shared_experts.w3.weight", "ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn.shared_experts.w2.weight", "ffn_down_shexp", "mlp.shared_experts.down_proj"),
)
# Of the MTP block alone; transformers has none. llama.cpp writes `eh_proj`, others its halves.
_MTP: Final = (
    ("eh_proj.weight", "nextn.eh_proj"),
    ("e_proj.weight", "nextn.e_proj"),
    ("h_proj.weight", "nextn.h_proj"),
    ("enorm.weight", "nextn.enorm"),
    ("hnorm.weight", "nextn.hnorm"),
    ("norm.weight", "nextn.shared_head_norm"),
    ("hc_head_fn", "nextn.hc_head_fn"),
    ("hc_head_base", "nextn.hc_head_base"),
    ("hc_head_scale", "nextn.hc_head_scale"),
)
_TOP: Final = (
    ("embed.weight", "token_embd", "embed_tokens"),
    ("norm.weight", "output_norm", "norm"),
    ("head.weight", "output", "lm_head"),
    ("hc_head_fn", "output_hc_fn", "hc_head.hc_fn"),
    ("hc_head_base", "output_hc_base", "hc_head.hc_base"),
    ("hc_head_scale", "output_hc_scale", "hc_head.hc_scale"),
)
# What transformers writes to disk for `kv_norm`, and the stack of w1 and w3.
_EXTRA: Final = {
    "attn.norm": "attn.kv_norm.weight",
    "mlp.experts.gate_up_proj": "ffn.experts.w1w3.weight",
    "ffn.experts.gate_up_proj": "ffn.experts.w1w3.weight",
    "ffn.experts.down_proj": "ffn.experts.w2.weight",
}
# Endings of the tensors of a weight, and what they hold; the longer of two comes first.
_ENDINGS: Final = {
    ".weight_scale_inv": "scale",
    "_scale_inv": "scale",  # of stacks, which transformers names without `.weight`
    ".weight_scale_2": "global_scale",
    ".weight_global_scale": "divisor",
    ".weight_scale": "scale",
    ".weight_packed": "weight",
    ".input_global_scale": "input_scale",
    ".input_scale": "input_scale",
    ".weight": "weight",
    ".scale": "scale",
}
_LAYER: Final = re.compile(r"(layers|mtp)\.(\d{1,5})\.(.+)")
_EXPERT: Final = re.compile(
    r"(?:ffn|mlp)\.experts\.(\d{1,5})\.(w1|w2|w3|gate_proj|up_proj|down_proj)"
)
_EXPERT_PARTS: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_BLK: Final = re.compile(r"blk\.(\d{1,5})\.(.+)")
# Copies of other tensors that a draft block of a GGUF file may bring.
_GGUF_COPIES: Final = ("nextn.embed_tokens", "nextn.shared_head_head")


def _stem(ours: str) -> str:
    return ours.removesuffix(".weight")


_HF_BLOCK: Final = (
    {_stem(ours): ours for ours, _, _ in _BLOCK}
    | {theirs: ours for ours, _, theirs in _BLOCK}
    | _EXTRA
)
_HF_MTP: Final = {_stem(ours): ours for ours, _ in _MTP}
_HF_TOP: Final = {_stem(ours): ours for ours, _, _ in _TOP} | {
    theirs: ours for ours, _, theirs in _TOP
}
_GGUF_BLOCK: Final = {theirs: ours for ours, theirs, _ in _BLOCK}
_GGUF_MTP: Final = {theirs: ours for ours, theirs in _MTP}
_GGUF_TOP: Final = {theirs: ours for ours, theirs, _ in _TOP}
_TRANSFORMERS: Final = {ours: theirs for ours, _, theirs in (*_BLOCK, *_TOP)}


@dataclass(frozen=True, slots=True)
class FoundName:
    """What a tensor of a file is.

    Attributes:
        weight: our name of the weight that it belongs to.
        part: ``weight`` (its values), ``scale``, ``global_scale``, ``divisor`` or ``input_scale``.
        expert: its number, if the tensor is of one expert.
    """

    weight: str
    part: str = "weight"
    expert: int | None = None


def is_passed_over(name: str) -> bool:
    """Whether a tensor is not a weight: tables of angles, and copies in draft blocks."""
    if name.endswith("inv_freq"):
        return True
    block = _BLK.fullmatch(name)
    return block is not None and block[2].removesuffix(".weight") in _GGUF_COPIES


def is_dspark(name: str) -> bool:
    """Whether a tensor is of a block-draft head."""
    name = name.removeprefix("model.")
    return name.startswith("mtp.") and ("main_proj" in name or "markov_head" in name)


def from_hf(name: str) -> FoundName | None:
    """What a tensor of a safetensors file is, or None if it is unknown."""
    name = name.removeprefix("model.")
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _from_table(name, "", _HF_TOP)
    prefix = f"{layer[1]}.{int(layer[2])}."
    table = _HF_BLOCK if layer[1] == "layers" else _HF_BLOCK | _HF_MTP
    return _from_table(layer[3], prefix, table)


def _from_table(rest: str, prefix: str, table: dict[str, str]) -> FoundName | None:
    bare = table.get(rest)
    if bare is not None and (not bare.endswith(".weight") or ".experts." in bare):
        return FoundName(prefix + bare)
    for ending, part in _ENDINGS.items():
        if not rest.endswith(ending):
            continue
        stem = rest.removesuffix(ending)
        expert = _EXPERT.fullmatch(stem)
        if expert is not None:
            kind = _EXPERT_PARTS.get(expert[2], expert[2])
            return FoundName(f"{prefix}ffn.experts.{kind}.weight", part, int(expert[1]))
        ours = table.get(stem)
        if ours is not None and ours.endswith(".weight"):
            return FoundName(prefix + ours, part)
    return None


def from_gguf(name: str, num_layers: int) -> FoundName | None:
    """What a tensor of a GGUF file is; the block after the main layers drafts."""
    block = _BLK.fullmatch(name)
    stem = (block[2] if block else name).removesuffix(".weight")
    if stem.endswith(".bias"):
        stem = stem.removesuffix(".bias") if stem == "exp_probs_b.bias" else ""
    if block is None:
        ours = _GGUF_TOP.get(stem)
        return None if ours is None else FoundName(ours)
    index = int(block[1])
    ours = _GGUF_BLOCK.get(stem)
    if ours is None and index >= num_layers:
        ours = _GGUF_MTP.get(stem)
    if ours is None:
        return None
    prefix = f"layers.{index}." if index < num_layers else f"mtp.{index - num_layers}."
    return FoundName(prefix + ours)


def file_name(weight: str, names: frozenset[str], num_layers: int, *, is_gguf: bool) -> str:
    """How a file would name a weight of ours that it lacks.

    Args:
        weight: our name; of one expert with its number, `ffn.experts.3.w1.weight`.
        names: of the file's tensors, which tell its naming.
        num_layers: main layers.
        is_gguf: whether it is a GGUF file.
    """
    if is_gguf:
        return _gguf_name(weight, num_layers)
    layer = _LAYER.fullmatch(weight)
    prefix, rest = (f"{layer[1]}.{layer[2]}.", layer[3]) if layer else ("", weight)
    if any(".self_attn." in name for name in names) and rest in _TRANSFORMERS:
        weight = prefix + _TRANSFORMERS[rest] + (".weight" if rest.endswith(".weight") else "")
        if re.search(r"experts\.(gate|up)_proj", weight) and ".shared_" not in weight:
            weight = f"{prefix}mlp.experts.gate_up_proj"
    has_prefix = any(name.startswith("model.") for name in names)
    return f"model.{weight}" if has_prefix and not weight.startswith("lm_head") else weight


def _gguf_name(weight: str, num_layers: int) -> str:
    layer = _LAYER.fullmatch(weight)
    if layer is None:
        return next(theirs for ours, theirs, _ in _TOP if ours == weight) + ".weight"
    index = int(layer[2]) + (num_layers if layer[1] == "mtp" else 0)
    tables = {ours: theirs for ours, theirs, _ in _BLOCK} | dict(_MTP)
    ending = "bias" if layer[3] == "ffn.gate.bias" else "weight"
    return f"blk.{index}.{tables[layer[3]]}.{ending}"
