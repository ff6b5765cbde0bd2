"""Random tiny models of transformers: a `config.json` by seed, weights, a folder or a GGUF file.

A sample comes with changes of its fields, one at a time. Each must change the reference: the
comparison says nothing about fields that do not.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.gguf_files import NUM_TOKENS, tiny_tokenizer, write_gguf

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
WEIGHT_STD = 0.3
SCALINGS = ("default", "linear", "yarn", "llama3")
_ROPE_TYPES = ("type", "rope_type")

Values = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A `config.json`, and variants that differ from it in one field each, by its name."""

    family: str
    values: Values
    changes: dict[str, Values]


# --- Rotary embedding --------------------------------------------------------------------------


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """A number of 4 digits, small and large ones with equal frequency."""
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.4g}")


def _scaled_rope(rng: random.Random, kind: str, context: int, *, has_options: bool) -> Values:
    """Parameters of a scaling; `context` bounds the original one."""
    if kind == "default":
        return {}
    rope: Values = {"factor": log_uniform(rng, 1.5, 16)}
    if kind == "linear":
        return rope
    rope["original_max_position_embeddings"] = int(log_uniform(rng, 16, context))
    if kind == "llama3":
        low = log_uniform(rng, 0.3, 4)
        return rope | {"low_freq_factor": low, "high_freq_factor": low * rng.uniform(1.5, 6)}
    if not has_options:
        return rope
    if rng.random() < 0.5:
        rope["attention_factor"] = log_uniform(rng, 0.5, 2)
    elif rng.random() < 0.5:
        rope |= {"mscale": rng.uniform(0.5, 2), "mscale_all_dim": rng.uniform(2.5, 5)}
    if rng.random() < 0.5:
        rope |= {"beta_fast": log_uniform(rng, 3, 60), "beta_slow": log_uniform(rng, 0.2, 2)}
    if rng.random() < 0.5:
        rope["truncate"] = rng.random() < 0.3
    return rope


def _changed_ropes(rope: Values) -> dict[str, Values]:
    changes = {}
    for key, value in rope.items():
        if key == "rope_type":
            changed = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
            if value == "default":
                continue
        elif key == "truncate":
            changed = rope | {key: not value}
        else:  # an original context stays whole
            changed = rope | {key: type(value)(value * (2.5 if key == "beta_slow" else 3))}
            if key in ("beta_fast", "low_freq_factor"):
                changed[key] = value / (1.5 if key == "beta_fast" else 3)
            if key == "factor":
                changed[key] = 1 + (value - 1) / 4
        changes[key] = changed
    return changes


def reference_rope(rope: Values, head_dim: int, context: int) -> torch.Tensor:
    """Frequencies of transformers, then the factor of cos and sin; float32."""
    config = transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters=dict(rope),
    )
    module = LlamaRotaryEmbedding(config)
    return torch.cat((module.inv_freq, torch.tensor([float(module.attention_scaling)])))


def _keeps_all_pairs(rope: Values) -> bool:
    """Whether even the slowest pair is kept: there transformers turns the ramp around."""
    turns = 2 * math.pi * rope.get("beta_fast", 32)
    length = rope["original_max_position_embeddings"] / turns
    return math.log(length) > 1.7 * math.log(rope["rope_theta"])


def sample_rope(
    rng: random.Random,
    head_dim: int,
    context: int,
    *,
    kind: str,
    has_options: bool = True,
    most_original: int = 40000,
    most_base: float = 1e6,
) -> tuple[Values, dict[str, Values]]:
    """Rotary parameters that all matter, and changes of one each."""
    while True:
        rope: Values = {"rope_type": kind, "rope_theta": log_uniform(rng, 20, most_base)}
        rope |= _scaled_rope(rng, kind, most_original, has_options=has_options)
        if kind == "yarn" and _keeps_all_pairs(rope):
            continue
        changes = _changed_ropes(rope)
        expected = reference_rope(rope, head_dim, context)
        others = [reference_rope(other, head_dim, context) for other in changes.values()]
        if all(((other / expected - 1).abs() > 0.02).any() for other in others):
            return rope, changes


def spell_rope(rope: Values, spelling: str) -> Values:
    """Fields of a `config.json`: the newer object, or the older two."""
    if spelling == "rope_parameters":
        return {"rope_parameters": rope}
    rest = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    scaling = {spelling: rope["rope_type"], **rest} if rest else None
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


# --- Whole configs -----------------------------------------------------------------------------


