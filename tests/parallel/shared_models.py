"""Tiny models that ranks share, and what a rank computes of one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.dsv4_engine import Steps
from tests.dsv4_files import CONFIG, save_folder
from tiercel.config import ModelOptions
from tiercel.models.deepseek_v4 import DeepseekV4Config, read_hf
from tiercel.models.deepseek_v4_tensors import Need, needed
from tiercel.models.model import model_class
from tiercel.models.sharding import Sharding
from tiercel.models.source import open_source
from tiercel.models.weights import WeightReader
from tiercel.parallel import Group

CPU = torch.device("cpu")
# Sizes that 4 ranks can share; blocks of FP8 are cut at 4 ranks, those of MXFP4 are not.
V4_SIZES = {
    "num_attention_heads": 8,
    "o_groups": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "index_topk": 64,  # all entries: none of two that are nearly as good is chosen by rounding
}
# Bytes of unwritten cache: NaN in every float format, and a number near 1, because the kernels of
# prompts in 16 bits multiply what they read beyond a prompt by 0.
NAN, FINITE = 0xFF, 0x3C


@dataclass(frozen=True)
class Computed:
    """What a rank computes of a prompt and of the tokens that follow it.

    Attributes:
        logits: (tokens, vocab_size), of the prompt and each answer token but the last.
        token_ids: the greedy answer.
        drafts: (tokens, vocab_size) logits of the draft head at the prompt's states; empty without.
        read_bytes: of the weights.
    """

    logits: np.ndarray
    token_ids: list[int]
    drafts: np.ndarray
    read_bytes: int


def load_shared(
    group: Group,
    path: Path,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    *,
    tensor_parallel: bool = True,
    expert_parallel: bool = False,
) -> tuple[Any, WeightReader]:
    """This rank's part of a model, and what read it."""
    source = open_source(path)
    sharding = Sharding(group.rank, group.size, tensor_parallel, expert_parallel)
    weights = WeightReader(source, device, sharding=sharding)
    # Where the dtype rounds nothing, the cache of DeepSeek-V4 does not either.
    is_plain = isinstance(source.config, DeepseekV4Config) and dtype == torch.float32
    options = ModelOptions("float32" if is_plain else "auto")
    model = model_class(source.family)(source.config, weights, dtype, 400, options, group)
    return model, weights


