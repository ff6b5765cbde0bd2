"""Rotary tables of configs in both formats against transformers' rotary modules."""

import math
import random

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from tests.hf_models import log_uniform, reference_rope, sample_rope, spell_rope
from tiercel.models.config import RopeConfig, from_gguf, from_hf
from tiercel.models.registry import architecture
from tiercel.models.rope import inverse_frequencies, rope_table

CONTEXT = 5000
# transformers computes base ** x in float32: some units of 6e-8, more where the base is large.
TOLERANCE = 3e-6
HF = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,  # the last is full in Gemma 3
    "vocab_size": 300,
    "intermediate_size": 100,
    "max_position_embeddings": CONTEXT,
}
GGUF = {
    "embedding_length": 64,
    "block_count": 2,
    "attention.head_count": 4,
    "feed_forward_length": 100,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "context_length": CONTEXT,
}


def read_hf(arch="llama", **values):
    return from_hf(architecture(arch, "f"), HF | values, "f")


def read_gguf(arch="llama", **keys):
    keys = {f"{arch}.{key}": value for key, value in (GGUF | keys).items()}
    return from_gguf(architecture(arch, "f"), keys, "f", 300)


def check(rope, expected):
    """`expected`: frequencies, then the factor of cos and sin."""
    frequencies, factor = expected[:-1].double(), float(expected[-1])
    assert rope.rotary_dim == 2 * len(frequencies)
    torch.testing.assert_close(inverse_frequencies(rope), frequencies, rtol=TOLERANCE, atol=0)
    table = rope_table(rope, 9)
    assert table.shape == (9, 2, len(frequencies))
    assert table.dtype == torch.float32
    angles = torch.arange(9.0).double()[:, None] * frequencies
    exact = torch.stack((angles.cos(), angles.sin()), dim=1) * factor
    torch.testing.assert_close(table.double(), exact, rtol=0, atol=3e-5 * factor)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_config_json_equals_transformers(kind):
    """All scalings with their optional fields, in each spelling."""
    for seed in range(60 if kind == "yarn" else 20):
        rng = random.Random(seed)
        head_dim = 2 * rng.randint(4, 64)
        rope, _ = sample_rope(rng, head_dim, CONTEXT, kind=kind)
        spelling = rng.choice(("rope_parameters", "type", "rope_type"))
        values = spell_rope(rope, spelling) | {"head_dim": head_dim}
        check(read_hf(**values).rope, reference_rope(rope, head_dim, CONTEXT))


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_gguf_metadata_equals_transformers(kind):
    for seed in range(20):
        rng = random.Random(seed)
        head_dim = 2 * rng.randint(4, 64)
        rope, _ = sample_rope(rng, head_dim, CONTEXT, kind=kind, has_options=False)
        keys = {"attention.key_length": head_dim, "rope.freq_base": rope["rope_theta"]}
        if kind != "default":
            keys |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
        if kind == "yarn":
            original = rope["original_max_position_embeddings"]
            keys["rope.scaling.original_context_length"] = original
        check(read_gguf(**keys).rope, reference_rope(rope, head_dim, CONTEXT))


@pytest.mark.parametrize("original", [6, 20, 300, 4000, 40000])
@pytest.mark.parametrize("base", [30.0, 150.0, 1e4, 1e6])
def test_bounds_of_yarn_equal_transformers(base, original):
    """Short contexts and small bases, where the bounds pass the first and the last pair."""
    for head_dim in (8, 10, 64, 128):
        rope = {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": 4.0,
            "original_max_position_embeddings": original,
        }
        found = read_hf(head_dim=head_dim, rope_parameters=rope).rope
        check(found, reference_rope(rope, head_dim, CONTEXT))


def test_the_original_context_is_the_whole_one_by_default():
    for kind in ("yarn", "llama3"):
        rope = {"rope_type": kind, "rope_theta": 900.0, "factor": 3.0}
        options = {"low_freq_factor": 1.5, "high_freq_factor": 5.0} if kind == "llama3" else {}
        found = read_hf(rope_scaling=rope | options).rope
        check(found, reference_rope(rope | options, 16, CONTEXT))
        assert found.original_context == CONTEXT
        # Older files name it beside the parameters.
        found = read_hf(rope_scaling=rope | options, original_max_position_embeddings=70).rope
        original = {"original_max_position_embeddings": 70}
        check(found, reference_rope(rope | options | original, 16, CONTEXT))


def test_a_factor_of_at_most_1_has_no_scale():
    for factor, scale in ((0.5, 1.0), (1.0, 1.0), (math.e, 1.1)):
        rope = RopeConfig(1e4, 8, "yarn", factor, 512)
        assert rope_table(rope, 1)[0, 0, 0] == pytest.approx(scale)