def _sizes(rng: random.Random, family: str, turn: int) -> Values:
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4))
    heads = kv_heads * group
    # transformers wants a multiple of the heads, which is not heads * head_dim.
    hidden = heads * rng.randint(-(-24 // heads), 72 // heads)
    head_dim = rng.choice([d for d in (8, 10, 12, 16, 20, 24, 32) if d * heads != hidden])
    return {
        "vocab_size": NUM_TOKENS + rng.randint(0, 30),
        "hidden_size": hidden,
        "intermediate_size": rng.randint(20, 90),
        "num_hidden_layers": rng.randint(3, 4) if family == "gemma3" else rng.randint(2, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": rng.randint(200, 400),
        "rms_norm_eps": log_uniform(rng, 3e-3, 0.5),
        "tie_word_embeddings": turn % 2 == 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _gemma_fields(
    rng: random.Random, values: Values, turn: int, *, for_gguf: bool
) -> dict[str, Values]:
    """Add the fields that only Gemma 3 has; returns changes."""
    layers, window = values["num_hidden_layers"], rng.randint(3, 40)
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"][:layers]
    if rng.random() < 0.5:
        types = [types[0], *types[:-1]]
    pattern: Values = {"layer_types": types}
    swapped: Values = {"layer_types": types[::-1]}
    if types == types[::-1] or turn % 3 == 0:
        pattern, swapped = {"sliding_window_pattern": 2}, {"sliding_window_pattern": 3}
    scalar = values["head_dim"] if for_gguf else rng.randint(4, 64)
    cap = None if turn % 4 == 1 else round(rng.uniform(1, 4), 2)
    values |= pattern | {
        "sliding_window": window,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": cap,
    }
    changes: dict[str, Values] = {
        "sliding_window": {"sliding_window": window + 4},
        "query_pre_attn_scalar": {"query_pre_attn_scalar": 3 * scalar},
        "final_logit_softcapping": {"final_logit_softcapping": 2.5 * (cap or 2)},
    }
    return changes | dict.fromkeys(pattern, swapped)


def sample_config(
    rng: random.Random, family: str, turn: int = 0, *, for_gguf: bool = False
) -> Sample:
    """A random point of the space of configs.

    Args:
        rng: source of the sizes and numbers.
        family: one of `CLASSES`.
        turn: number that selects scalings, heads, soft caps: each occurs once in four turns.
        for_gguf: whether only settings that GGUF metadata can express are used.
    """
    values = _sizes(rng, family, turn)
    eps = {"rms_norm_eps": values["rms_norm_eps"] / 4}
    changes: dict[str, Values] = {"rms_norm_eps": eps}
    if family == "gemma3":
        changes |= _gemma_fields(rng, values, turn, for_gguf=for_gguf)
    key = "hidden_activation" if family == "gemma3" else "hidden_act"
    usual = family == "gemma3"
    chosen = usual if for_gguf else turn % 4 < 2
    values[key] = ACTIVATIONS[chosen]
    if not for_gguf:
        changes[key] = {key: ACTIVATIONS[not chosen]}
    rope, ropes = sample_rope(
        rng,
        values["head_dim"],
        values["max_position_embeddings"],
        kind=SCALINGS[(turn + for_gguf) % 4],
        has_options=not for_gguf,
        most_original=3000,  # slower pairs hardly turn in a short prompt
        most_base=3e4,
    )
    spelling = rng.choice(("rope_parameters", *_ROPE_TYPES))
    if family != "gemma3":
        values |= spell_rope(rope, spelling)
        changes |= {name: spell_rope(other, spelling) for name, other in ropes.items()}
        return _whole(family, values, changes)
    local = log_uniform(rng, 20, 3e4)

    def spelled(full: Values, base: float) -> Values:
        if spelling != "rope_parameters":
            return spell_rope(full, spelling) | {"rope_local_base_freq": base}
        sliding = {"rope_type": "default", "rope_theta": base}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}

    values |= spelled(rope, local)
    changes |= {name: spelled(other, local) for name, other in ropes.items()}
    changes["sliding base"] = spelled(rope, 5 * local)
    return _whole(family, values, changes)


def _whole(family: str, values: Values, changes: Mapping[str, Values]) -> Sample:
    values = {"architectures": [CLASSES[family]], "model_type": MODEL_TYPES[family], **values}
    return Sample(family, values, {name: values | change for name, change in changes.items()})


# --- Models ------------------------------------------------------------------------------------


def make_model(values: Values, state: Mapping[str, torch.Tensor] | None = None) -> Any:
    """A model of transformers in float32, of random weights or of another one's."""
    values = json.loads(json.dumps(values))  # transformers modifies its argument
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    if state is not None:
        model.load_state_dict(state)
        return model.eval()
    for parameter in model.parameters():  # biases and norms away from 0 and 1, so that each matters
        torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    return model.eval()


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    """(len(ids), vocab_size) float32."""
    with torch.inference_mode():
        logits: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 256 bytes and 4 special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a file: without the head where it is the embedding."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def write_folder(folder: Path, values: Values, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write `config.json` unchanged, which transformers would rewrite, and the other files."""
    (folder / "config.json").write_text(json.dumps(values))
    save_file(dict(tensors), folder / "model.safetensors")
    byte_tokenizer(folder)
    return folder


# --- GGUF, as llama.cpp converts -----------------------------------------------------------------


def permute_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k of a Llama, as llama.cpp's convert_hf_to_gguf.py stores them."""
    split = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(family: str, values: Values, model: Any) -> dict[str, np.ndarray]:
    """Tensors of a model by the `gguf` package's names."""
    arch = getattr(gguf.MODEL_ARCH, family.upper())
    names = gguf.get_tensor_name_map(arch, values["num_hidden_layers"])
    heads = {"q_proj": values["num_attention_heads"], "k_proj": values["num_key_value_heads"]}
    tensors = {}
    for name, tensor in own_tensors(model).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        part = name.split(".")[-2]
        array = tensor.numpy()
        if family == "llama" and part in heads:
            array = permute_rows(array, heads[part])
        if family == "gemma3" and part.endswith("norm"):
            array = array + 1  # transformers adds it in the forward
        tensors[stored] = array
    return tensors


def _gguf_rope(rope: Values, head_dim: int, context: int) -> tuple[Values, np.ndarray | None]:
    """Keys of a rotary embedding, and the divisors of Llama 3's."""
    keys: Values = {"rope.freq_base": rope["rope_theta"]}
    kind = rope["rope_type"]
    if kind == "llama3":
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        default, scaled = (reference_rope(r, head_dim, context)[:-1] for r in (plain, rope))
        return keys, (default / scaled).numpy()
    if kind != "default":
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        original = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    return keys, None


def full_rope(values: Values) -> tuple[Values, float]:
    """Parameters of full layers in the newer spelling, and the base of sliding ones."""
    parameters = values.get("rope_parameters")
    if parameters is None:
        scaling = dict(values["rope_scaling"] or {})
        kind = scaling.pop("type", scaling.pop("rope_type", "default"))
        full = {"rope_type": kind, "rope_theta": values["rope_theta"], **scaling}
        return full, values.get("rope_local_base_freq", 0.0)
    if "full_attention" in parameters:
        return parameters["full_attention"], parameters["sliding_attention"]["rope_theta"]
    return parameters, 0.0


def write_as_gguf(path: Path, sample: Sample, model: Any, **changes: Any) -> Path:
    """Write a model as GGUF; `changes`: metadata keys without the architecture, None removes."""
    family, values = sample.family, sample.values
    context, head_dim = values["max_position_embeddings"], values["head_dim"]
    rope, local = full_rope(values)
    keys, factors = _gguf_rope(rope, head_dim, context)
    keys |= {
        "block_count": values["num_hidden_layers"],
        "context_length": context,
        "embedding_length": values["hidden_size"],
        "feed_forward_length": values["intermediate_size"],
        "attention.head_count": values["num_attention_heads"],
        "attention.head_count_kv": values["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": values["rms_norm_eps"],
    }
    if family == "gemma3":
        types = model.config.layer_types
        keys |= {
            "attention.sliding_window": values["sliding_window"],
            "attention.sliding_window_pattern": [t == "sliding_attention" for t in types],
            "rope.freq_base_swa": local,
            "final_logit_softcapping": values["final_logit_softcapping"],
        }
    keys = {key: value for key, value in (keys | changes).items() if value is not None}
    metadata = {"general.architecture": family, "general.name": "sampled"}
    metadata |= {f"{family}.{key}": value for key, value in keys.items()}
    tensors = gguf_tensors(family, values, model)
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
    pre = "llama-bpe" if family == "llama" else "qwen2"
    return write_gguf(path, metadata | tiny_tokenizer(pre), tensors)
