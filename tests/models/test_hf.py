"""Checkpoints as transformers saves them, and folders that are refused."""

import json
import re

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.hf_models import byte_tokenizer
from tiercel.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from tiercel.llm import LLM
from tiercel.models.source import open_source
from tiercel.params import SamplingParams

VOCAB = 270
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
CONFIGS = {
    "llama-rope3": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "qwen2": lambda: transformers.Qwen2Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        sliding_window=9,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


def make_checkpoint(folder, name, dtype=torch.float32):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms away from 0 and 1, so that each decides
        torch.nn.init.normal_(parameter, std=0.3)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    byte_tokenizer(folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_checkpoint_is_read_exactly(tmp_path, name):
    """As transformers saves it; sampled configs are in test_sampled_configs.py."""
    make_checkpoint(tmp_path, name, torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = list(range(5, 45))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    with LLM(tmp_path, device="cpu", dtype="float32") as llm:
        actual = llm.logits(ids)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


def test_older_config_spelling_gives_the_same_model(tmp_path):
    make_checkpoint(tmp_path, "llama-rope3")
    new = open_source(tmp_path).config
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert open_source(tmp_path).config == new


def test_generates_from_a_folder(tmp_path):
    make_checkpoint(tmp_path, "gemma3")
    with LLM(tmp_path, device="cpu", dtype="float32") as llm:
        out = llm.generate("abc", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(out[0].outputs[0].token_ids) == 5
    assert out[0].prompt_token_ids == llm.encode("abc", add_special_tokens=True)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedModelError, "Qwen3ForCausalLM"),
        ({"architectures": None}, ModelFormatError, "architectures"),
        ({"num_attention_heads": 0}, ModelFormatError, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, ModelFormatError, "3 key/value heads"),
        ({"hidden_size": 10**9}, ModelFormatError, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, ModelFormatError, "config.json"),
        ({"rms_norm_eps": 2}, ModelFormatError, "rms_norm_eps"),
        ({"intermediate_size": 96}, ModelFormatError, "up_proj|gate_proj|down_proj"),
        ({"num_hidden_layers": 4}, ModelFormatError, "layers.3"),
        ({"num_hidden_layers": 2}, ModelFormatError, "does not belong"),
        ({"use_sliding_window": True}, UnsupportedModelError, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantised"),
        ({"rope_parameters": {"rope_type": "longrope"}}, UnsupportedModelError, "longrope"),
        ({"rope_parameters": 3}, ModelFormatError, "rope_parameters"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, ModelFormatError, "llama3"),
    ],
    ids=str,
)
def test_wrong_config_is_refused_by_name(tmp_path, change, error, words):
    make_checkpoint(tmp_path, "qwen3")
    values = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(error) as raised:
        open_source(tmp_path)
    text = f"{raised.value} {raised.value.hint}"
    assert any(word in text for word in words.split("|")), text
    assert "\n" not in text


def test_folder_without_config_says_what_to_give(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        open_source(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64], ids=str)
def test_dtypes_that_a_dense_decoder_never_has_are_refused(tmp_path, dtype):
    make_checkpoint(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, path)
    with pytest.raises(
        UnsupportedModelError, match=re.escape(f"tensor '{name}': dtype is ")
    ) as raised:
        open_source(tmp_path)
    assert "\n" not in str(raised.value)
    assert "F32, F16 or BF16" in raised.value.hint
