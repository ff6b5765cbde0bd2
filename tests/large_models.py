"""GGUF files of the shapes and types of real models, without their bytes: sparse files.

Only headers are written, so a file of 5 GB takes some kilobytes of disk. Code that reads only
headers sees the real model: `open_source`, `tiercel inspect`, the memory plan and its errors.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.synthetic_model import SHAPES, has_more_bits
from tests.gguf_files import TYPE_IDS, assemble, pair, record, tiny_tokenizer
from tiercel.quant_types import QuantType

_ALIGNMENT = 32


def sparse_model(path: Path, name: str, **changes: str) -> Path:
    """Write the header of a model of `SHAPES`, in the types of a Q4_K_M file.

    Args:
        path: path of the file.
        name: key of `SHAPES`.
        changes: types that replace others, as ``Q6_K="Q4_K"``.
    """
    shape = SHAPES[name]
    arch = shape.arch
    pairs = {
        "general.architecture": arch,
        "general.name": name,
        f"{arch}.block_count": shape.layers,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.feed_forward_length": shape.intermediate,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 1e6,
        **tiny_tokenizer("llama-bpe" if arch == "llama" else "qwen2"),
    }
    records, offset = [], 0
    for tensor, (dims, qtype) in _tensors(name).items():
        kind = QuantType[changes.get(qtype, qtype)]
        records.append(record(f"{tensor}.weight", dims, TYPE_IDS[kind.name], offset))
        size = kind.row_bytes(dims[0]) * (dims[1] if len(dims) == 2 else 1)
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    path.write_bytes(assemble([pair(key, value) for key, value in pairs.items()], records))
    os.truncate(path, path.stat().st_size + offset)
    return path


def _tensors(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name: sizes in file order and type; the qwen3 and llama families."""
    shape = SHAPES[name]
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd": ((hidden, shape.vocab), "Q6_K" if shape.tied else "Q4_K"),
        "output_norm": ((hidden,), "F32"),
    }
    if not shape.tied:
        found["output"] = ((hidden, shape.vocab), "Q6_K")
    for layer in range(shape.layers):
        better = "Q6_K" if has_more_bits(layer, shape.layers) else "Q4_K"
        parts = {
            "attn_norm": ((hidden,), "F32"),
            "ffn_norm": ((hidden,), "F32"),
            "attn_q": ((hidden, q), "Q4_K"),
            "attn_k": ((hidden, kv), "Q4_K"),
            "attn_v": ((hidden, kv), better),
            "attn_output": ((q, hidden), "Q4_K"),
            "ffn_gate": ((hidden, shape.intermediate), "Q4_K"),
            "ffn_up": ((hidden, shape.intermediate), "Q4_K"),
            "ffn_down": ((shape.intermediate, hidden), better),
        }
        if shape.arch == "qwen3":
            parts |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), ((shape.head_dim,), "F32"))
        found |= {f"blk.{layer}.{part}": entry for part, entry in parts.items()}
    return found
