"""The tiny DeepSeek-V4 checkpoint, written anew in each naming and format.

Each writer takes a folder to write to and returns what `LLM` opens: a folder, or a `.gguf` file.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from benchmarks.small_v4.tokenizer import SPECIAL_TOKENS

DATA = Path(__file__).parent / "data/dsv4"
TINY = DATA / "tiny"
NVFP4_EXPERTS = DATA / "nvfp4/experts.safetensors"
CONFIG: dict[str, Any] = json.loads((TINY / "config.json").read_text())
NUM_LAYERS = CONFIG["num_hidden_layers"]
NUM_EXPERTS = CONFIG["n_routed_experts"]

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_LAYER_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
# Our names and those of transformers, in memory.
_TRANSFORMERS = (
    ("attn.", "self_attn."),
    ("ffn.", "mlp."),
    ("self_attn.indexer.compressor.", "self_attn.compressor.indexer."),
    ("self_attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
    ("self_attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"),
    ("attn_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
    ("attn_sink", "sinks"),
    ("compressor.norm", "compressor.kv_norm"),
    ("compressor.indexer.norm", "compressor.indexer.kv_norm"),
    (".ape", ".position_bias"),
    ("wq_a", "q_a_proj"),
    ("wq_b", "q_b_proj"),
    ("wkv", "kv_proj"),
    ("wgate", "gate_proj"),
    ("wo_a", "o_a_proj"),
    ("wo_b", "o_b_proj"),
    ("q_norm", "q_a_norm"),
    ("gate.bias", "gate.e_score_correction_bias"),
    ("shared_experts.w1", "shared_experts.gate_proj"),
    ("shared_experts.w2", "shared_experts.down_proj"),
    ("shared_experts.w3", "shared_experts.up_proj"),
)
_GGUF = {
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.experts.w1.weight": "ffn_gate_exps.weight",
    "ffn.experts.w3.weight": "ffn_up_exps.weight",
    "ffn.experts.w2.weight": "ffn_down_exps.weight",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight",
    "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
    "eh_proj.weight": "nextn.eh_proj.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
}


def released_tensors() -> dict[str, Tensor]:
    """The tensors of the tiny checkpoint as it is stored."""
    return load_file(TINY / "model.safetensors")


def save_folder(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG
) -> Path:
    """Write a folder of a config and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_released(folder: Path) -> Path:
    """As released."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, folder / name)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Add a tokenizer of the printable ASCII characters and DeepSeek's special tokens."""
    alphabet = ["\u0120", "\u010a", *(chr(code) for code in range(33, 127))]  # space, line end, ...
    vocab = {char: i for i, char in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos, *_ = SPECIAL_TOKENS
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos}))
    return folder


def write_prefixed(folder: Path) -> Path:
    """Released names after `model.`."""
    tensors = released_tensors()
    return save_folder(folder, {f"model.{name}": tensor for name, tensor in tensors.items()})


def write_scale_inv(folder: Path) -> Path:
    """A repack with `weight_scale_inv` of float32 in FP8 weights, bytes of U8 in FP4 experts."""
    tensors = {}
    for name, tensor in released_tensors().items():
        if name.endswith(".scale"):
            name = name.removesuffix(".scale") + ".weight_scale_inv"
            bits = tensor.view(torch.uint8)
            tensor = bits if ".experts." in name else powers(bits)
        tensors[name] = tensor
    return save_folder(folder, tensors)


def write_nvfp4(folder: Path) -> Path:
    """A mixed checkpoint: NVFP4 experts in layers 0 and 3, the rest as released."""
    tensors, repacked = released_tensors(), load_file(NVFP4_EXPERTS)
    for name in repacked:
        if name.endswith(".weight"):
            del tensors[name.removesuffix(".weight") + ".scale"]
    return save_folder(folder, tensors | repacked)


def write_compressed_tensors(folder: Path) -> Path:
    """The mixed checkpoint with names and divisors of compressed-tensors."""
    tensors, repacked = released_tensors(), load_file(NVFP4_EXPERTS)
    for name, tensor in repacked.items():
        module, _, part = name.rpartition(".")
        if part == "weight":
            del tensors[f"{module}.scale"], tensors[f"{module}.weight"]
            tensors[f"{module}.weight_packed"] = tensor
        elif part == "weight_scale_2":
            tensors[f"{module}.weight_global_scale"] = (1 / tensor).reshape(1)
        elif part == "input_scale":
            tensors[f"{module}.input_global_scale"] = (1 / tensor).reshape(1)
        else:
            tensors[name] = tensor
    return save_folder(folder, tensors)


