"""Tensor names of both kinds of files, compared with the table of the `gguf` package."""

import gguf
import pytest

from tiercel.loader.names import from_gguf, from_hf, to_gguf, to_hf
from tiercel.models.gemma3 import ARCHITECTURE as GEMMA3
from tiercel.models.llama import ARCHITECTURE as LLAMA
from tiercel.models.qwen3 import ARCHITECTURE as QWEN3

PARTS = {
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
}  # fmt: skip
DRAFT_PARTS = {"eh_proj", "enorm", "hnorm", "shared_head.norm"}
CASES = [
    (LLAMA, gguf.MODEL_ARCH.LLAMA, PARTS),
    (QWEN3, gguf.MODEL_ARCH.QWEN3, PARTS),
    (GEMMA3, gguf.MODEL_ARCH.GEMMA3, PARTS),
    (QWEN3, gguf.MODEL_ARCH.GLM4_MOE, DRAFT_PARTS),  # the first model with an MTP head
]


@pytest.mark.parametrize(
    ("family", "arch", "parts"), CASES, ids=("llama", "qwen3", "gemma3", "drafts")
)
def test_a_tensor_has_one_name_of_ours_in_both_kinds_of_files(family, arch, parts):
    theirs = gguf.get_tensor_name_map(arch, 12)
    override = family.hf_names_override
    seen = set()
    top = ("model.embed_tokens", "model.norm", "lm_head")
    layers = [f"model.layers.{i}.{part}" for i in (0, 7, 11) for part in parts]
    for name in (*top, *layers):
        stored = theirs.get_name(name)
        for kind in ("weight", "bias"):
            ours = from_hf(f"{name}.{kind}", override)
            if stored is None or ours is None:
                continue
            assert from_gguf(f"{stored}.{kind}") == ours, name
            assert to_gguf(ours) == f"{stored}.{kind}"
            assert to_hf(ours, override) == f"{name}.{kind}"
            seen.add(ours)
    assert len(seen) >= 3 * 2 * (4 if parts is DRAFT_PARTS else 9)


def test_factors_of_the_rotary_embedding():
    assert from_gguf("rope_freqs.weight") == "rope_factors"
    assert to_gguf("rope_factors") == "rope_freqs.weight"


@pytest.mark.parametrize(
    "name",
    [
        *("", "blk", "blk.", "blk.0", "blk.0.attn_q", "blk..attn_q.weight", "blk.x.attn_q.weight"),
        *("blk.-1.attn_q.weight", "blk.0.attn_q.scale", "blk.0.other.weight"),
        *("blk.\u0661.attn_q.weight", "blk.0.attn_q.weight.x", "token_embd.bias", "output"),
        *("model.layers.0.self_attn.q_proj.weight", "layers.0.q.weight"),
    ],
)
def test_other_names_are_none_of_ours(name):
    assert from_gguf(name) is None
    assert from_hf(name.replace("model.layers", "layers").replace("attn_q", "q_proj"), {}) is None