@pytest.mark.parametrize(
    "scales",
    [{"mscale": 1.3}, {"mscale_all_dim": 2.0}, {"mscale": 1.3, "mscale_all_dim": 0.0},
     {"mscale": 0.0, "mscale_all_dim": 1.3}, {"mscale": 0.7, "mscale_all_dim": 2.0},
     {"mscale": 0.7, "mscale_all_dim": 2.0, "attention_factor": 1.5}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("factor", [0.5, 1.0, 8.0])
def test_scales_of_yarn_count_together(scales, factor):
    rope = {"rope_type": "yarn", "rope_theta": 900.0, "factor": factor} | scales
    rope["original_max_position_embeddings"] = 200
    check(read_hf(rope_parameters=rope).rope, reference_rope(rope, 16, CONTEXT))


def gemma_values(rng):
    """Fields of both rotary embeddings, each left out now and then, in both forms."""
    fields = {}
    scaling = {"rope_type": "linear", "factor": log_uniform(rng, 1.5, 9)}
    bases = [{"rope_theta": log_uniform(rng, 100, 1e6)} if rng.random() < 0.6 else {} for _ in "ab"]
    if rng.random() < 0.5:
        full = {"rope_type": "default"} if rng.random() < 0.5 else scaling
        parameters = {"full_attention": full | bases[0]}
        if rng.random() < 0.7:
            sliding = {"rope_type": "default"} if rng.random() < 0.7 else scaling
            parameters["sliding_attention"] = sliding | bases[1]
        fields["rope_parameters"] = parameters
    elif rng.random() < 0.5:
        fields["rope_scaling"] = scaling
    if rng.random() < 0.5:
        fields["rope_theta"] = log_uniform(rng, 100, 1e6)
    if rng.random() < 0.5:
        fields["rope_local_base_freq"] = log_uniform(rng, 100, 1e6)
    return fields


def test_both_embeddings_of_gemma3_equal_transformers():
    for seed in range(60):
        rng = random.Random(seed)
        values = HF | gemma_values(rng) | {"head_dim": 2 * rng.randint(4, 20)}
        found = read_hf("gemma3", **values)
        module = Gemma3RotaryEmbedding(transformers.Gemma3TextConfig(**values))
        for rope, kind in ((found.rope, "full"), (found.rope_sliding, "sliding")):
            frequencies = getattr(module, f"{kind}_attention_inv_freq")
            factor = getattr(module, f"{kind}_attention_attention_scaling")
            check(rope, torch.cat((frequencies, torch.tensor([factor]))))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_base_that_is_not_named_is_that_of_transformers(arch):
    expected = reference_rope({"rope_type": "default", "rope_theta": 1e4}, 16, CONTEXT)
    check(read_hf(arch).rope, expected)
    check(read_gguf(arch).rope, expected)


def test_sliding_layers_of_a_gguf_file_have_a_base_of_their_own():
    """And no scaling; full layers do not look at it."""
    window = {"attention.sliding_window": 8}
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 7e5}
    for base, keys in ((1e4, {}), (300.0, {"rope.freq_base_swa": 300.0})):
        config = read_gguf("gemma3", **window, **scaling, **keys)
        rope = {"rope_type": "linear", "rope_theta": 7e5, "factor": 4.0}
        check(config.rope, reference_rope(rope, 16, CONTEXT))
        rope = {"rope_type": "default", "rope_theta": base}
        check(config.rope_sliding, reference_rope(rope, 16, CONTEXT))


def test_factors_of_a_file_divide_the_frequencies():
    """Before a scaling, as llama.cpp does."""
    factors = torch.rand(8) * 3 + 0.5
    for scaling in ("none", "linear", "yarn"):
        rope = RopeConfig(500.0, 16, scaling, 4.0, 300)
        plain = inverse_frequencies(RopeConfig(500.0, 16)) / factors.double()
        shares = inverse_frequencies(rope) / inverse_frequencies(RopeConfig(500.0, 16))
        torch.testing.assert_close(inverse_frequencies(rope, factors), plain * shares)
        table = rope_table(rope, 5, factors)
        angles = 3 * plain * shares
        scale = 1 + 0.1 * math.log(4) if scaling == "yarn" else 1
        torch.testing.assert_close(table[3, 1].double(), angles.sin() * scale, rtol=0, atol=1e-6)


def test_a_share_of_a_head_rotates():
    values = {"head_dim": 24, "rope_theta": 300.0}
    config = read_hf(partial_rotary_factor=0.75, **values)
    check(config.rope, reference_rope({"rope_type": "default", "rope_theta": 300.0}, 18, CONTEXT))
    inner = {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5}
    config = read_hf(partial_rotary_factor=0.75, rope_parameters=inner, **values)
    rope = {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}
    check(config.rope, reference_rope(rope, 12, CONTEXT))
    config = read_gguf(**{"attention.key_length": 24, "rope.dimension_count": 10})
    check(config.rope, reference_rope({"rope_type": "default", "rope_theta": 1e4}, 10, CONTEXT))