def write_sharded(folder: Path, count: int = 3) -> Path:
    """As released, in several files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(TINY / "config.json", folder / "config.json")
    tensors = released_tensors()
    names = sorted(tensors)
    index = {}
    for part in range(count):
        file = f"model-{part + 1:05}-of-{count:05}.safetensors"
        mine = names[part::count]
        save_file({name: tensors[name] for name in mine}, folder / file)
        index |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


# --- Decoded -----------------------------------------------------------------------------------


def powers(bits: Tensor) -> Tensor:
    """float32 of E8M0 bytes."""
    return torch.ldexp(torch.ones(bits.shape), bits.to(torch.int32) - 127)


def decoded_tensors(tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Released names, every weight decoded to float32; tables stay integers."""
    tensors = released_tensors() if tensors is None else tensors
    decoded = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix(".weight") + ".scale")
        if name.endswith(".scale"):
            continue
        if scale is None:
            decoded[name] = tensor if tensor.dtype == torch.int64 else tensor.float()
        elif tensor.dtype == torch.int8:
            bits = tensor.view(torch.uint8).to(torch.int64)
            values = _E2M1[torch.stack((bits & 15, bits >> 4), -1).flatten(-2)]
            sizes = powers(scale.view(torch.uint8)).repeat_interleave(32, -1)
            decoded[name] = values * sizes
        else:
            sizes = powers(scale.view(torch.uint8)).repeat_interleave(128, 0)[: tensor.shape[0]]
            sizes = sizes.repeat_interleave(128, 1)[:, : tensor.shape[1]]
            decoded[name] = tensor.float() * sizes
    return decoded


def stacked_tensors(tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The same by our names, experts stacked: `layers.0.ffn.experts.w1.weight`."""
    return dict(_tiny_stacks()) if tensors is None else _stacked(tensors)


@functools.cache
def _tiny_stacks() -> dict[str, Tensor]:
    return _stacked(released_tensors())


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    decoded = decoded_tensors(tensors)
    stacks: dict[str, list[Tensor]] = {}
    for name in list(decoded):
        found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(w\d\.weight)", name)
        if found:
            stacks.setdefault(f"{found[1]}.{found[3]}", [torch.empty(0)] * NUM_EXPERTS)[
                int(found[2])
            ] = decoded.pop(name)
    return decoded | {name: torch.stack(stack) for name, stack in stacks.items()}


# --- transformers ------------------------------------------------------------------------------


def transformers_config() -> dict[str, Any]:
    """The config as transformers writes it."""
    config = {k: v for k, v in CONFIG.items() if k != "quantization_config"}
    ratios, count = config.pop("compress_ratios"), NUM_LAYERS
    hashed = config.pop("num_hash_layers")
    share = config.pop("qk_rope_head_dim") / config["head_dim"]
    scaling = {**config.pop("rope_scaling"), "rope_type": "yarn", "attention_factor": 1.0}
    main = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return config | {
        "layer_types": [_LAYER_TYPES[ratio] for ratio in ratios[:count]],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (count - hashed),
        "compress_rates": {_LAYER_TYPES[4]: 4, _LAYER_TYPES[128]: 128},
        "partial_rotary_factor": share,
        "rope_parameters": {
            "main": main | {"partial_rotary_factor": share},
            "compress": {
                **scaling,
                "rope_theta": config["compress_rope_theta"],
                "partial_rotary_factor": share,
            },
        },
    }


def write_transformers_disk(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """What transformers saves: released names but for a few, floats, and no draft block."""
    renamed = {"embed.weight": "embed_tokens.weight"}
    renamed |= {f"hc_head_{part}": f"hc_head.hc_{part}" for part in ("fn", "base", "scale")}
    tensors = {}
    for name, tensor in decoded_tensors().items():
        if name.startswith("mtp."):
            continue
        theirs = renamed.get(name, name).replace("attn.kv_norm.", "attn.norm.")
        prefix = "" if theirs == "head.weight" else "model."
        tensors[prefix + theirs] = _in_dtype(name, tensor, dtype)
    return save_folder(folder, tensors, transformers_config())


def write_transformers_memory(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The names of transformers' modules, experts stacked, floats, and no draft block."""
    top = {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
    }
    top |= {f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}
    tensors = {}
    stacked = stacked_tensors()
    for name, tensor in stacked.items():
        if name.startswith("mtp.") or ".experts.w3." in name:
            continue
        theirs = top.get(name, f"model.{name}")
        if name.startswith("layers."):
            for ours, other in _TRANSFORMERS:
                theirs = theirs.replace("." + ours.lstrip("."), "." + other.lstrip("."))
        if ".experts.w1." in name:
            tensor = torch.cat((tensor, stacked[name.replace("w1", "w3")]), 1)
            theirs = theirs.replace("w1.weight", "gate_up_proj")
        theirs = theirs.replace("experts.w2.weight", "experts.down_proj")
        tensors[theirs] = _in_dtype(name, tensor, dtype)
    return save_folder(folder, tensors, transformers_config())


def _in_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices in `dtype`; vectors, mixes of streams and tables as they are."""
    if tensor.dtype == torch.int64 or tensor.dim() == 1 or "hc_" in name or name.endswith("ape"):
        return tensor
    return tensor.to(dtype)


# --- GGUF --------------------------------------------------------------------------------------


def gguf_metadata(config: Mapping[str, Any] = CONFIG) -> dict[str, Any]:
    """Keys of a GGUF file under `deepseek4.`, with the draft block."""
    scaling = config["rope_scaling"]
    return {
        "block_count": config["num_hidden_layers"] + 1,
        "nextn_predict_layers": 1,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.output_lora_rank": config["o_lora_rank"],
        "attention.output_group_count": config["o_groups"],
        "attention.sliding_window": config["sliding_window"],
        "attention.compress_ratios": config["compress_ratios"],
        "attention.compress_rope_freq_base": float(config["compress_rope_theta"]),
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": config["hc_eps"],
        "hash_layer_count": config["num_hash_layers"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [float(config["swiglu_limit"])] * (config["num_hidden_layers"] + 1),
        "rope.dimension_count": config["qk_rope_head_dim"],
        "rope.freq_base": float(config["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
    }


def gguf_tensors(matrices: str = "F32", experts: str = "F32") -> dict[str, tuple[np.ndarray, str]]:
    """Data and storage type by GGUF's names; a type that does not fill the rows is F16."""
    stacked = stacked_tensors()
    top = {
        "embed.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "head.weight": "output.weight",
    }
    top |= {f"hc_head_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")}
    halves = (stacked.pop("mtp.0.e_proj.weight"), stacked.pop("mtp.0.h_proj.weight"))
    stacked["mtp.0.eh_proj.weight"] = torch.cat(halves, 1)
    written = {}
    for name, tensor in stacked.items():
        block, _, rest = (
            name.removeprefix("layers.").replace("mtp.0", str(NUM_LAYERS)).partition(".")
        )
        theirs = top.get(name)
        if theirs is None and rest in _GGUF:
            theirs = f"blk.{block}.{_GGUF[rest]}"
        elif theirs is None:
            kind = "nextn." if rest.startswith("hc_head") else ""
            theirs = f"blk.{block}.{kind}{rest}.weight"
        kind = "F32"
        if tensor.dtype == torch.int64:
            tensor, kind = tensor.to(torch.int32), "I32"
        elif name.endswith(".weight") and tensor.dim() >= 2:
            kind = experts if tensor.dim() == 3 else matrices
            size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
            kind = "F16" if tensor.shape[-1] % size else kind
        written[theirs] = (tensor.numpy(), kind)
    return written