def compute(
    group: Group,
    path: Path,
    length: int,
    kinds: dict[str, bool],
    device_type: str = "cpu",
    dtype: str = "float32",
) -> Computed:
    """Pass a prompt of random ids through a model, and some steps of one token."""
    device = torch.device(device_type, group.rank) if device_type == "cuda" else CPU
    model, weights = load_shared(group, path, device, getattr(torch, dtype), **kinds)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(2, model.config.vocab_size, (length,), generator=generator).tolist()
    unwritten = FINITE if dtype == "float16" else NAN
    steps = Steps(model, [ids, ids[: length // 2]], device=device, unwritten=unwritten)
    batch, hidden = steps.step({0: length, 1: length // 2})
    with torch.inference_mode():
        drafts = np.empty(0)
        if model.draft_head is not None:
            states = model.draft_head.forward(replace(batch, input_ids=batch.input_ids), hidden)
            drafts = model.draft_head.logits(states[:length]).cpu().numpy()
        logits, token_ids = [model.logits(hidden)], []
        for _ in range(3):
            _, best = model.best_tokens(hidden[length - 1 : length] if not token_ids else hidden, 3)
            last = logits[-1][length - 1] if not token_ids else logits[-1][0]
            assert best[0].tolist() == last.sort(descending=True, stable=True).indices[:3].tolist()
            token_ids.append(int(best[0, 0]))
            steps.token_ids[0, int(steps.computed[0])] = token_ids[-1]
            _, hidden = steps.step({0: 1})
            logits.append(model.logits(hidden))
        few = torch.tensor([model.config.vocab_size - 1, 0, 5], device=device)
        rows = torch.tensor([0], dtype=torch.int32, device=device)
        near = 1e-5 if dtype == "float32" else 0.02
        torch.testing.assert_close(
            model.token_logits(hidden, rows, few), logits[-1][:, few], atol=near, rtol=near
        )
    return Computed(torch.cat(logits).cpu().numpy(), token_ids, drafts, weights.read_bytes)


# --- DeepSeek-V4 -------------------------------------------------------------------------------


def write_v4(folder: Path, *, formats: bool, **sizes: int) -> Path:
    """A tiny DeepSeek-V4 with random weights, in released names.

    Args:
        folder: to write to.
        formats: MXFP4 experts and FP8 blocks in the other matrices; else float32.
        sizes: fields of `config.json`.
    """
    values = {**CONFIG, **V4_SIZES, **sizes}
    config = read_hf(values, "config.json")
    rng = np.random.default_rng(7)
    tensors: dict[str, torch.Tensor] = {}
    for need in needed(config):
        if ".experts." in need.name:
            for expert in range(need.shape[0]):
                name = need.name.replace(".experts.", f".experts.{expert}.")
                tensors |= _expert(rng, name, need.shape[1:], formats=formats)
        else:
            tensors |= _tensor(rng, need, config.num_experts, formats=formats)
    return save_folder(folder, tensors, values)


def _tensor(
    rng: np.random.Generator, need: Need, num_experts: int, *, formats: bool
) -> dict[str, torch.Tensor]:
    if need.kind == "integers":
        rows = [rng.permutation(num_experts)[: need.shape[1]] for _ in range(need.shape[0])]
        return {need.name: torch.from_numpy(np.stack(rows))}
    if need.kind == "floats":
        values = rng.normal(size=need.shape) * (0.05 if need.name.endswith("_fn") else 0.5)
        return {need.name: torch.from_numpy(values + need.name.endswith("norm.weight")).float()}
    spread = 1.0 if need.name == "embed.weight" else need.shape[-1] ** -0.5
    values = torch.from_numpy(rng.normal(size=need.shape) * spread).float()
    is_fp8 = ".wq_" in need.name or ".wo_" in need.name or ".shared_experts." in need.name
    if not (formats and is_fp8):
        return {need.name: values}
    rows, columns = (-(-size // 128) for size in need.shape)
    scale = torch.from_numpy(rng.integers(118, 122, (rows, columns)).astype(np.uint8))
    sizes = torch.ldexp(torch.ones(rows, columns), scale.int() - 127)
    sizes = sizes.repeat_interleave(128, 0)[: need.shape[0]]
    sizes = sizes.repeat_interleave(128, 1)[:, : need.shape[1]]
    return {
        need.name: (values / sizes).to(torch.float8_e4m3fn),
        need.name.replace(".weight", ".scale"): scale.view(torch.float8_e8m0fnu),
    }


def _expert(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], *, formats: bool
) -> dict[str, torch.Tensor]:
    out, columns = shape
    if not formats:
        values = rng.normal(size=shape) * columns**-0.5
        return {name: torch.from_numpy(values).float()}
    codes = torch.from_numpy(rng.integers(-128, 128, (out, columns // 2)).astype(np.int8))
    scale = torch.from_numpy(rng.integers(121, 125, (out, columns // 32)).astype(np.uint8))
    return {name: codes, name.replace(".weight", ".scale"): scale.view(torch.float8_e8m0fnu)}


# --- Dense folders -----------------------------------------------------------------------------


def write_dense_folder(folder: Path, family: str, **fields: Any) -> Path:
    """A tiny Llama or Qwen2 with random weights in Hugging Face layout, float32."""
    hidden, heads, kv_heads, head_dim, inner, vocab = 64, 4, 2, 16, 96, 131
    values = {
        "architectures": [family],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **fields,
    }
    rng = np.random.default_rng(3)

    def matrix(out: int, columns: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=(out, columns)) * columns**-0.5).float()

    def vector(size: int, start: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(start + 0.2 * rng.normal(size=size)).float()

    tensors = {
        "model.embed_tokens.weight": matrix(vocab, hidden) * hidden**0.5,
        "model.norm.weight": vector(hidden),
        "lm_head.weight": matrix(vocab, hidden) * 3,
    }
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for part, count in rows.items():
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = matrix(count, hidden)
            if family.startswith("Qwen2"):
                tensors[f"{prefix}self_attn.{part}_proj.bias"] = vector(count, 0.0)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        tensors[f"{prefix}mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = vector(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
