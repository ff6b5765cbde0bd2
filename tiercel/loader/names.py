"""Tensor names of model files, translated to ours.

Ours: `embed.weight`, `norm.weight`, `head.weight`, `rope_factors`, and per layer `layers.I.` with
`q k v o gate up down` (`.weight`, `.bias`) and the norms `attn_norm q_norm k_norm post_attn_norm
mlp_norm post_mlp_norm` (`.weight`). An MTP head is one more layer, with `mtp_proj` and the
norms `mtp_embed_norm mtp_hidden_norm mtp_norm`.
"""

from __future__ import annotations

from collections.abc import Mapping

_GGUF_TOP = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
    "rope_freqs.weight": "rope_factors",
}
_GGUF_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "post_attn_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_ffw_norm": "post_mlp_norm",
    "nextn.eh_proj": "mtp_proj",
    "nextn.enorm": "mtp_embed_norm",
    "nextn.hnorm": "mtp_hidden_norm",
    "nextn.shared_head_norm": "mtp_norm",
}
_HF_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_HF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "eh_proj": "mtp_proj",
    "enorm": "mtp_embed_norm",
    "hnorm": "mtp_hidden_norm",
    "shared_head.norm": "mtp_norm",
}


def _layer_name(name: str, prefix: str, table: Mapping[str, str]) -> str | None:
    if not name.startswith(prefix):
        return None
    index, _, rest = name[len(prefix) :].partition(".")
    part, _, kind = rest.rpartition(".")
    if (
        not (index.isascii() and index.isdigit())
        or part not in table
        or kind not in ("weight", "bias")
    ):
        return None
    return f"layers.{int(index)}.{table[part]}.{kind}"


def _file_name(name: str, top: Mapping[str, str], prefix: str, table: Mapping[str, str]) -> str:
    for theirs, ours in top.items():
        if ours == name:
            return theirs
    _, index, part, kind = name.split(".")
    theirs = next(theirs for theirs, ours in table.items() if ours == part)
    return f"{prefix}{index}.{theirs}.{kind}"


def from_gguf(name: str) -> str | None:
    """Our name of a GGUF tensor, or None if it is not one that a model needs."""
    return _GGUF_TOP.get(name) or _layer_name(name, "blk.", _GGUF_LAYER)


def from_hf(name: str, override: Mapping[str, str]) -> str | None:
    """Our name of a Hugging Face tensor; `override` has suffixes with another meaning."""
    return _HF_TOP.get(name) or _layer_name(name, "model.layers.", {**_HF_LAYER, **override})


def to_gguf(name: str) -> str:
    """The GGUF name of one of our tensors; the inverse of `from_gguf`."""
    return _file_name(name, _GGUF_TOP, "blk.", _GGUF_LAYER)


def to_hf(name: str, override: Mapping[str, str]) -> str:
    """The Hugging Face name of one of our tensors; the inverse of `from_hf`."""
    return _file_name(name, _HF_TOP, "model.layers.", {**_HF_LAYER, **override})