def write_gguf(
    path: Path,
    matrices: str = "F32",
    experts: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, tuple[np.ndarray, str]]], None] | None = None,
) -> Path:
    """A GGUF file.

    Args:
        path: of the file.
        matrices: storage type of matrices: F32, F16, BF16, Q8_0, ...
        experts: of the routed experts; MXFP4 keeps them as they are.
        metadata: other keys; None removes one.
        change: edits the tensors of `gguf_tensors`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "deepseek4")
    for key, value in (gguf_metadata() | dict(metadata or {})).items():
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        add[type(value)](f"deepseek4.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-v3")
    # 131 rows have no room for all 256 bytes: this tokenizer knows ASCII.
    visible = [chr(33 + i) for i in range(94)]
    fill = [f"<{i}>" for i in range(CONFIG["vocab_size"] - len(visible) - 4)]
    writer.add_token_list(["<bos>", "<eos>", *visible, *fill, "\u0120", '!"'])
    writer.add_token_types([3, 3] + [1] * (CONFIG["vocab_size"] - 2))
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    tensors = gguf_tensors(matrices, experts)
    if change is not None:
        change(tensors)
    for name, (array, kind) in tensors.items():
        qtype = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "I32"):
            writer.add_tensor(name, np.ascontiguousarray(array))
        elif kind == "F16":
            writer.add_tensor(name, array.astype(np.float16))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(array), qtype)
            writer.add_tensor(name, packed, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf_mxfp4(path: Path) -> Path:
    """A GGUF file of F32 with MXFP4 experts, which hold what the released ones hold."""
    return write_gguf(path, "F32", "MXFP4")


# Writers of the same weights, by name. Those in `WITHOUT_MTP` leave out the draft block.
WRITERS: dict[str, Callable[[Path], Path]] = {
    "released": write_released,
    "prefixed": write_prefixed,
    "scale_inv": write_scale_inv,
    "sharded": write_sharded,
    "transformers_disk": write_transformers_disk,
    "transformers_memory": write_transformers_memory,
    "gguf_f32": lambda folder: write_gguf(folder / "tiny.gguf"),
    "gguf_mxfp4": lambda folder: write_gguf_mxfp4(folder / "tiny.gguf"),
}
WITHOUT_MTP = ("transformers_disk", "transformers_memory")
