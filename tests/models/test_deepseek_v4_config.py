"""DeepSeek-V4's config: each way to write it down means the same; wrong values are named."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.loader.mapped import TensorInfo
from tiercel.models.config import RopeConfig
from tiercel.models.deepseek_v4 import entry_bytes, read_gguf, read_hf
from tiercel.models.deepseek_v4_tensors import needed
from tiercel.models.footprint import cache_bytes
from tiercel.models.registry import hf_architecture
from tiercel.quant_types import QuantType

TINY = Path(__file__).parents[1] / "data/dsv4/tiny/config.json"
VALUES = json.loads(TINY.read_text())
NAMES = {0: "sliding_attention", 4: "compressed_sparse_attention"}
NAMES |= {128: "heavily_compressed_attention"}


def changed(**values):
    """The tiny config with other values; None removes a key."""
    return {key: value for key, value in {**VALUES, **values}.items() if value is not None}


def as_transformers(values):
    """The same config as transformers writes it."""
    kept = {k: v for k, v in values.items() if k not in ("compress_ratios", "num_hash_layers")}
    count, share = values["num_hidden_layers"], values["qk_rope_head_dim"] / values["head_dim"]
    del kept["qk_rope_head_dim"], kept["rope_scaling"]
    hashed = values["num_hash_layers"]
    scaling = {**values["rope_scaling"], "rope_type": "yarn", "attention_factor": 1.0}
    return {
        **kept,
        "layer_types": [NAMES[ratio] for ratio in values["compress_ratios"][:count]],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (count - hashed),
        "compress_rates": {NAMES[4]: 4, NAMES[128]: 128},
        "partial_rotary_factor": share,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": kept.pop("rope_theta")},
            "compress": {**scaling, "rope_theta": kept.pop("compress_rope_theta")},
        },
    }


def gguf_metadata(**changes):
    """The tiny config as GGUF metadata, keys without their prefix in `changes`."""
    v = VALUES
    keys = {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "context_length": v["max_position_embeddings"],
        "embedding_length": v["hidden_size"],
        "attention.head_count": v["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.key_length": v["head_dim"],
        "attention.value_length": v["head_dim"],
        "attention.layer_norm_rms_epsilon": v["rms_norm_eps"],
        "attention.q_lora_rank": v["q_lora_rank"],
        "attention.output_lora_rank": v["o_lora_rank"],
        "attention.output_group_count": v["o_groups"],
        "attention.sliding_window": v["sliding_window"],
        "attention.compress_ratios": np.array(v["compress_ratios"], np.int32),
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": v["index_n_heads"],
        "attention.indexer.key_length": v["index_head_dim"],
        "attention.indexer.top_k": v["index_topk"],
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 2,
        "expert_count": v["n_routed_experts"],
        "expert_used_count": v["num_experts_per_tok"],
        "expert_shared_count": 1,
        "expert_feed_forward_length": v["moe_intermediate_size"],
        "expert_weights_scale": v["routed_scaling_factor"],
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": np.array([1.25] * 5, np.float32),
        "rope.dimension_count": v["qk_rope_head_dim"],
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.original_context_length": 4096,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return {f"deepseek4.{key}": value for key, value in keys.items() if value is not None}


def gguf_config(with_mtp=True, **changes):
    names = ["token_embd.weight", *(["blk.4.nextn.eh_proj.weight"] if with_mtp else [])]
    tensors = {n: TensorInfo(n, (160, VALUES["vocab_size"]), QuantType.F32, 1, 0, 0) for n in names}
    return read_gguf(gguf_metadata(**changes), "m.gguf", tensors)


def test_the_released_keys():
    config = read_hf(VALUES, "config.json")
    assert config.layer_types == ("hca", "hca", "csa", "csa")
    assert config.compress_ratios == (128, 128, 4, 4, 0)
    assert (config.num_layers, config.num_mtp_layers, config.num_hash_layers) == (4, 1, 2)
    assert config.attention_scale == 96**-0.5
    assert config.rope == RopeConfig(10000.0, 32)
    assert config.rope_compress == RopeConfig(
        160000.0, 32, "yarn", 8.0, 4096, attention_factor=1.0, beta_fast=32.0, beta_slow=1.0
    )
    assert config.swiglu_limit == config.shared_swiglu_limit == 1.25
    assert config.fp8_block == (128, 128)


def test_the_keys_of_transformers_mean_the_same():
    assert read_hf(as_transformers(VALUES), "config.json") == read_hf(VALUES, "config.json")


def test_what_transformers_itself_writes():
    from transformers import AutoConfig

    written = AutoConfig.from_pretrained(TINY.parent).to_json_string(use_diff=False)
    assert read_hf(json.loads(written), "config.json") == read_hf(VALUES, "config.json")


def test_the_keys_of_gguf_mean_the_same():
    assert gguf_config() == read_hf(VALUES, "config.json")


def test_gguf_files_may_count_a_draft_block_that_they_do_not_have():
    config = gguf_config(
        with_mtp=False, block_count=4, attention__compress_ratios=np.array([128, 128, 4, 4])
    )
    assert (config.num_layers, config.num_mtp_layers) == (4, 0)


def test_gguf_limits_may_differ_between_routed_and_shared_experts():
    config = gguf_config(swiglu_clamp_exp=2.5, swiglu_clamp_shexp=np.array([0.0] * 5))
    assert (config.swiglu_limit, config.shared_swiglu_limit) == (2.5, None)


@pytest.mark.parametrize("limit", [None, 0, 0.0, -1])
def test_no_limit_is_no_clamp(limit):
    config = read_hf(changed(swiglu_limit=limit), "config.json")
    assert config.swiglu_limit is None
    assert config.shared_swiglu_limit is None


def test_an_index_head_may_rotate_whole():
    assert read_hf(changed(index_head_dim=32), "config.json").index_head_dim == 32


def test_surplus_ratios_are_allowed():
    ratios = [128, 128, 4, 4, 0, 0, 0]
    config = read_hf(changed(compress_ratios=ratios), "config.json")
    assert config.compress_ratios == (128, 128, 4, 4, 0)


def test_a_block_draft_head_is_no_mtp_head():
    values = changed(dspark_num_layers=3, num_nextn_predict_layers=3)
    config = read_hf(values | {"compress_ratios": [128, 128, 4, 4, 0, 0, 0]}, "config.json")
    assert config.num_mtp_layers == 0
    assert config.compress_ratios == (128, 128, 4, 4)
    assert "dspark" in config.no_draft_head


def test_compressed_layers_may_have_no_scaling():
    assert read_hf(changed(rope_scaling=None), "config.json").rope_compress == RopeConfig(
        160000, 32
    )


def test_the_size_of_fp8_blocks():
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    assert read_hf(changed(quantization_config=quantization), "c").fp8_block == (64, 32)
    assert read_hf(changed(quantization_config=None), "c").fp8_block == (128, 128)


HF_REFUSALS = [
    ("compress_ratios[1] is 8", "0 (window only), 4 or 128", {"compress_ratios": [4, 8, 4, 4, 0]}),
    ("compress_ratios has 4 entries", "at least 5", {"compress_ratios": [4, 4, 4, 4]}),
    ("compress_ratios[4], of the MTP", "it must be 0", {"compress_ratios": [4, 4, 4, 4, 128]}),
    ("compress_ratios is None", "for each layer", {"compress_ratios": None}),
    ("num_attention_heads is 4 and o_groups 3", "must divide", {"o_groups": 3}),
    ("hidden_size is 150", "multiple of 32", {"hidden_size": 150}),
    ("moe_intermediate_size is 72", "multiple of 32", {"moe_intermediate_size": 72}),
    ("index_head_dim is 96", "power of two", {"index_head_dim": 96}),
    ("index_head_dim is 16", "at least the 32", {"index_head_dim": 16}),
    ("scoring_func is 'softmax'", "'sqrtsoftplus' alone", {"scoring_func": "softmax"}),
    ("scoring_func is ['sqrt", "'sqrtsoftplus' alone", {"scoring_func": ["sqrtsoftplus"]}),
    ("topk_method is 'greedy'", "'noaux_tc' alone", {"topk_method": "greedy"}),
    ("hidden_act is 'gelu'", "'silu' alone", {"hidden_act": "gelu"}),
    ("hc_mult is 2", "4 streams", {"hc_mult": 2}),
    ("num_key_value_heads is 2", "1 alone", {"num_key_value_heads": 2}),
    ("num_key_value_heads is True", "1 alone", {"num_key_value_heads": True}),
    ("norm_topk_prob is False", "True alone", {"norm_topk_prob": False}),
    ("n_shared_experts is 2", "1 alone", {"n_shared_experts": 2}),
    ("tie_word_embeddings is True", "False alone", {"tie_word_embeddings": True}),
    ("num_experts_per_tok is 7", "at most the number of experts, 6", {"num_experts_per_tok": 7}),
    ("num_hash_layers is 5", "0 to 4", {"num_hash_layers": 5}),
    ("num_nextn_predict_layers is 2", "one such layer", {"num_nextn_predict_layers": 2}),
    ("sliding_window is 4097", "1 to 4096", {"sliding_window": 4097}),
    ("swiglu_limit is 1e+39", "below 1e+30", {"swiglu_limit": 1e39}),
    ("33 rotary dimensions", "even", {"qk_rope_head_dim": 33}),
    ("rope type 'linear'", "yarn", {"rope_scaling": {"type": "linear", "factor": 2}}),
    (
        "quantization_config.weight_block_size is [128]",
        "two integers",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
    ),
]


@pytest.mark.parametrize(("what", "rule", "values"), HF_REFUSALS, ids=[r[0] for r in HF_REFUSALS])
def test_refusals_of_a_config_json(what, rule, values):
    with pytest.raises((ModelFormatError, UnsupportedModelError)) as caught:
        read_hf(changed(**values), "config.json")
    text = f"{caught.value} {caught.value.hint}"
    assert text.startswith("config.json: ")
    assert what in text
    assert rule in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "qk_rope_head_dim",
        "q_lora_rank",
        "o_groups",
        "o_lora_rank",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "routed_scaling_factor",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "sliding_window",
        "hc_mult",
        "hc_sinkhorn_iters",
        "hc_eps",
        "num_hash_layers",
        "rope_theta",
        "compress_rope_theta",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "compress_ratios",
    ],
)
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelFormatError, match=f"config.json: {key} is None"):
        read_hf(changed(**{key: None}), "config.json")


TRANSFORMERS_REFUSALS = [
    ("layer_types is ['x'", "4 of sliding_attention", {"layer_types": ["x"] * 4}),
    ("compress_rates.heavily", "with 128", {"compress_rates": {NAMES[128]: 64}}),
    ("mlp_layer_types", "first", {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}),
    ("mlp_layer_types", "4 of hash_moe", {"mlp_layer_types": ["moe"]}),
    (
        "rope_parameters.main.rope_type is 'yarn'",
        "without scaling",
        {"rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {}}},
    ),
    (
        "rope_parameters.compress.attention_factor is 1.2",
        "must be 1",
        {
            "rope_parameters": {
                "main": {"rope_theta": 10000.0},
                "compress": {
                    "rope_theta": 160000.0,
                    "rope_type": "yarn",
                    "attention_factor": 1.2,
                },
            }
        },
    ),
]


@pytest.mark.parametrize(("what", "rule", "values"), TRANSFORMERS_REFUSALS)
def test_refusals_of_the_keys_of_transformers(what, rule, values):
    with pytest.raises((ModelFormatError, UnsupportedModelError)) as caught:
        read_hf(as_transformers(VALUES) | values, "config.json")
    text = f"{caught.value} {caught.value.hint}"
    assert what in text
    assert rule in text


GGUF_REFUSALS = [
    (
        "attention.compress_ratios[2] is",
        "4 or 128",
        {"attention__compress_ratios": np.array([4, 4, 2, 4, 0])},
    ),
    (
        "attention.compress_ratios has 3",
        "at least 5",
        {"attention__compress_ratios": np.array([4] * 3)},
    ),
    ("attention.output_group_count 3", "must divide", {"attention__output_group_count": 3}),
    ("attention.indexer.key_length is 96", "power of two", {"attention__indexer__key_length": 96}),
    ("attention.q_lora_rank is None", "an integer", {"attention__q_lora_rank": None}),
    ("expert_gating_func is 2", "4 alone", {"expert_gating_func": 2}),
    ("hyper_connection.count is 3", "4 streams", {"hyper_connection__count": 3}),
    ("attention.head_count_kv is", "1 alone", {"attention__head_count_kv": np.array([1, 2])}),
    ("swiglu_clamp_exp differs", "clamp alike", {"swiglu_clamp_exp": np.array([1.0, 2.0])}),
    ("rope.scaling.type is 'linear'", "yarn", {"rope__scaling__type": "linear"}),
    ("attention.sliding_window is 9999", "1 to 4096", {"attention__sliding_window": 9999}),
    ("swiglu_clamp_exp is ['a']", "a number", {"swiglu_clamp_exp": ["a"]}),
    ("swiglu_clamp_exp is nan", "finite", {"swiglu_clamp_exp": np.array([np.nan])}),
    ("attention.head_count_kv is", "1 alone", {"attention__head_count_kv": np.array([], int)}),
]


@pytest.mark.parametrize(
    ("what", "rule", "values"), GGUF_REFUSALS, ids=[r[0] for r in GGUF_REFUSALS]
)
def test_refusals_of_gguf_metadata(what, rule, values):
    with pytest.raises((ModelFormatError, UnsupportedModelError)) as caught:
        gguf_config(**values)
    text = f"{caught.value} {caught.value.hint}"
    assert text.startswith("m.gguf: deepseek4.")
    assert what in text
    assert rule in text


@pytest.mark.parametrize("name", ["DeepseekV41ForCausalLM", "DeepseekV4FlashForCausalLM"])
def test_successors_are_refused_by_name(name):
    with pytest.raises(UnsupportedModelError) as caught:
        hf_architecture([name], "config.json")
    assert name in str(caught.value)
    assert "not supported" in str(caught.value)
    assert "DeepseekV4ForCausalLM" in caught.value.hint
    assert hf_architecture(["DeepseekV4ForCausalLM"], "config.json").name == "deepseek4"


# --- The released shapes -----------------------------------------------------------------------

FLASH = changed(
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    routed_scaling_factor=1.5,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    sliding_window=128,
    num_hash_layers=3,
    vocab_size=129280,
    max_position_embeddings=1048576,
    swiglu_limit=10.0,
    compress_ratios=[0, 0] + [4, 128] * 20 + [4, 0],
)
PRO = FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0],
}


@pytest.mark.parametrize(
    ("values", "layers", "block_bytes"),
    [
        (FLASH, {"window": 2, "csa": 21, "hca": 20}, 449_824),
        (PRO, {"window": 0, "csa": 30, "hca": 31}, 644_024),
    ],
    ids=["flash", "pro"],
)
def test_layers_and_bytes_of_the_released_models(values, layers, block_bytes):
    config = read_hf(values, "config.json")
    assert {kind: config.layer_types.count(kind) for kind in layers} == layers
    assert entry_bytes(config, "fp8") == (584, 68)
    assert entry_bytes(config, "bf16") == (1024, 256)
    long, longer = (cache_bytes(config, 128 * n, "bfloat16", "cuda") for n in (100, 101))
    assert longer - long == block_bytes
    num_layers = config.num_layers + 1  # the MTP block keeps its window too
    window = 2 * 128 * 584 * num_layers
    csa_inputs = 2 * 32 * (1024 + 256) * 2 * 4 * layers["csa"]
    hca_inputs = 128 * 512 * 2 * 4 * layers["hca"]
    assert long == 100 * block_bytes + window + csa_inputs + hca_inputs


@pytest.mark.parametrize(("values", "count"), [(FLASH, 69_187), (PRO, 145_116)])
def test_the_released_models_have_as_many_tensors(values, count):
    """One of each weight, a scale for each in FP8 or FP4, experts one by one."""
    fp8 = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|shared_experts|[eh]_proj")
    found = 0
    for need in needed(read_hf(values, "config.json")):
        is_stack = len(need.shape) == 3
        has_scale = is_stack or fp8.search(need.name) is not None
        found += (need.shape[0] if is_stack else 1) * (2 if has_scale else 1)
    assert found == count


def test_a_short_sequence_holds_one_block_of_each_group():
    config = read_hf(FLASH, "config.json")
    one = cache_bytes(config, 1, "bfloat16", "cuda")
    assert one == cache_bytes(config, 128, "bfloat16", "cuda")
    rows = 128 * 584 * 44 + 32 * 1280 * 8 * 21 + 128 * 512 * 8 * 20
    assert one == 449_824 + rows


def test_a_cpu_keeps_entries_unrounded():
    config = read_hf(FLASH, "config.json")
    long, longer = (cache_bytes(config, 128 * n, "bfloat16", "cpu") for n in (100, 101))
    assert longer - long == 21 * 32 * (512 + 128) * 4 + 20 * 512 * 4


@pytest.mark.parametrize(("kv_dtype", "size"), [("bf16", 2), ("float32", 4)])
def test_the_option_decides_before_the_device(kv_dtype, size):
    config = read_hf(FLASH, "config.json")
    long, longer = (cache_bytes(config, 128 * n, "bfloat16", "cuda", kv_dtype) for n in (9, 10))
    assert longer - long == (21 * 32 * (512 + 128) + 20 * 512) * size
