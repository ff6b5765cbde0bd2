"""A tiny model with an MTP head, as GGUF: random weights, so drafts are right only by chance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_files import NUM_TOKENS, tiny_model

HIDDEN, LAYERS = 64, 2


def mtp_model(
    path: Path,
    *,
    arch: str = "qwen3",
    seed: int = 6,
    head_seed: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of two layers and a head.

    The head passes the hidden state on nearly unchanged, which leads to the token that the model
    has just sampled; and the model repeats a token now and then.

    head_seed: seed of the head's weights; `metadata` and `tensors` replace entries of the file.
    """
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(HIDDEN, 2 * HIDDEN))
    embedding = rng.normal(size=(NUM_TOKENS, HIDDEN))
    output = 0.3 * embedding + rng.normal(size=embedding.shape)
    if head_seed is not None:
        rng = np.random.default_rng(head_seed)
        noise = rng.normal(size=noise.shape)
    proj = noise / HIDDEN**0.5 * 0.1
    proj[:, HIDDEN:] += np.eye(HIDDEN)
    prefix = f"blk.{LAYERS}.nextn"
    return tiny_model(
        path,
        arch,
        layers=LAYERS + 1,
        seed=seed,
        qtype="F32",
        tied=False,
        metadata={f"{arch}.nextn_predict_layers": 1, **(metadata or {})},
        tensors={
            "token_embd.weight": embedding.astype(np.float32),
            "output.weight": output.astype(np.float32),
            f"{prefix}.eh_proj.weight": proj.astype(np.float32),
            f"{prefix}.enorm.weight": 1 + 0.1 * rng.normal(size=HIDDEN),
            f"{prefix}.hnorm.weight": 1 + 0.1 * rng.normal(size=HIDDEN),
            f"{prefix}.shared_head_norm.weight": 1 + 0.1 * rng.normal(size=HIDDEN),
            # The layer itself changes little, so the head is right now and then.
            f"blk.{LAYERS}.attn_output.weight": rng.normal(size=(HIDDEN, 64)) * 0.01,
            f"blk.{LAYERS}.ffn_down.weight": rng.normal(size=(HIDDEN, 128)) * 0.01,
            **(tensors or {}),
        },
    )
