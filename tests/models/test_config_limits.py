"""Fields of both formats at their limits and one beyond; kinds of values that are refused."""

import math
from functools import partial

import numpy as np
import pytest

from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.models.config import from_gguf, from_hf
from tiercel.models.registry import architecture, hf_architecture

HF = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "sliding_window": 8,
}
GGUF = {
    "embedding_length": 64,
    "feed_forward_length": 100,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "context_length": 512,
    "attention.sliding_window": 8,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def hf(arch="gemma3", **fields):
    return from_hf(architecture(arch, "f"), HF | fields, "f")


def gguf(arch="gemma3", vocab_size=300, **fields):
    keys = {f"{arch}.{key}": value for key, value in (GGUF | fields).items()}
    return from_gguf(architecture(arch, "f"), keys, "f", vocab_size)


def refused(words, read, *arch, error=ModelFormatError, **fields):
    with pytest.raises(error) as raised:
        read(*arch, **fields)
    assert str(raised.value).startswith("f: ")
    assert words in str(raised.value)
    return raised.value


unsupported = partial(refused, error=UnsupportedModelError)


# Field of ours, key, least, most; and what the most needs of other fields.
HF_INTEGERS = [
    ("vocab_size", "vocab_size", 1, 2**24, {}),
    ("hidden_size", "hidden_size", 1, 2**17, {}),
    ("intermediate_size", "intermediate_size", 1, 2**20, {}),
    ("num_layers", "num_hidden_layers", 1, 1024, {}),
    ("num_heads", "num_attention_heads", 1, 1024, {"num_key_value_heads": 1}),
    ("num_kv_heads", "num_key_value_heads", 1, 1024, {"num_attention_heads": 1024}),
    ("head_dim", "head_dim", 2, 2**17, {}),
    ("max_position", "max_position_embeddings", 1, 2**26, {}),
    ("sliding_window", "sliding_window", 1, 2**26, {}),
    ("num_mtp_layers", "num_nextn_predict_layers", 0, 1, {}),
]
GGUF_INTEGERS = [
    ("hidden_size", "embedding_length", 1, 2**17, {}),
    ("intermediate_size", "feed_forward_length", 1, 2**20, {}),
    ("num_layers", "block_count", 1, 1024, {}),
    ("num_heads", "attention.head_count", 1, 1024, {"attention.head_count_kv": 1}),
    ("num_kv_heads", "attention.head_count_kv", 1, 1024, {"attention.head_count": 1024}),
    ("head_dim", "attention.key_length", 2, 2**17, {}),
    ("max_position", "context_length", 1, 2**26, {}),
    ("sliding_window", "attention.sliding_window", 1, 2**26, {}),
]
NO_INTEGERS = (True, 2.0, "2", float("nan"), {"a": 1}, [])


@pytest.mark.parametrize(("read", "table"), [(hf, HF_INTEGERS), (gguf, GGUF_INTEGERS)])
def test_integers_at_their_limits(read, table):
    for name, key, low, high, others in table:
        for value in (low, high):
            assert getattr(read(**others | {key: value}), name) == value
        for value in (low - 1, high + 1, -1, *NO_INTEGERS):
            is_pair = name != "head_dim" or value is True or value != 1
            words = key if is_pair else "1 rotary"
            refused(words, read, **others | {key: value})


@pytest.mark.parametrize(("read", "key"), [(hf, "rms_norm_eps"),
                                           (gguf, "attention.layer_norm_rms_epsilon")])  # fmt: skip
def test_eps_is_above_0_and_below_1(read, key):
    for value in (5e-324, 1e-6, math.nextafter(1, 0)):
        assert read(**{key: value}).norm_eps == value
    for value in (0, -1e-9, 1, 1.0, math.inf, math.nan, True, "1e-6"):
        refused(key, read, **{key: value})


NUMBERS = [
    (hf, "rope_theta", lambda c: c.rope.base),
    (hf, "rope_local_base_freq", lambda c: c.rope_sliding.base),
    (hf, "query_pre_attn_scalar", lambda c: c.attention_scale**-2),
    (gguf, "rope.freq_base", lambda c: c.rope.base),
    (gguf, "rope.freq_base_swa", lambda c: c.rope_sliding.base),
]


@pytest.mark.parametrize(("read", "key", "found"), NUMBERS, ids=[n[1] for n in NUMBERS])
def test_numbers_are_finite_and_above_0(read, key, found):
    for value in (1e-9, 7, 1e30):
        assert found(read(**{key: value})) == pytest.approx(value)
    for value in (0, -1.0, math.inf, -math.inf, math.nan, True, "7", [7]):
        refused(key, read, **{key: value})


@pytest.mark.parametrize("read", [hf, gguf])
def test_soft_caps_are_above_0_or_none(read):
    key = "final_logit_softcapping"
    assert read().logit_softcap == read(**{key: 0.0}).logit_softcap == 0.0
    assert read(**{key: None}).logit_softcap == 0.0
    for value in (1e-9, 30):
        assert read(**{key: value}).logit_softcap == value
    for value in (-1e-9, -0.5, math.inf, math.nan, "30", [30.0], np.array([1.0, 2.0])):
        refused(key, read, **{key: value})


# --- Rotary scaling


@pytest.mark.parametrize("rope", [YARN, LLAMA3])
def test_original_contexts_at_their_limits(rope):
    key = "original_max_position_embeddings"
    for value in (1, 2**26):
        assert hf(rope_scaling=rope | {key: value}).rope.original_context == value
    for value in (0, 2**26 + 1, 64.0, "64"):
        refused(key, hf, rope_scaling=rope | {key: value})


def test_original_context_of_a_gguf_file_at_its_limits():
    key = "rope.scaling.original_context_length"
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    for value in (1, 2**26):
        assert gguf(**yarn, **{key: value}).rope.original_context == value
    for value in (0, 2**26 + 1, 64.0, None):
        refused(key, gguf, **yarn, **{key: value})
    gguf(**yarn | {"rope.scaling.type": "linear"})


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "linear"}, "factor"),
        (YARN, "factor"),
        (LLAMA3, "factor"),
        (YARN, "attention_factor"),
        (YARN, "beta_fast"),
        (YARN, "beta_slow"),
        (YARN | {"mscale_all_dim": 1.0}, "mscale"),
        (YARN | {"mscale": 1.0}, "mscale_all_dim"),
        (LLAMA3, "low_freq_factor"),
        (LLAMA3, "high_freq_factor"),
        (YARN, "rope_theta"),
        (YARN, "partial_rotary_factor"),
    ],
)
def test_parameters_of_scalings_are_finite_and_above_0(rope, key):
    for name in ("rope_scaling", "rope_parameters"):
        for value in (-1.0, math.inf, math.nan, True, "2", [2.0]):
            fields = {name: rope | {key: value}}
            refused(f"{name}.{key}", hf, "llama", **fields)


def test_scalings_that_need_a_factor():
    for kind in ("linear", "yarn", "llama3"):
        refused("factor is None", hf, rope_scaling={"rope_type": kind})
    for kind in ("linear", "yarn"):
        fields = {"rope.scaling.type": kind, "rope.scaling.original_context_length": 64}
        refused("factor is None", gguf, **fields)


def test_bounds_of_scalings_are_apart():
    def yarn(fast, slow):
        return {"rope_scaling": YARN | {"beta_fast": fast, "beta_slow": slow}}

    hf(**yarn(2.001, 2))
    assert "above the slow" in refused("beta_fast 2 and beta_slow 2", hf, **yarn(2, 2)).hint
    refused("beta_fast 1.5 and beta_slow 2", hf, **yarn(1.5, 2))
    hf(**yarn(1e6, 1e-6))
    assert "1e-06 to 1e+06" in refused("beta_slow 1e-300", hf, **yarn(2, 1e-300)).hint
    refused("beta_fast 1e+308", hf, **yarn(1e308, 1))

    def llama3(low, high):
        return {"rope_scaling": LLAMA3 | {"low_freq_factor": low, "high_freq_factor": high}}

    hf(**llama3(2, 2.001))
    refused("low_freq_factor 2 and high_freq_factor 2", hf, **llama3(2, 2))
    refused("low_freq_factor 3 and high_freq_factor 2", hf, **llama3(3, 2))


def test_both_embeddings_of_gemma3_are_checked():
    scaling = LLAMA3 | {"low_freq_factor": 5.0}
    for kind in ("full_attention", "sliding_attention"):
        refused("high_freq_factor 4", hf, rope_parameters={kind: scaling})


def test_yarn_needs_a_base_above_1():
    hf(rope_theta=1.001, rope_scaling=YARN)
    for base in (1.0, 0.5):
        refused("yarn with a base of", hf, rope_theta=base, rope_scaling=YARN)
    hf(rope_theta=1.0, rope_scaling=LLAMA3)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "mrope"])
def test_other_scalings_are_refused(kind):
    for key in ("type", "rope_type"):
        rope = {key: kind, "factor": 2.0}
        unsupported(f"rope type {kind!r}", hf, rope_scaling=rope)
    fields = {"rope.scaling.type": kind, "rope.scaling.factor": 2.0}
    unsupported(f"type is {kind!r}", gguf, **fields)


def test_rotating_dimensions_are_even_and_fit():
    for share, dims in ((1.0, 16), (0.5, 8), (0.125, 2), (0.99, None), (0.1, None), (1.2, None),
                        (0.07, None), (0.05, None)):  # fmt: skip
        fields = {"partial_rotary_factor": share}
        if dims is None:
            refused("rotary dimensions in a head of 16", hf, "llama", **fields)
        else:
            assert hf("llama", **fields).rope.rotary_dim == dims
    key = "rope.dimension_count"
    for dims in (2, 10, 16):
        assert gguf(**{key: dims}).rope.rotary_dim == dims
        assert gguf(**{key: dims}).rope_sliding.rotary_dim == dims
    for dims in (0, 1, 17, 18):
        refused(key, gguf, **{key: dims})
    refused("15 rotary dimensions", gguf, **{key: 15})
    refused("15 rotary dimensions", hf, head_dim=15)


def test_constants_of_gguf_scalings_are_the_usual_ones():
    usual = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}
    usual |= {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    scaling["rope.scaling.original_context_length"] = 64
    for name, value in usual.items():
        key = f"rope.scaling.{name}"
        assert gguf(**scaling, **{key: value}) == gguf(**scaling)
        for other in (value + 0.5, 0.0, -1.0):
            fields = scaling | {key: other}
            unsupported(f"{name} is", gguf, **fields)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_kinds_of_rotary_parameters(name):
    for value in (3, "yarn", [YARN], True):
        refused(f"{name} is", hf, **{name: value})
    for key in ("type", "rope_type"):
        refused(f"{name}.{key} is 3", hf, **{name: {key: 3}})
    refused("truncate is 1", hf, **{name: YARN | {"truncate": 1}})
    refused("rope.scaling.type is 3", gguf, **{"rope.scaling.type": 3})


def test_long_values_are_shown_in_part():
    for length, shown in ((58, "a" * 58 + "'"), (59, "a" * 56 + "..."), (500, "a" * 56 + "...")):
        refused(f"hidden_size is '{shown}.", hf, hidden_size="a" * length)


def test_names_of_architectures():
    for names, expected in (
        (["LlamaForCausalLM"], "llama"),
        (["Qwen2ForCausalLM"], "qwen2"),
        (["Other", "Qwen3ForCausalLM", "LlamaForCausalLM"], "qwen3"),
        (["Gemma3ForCausalLM"], "gemma3"),
    ):
        assert hf_architecture(names, "f").name == expected
        assert architecture(expected, "f").name == expected
    for names in ([], ["Other"], ["llama"]):
        assert (
            "Gemma3ForCausalLM, Llama"
            in unsupported("architectures [", hf_architecture, names, "f").hint
        )
    for length, shown in ((40, "a" * 40), (41, "a" * 37 + "..."), (90, "a" * 37 + "...")):
        error = unsupported(f"architecture '{shown}'", architecture, "a" * length, "f")
        assert "gemma3, llama, qwen2, qwen3" in error.hint


# --- Layers


@pytest.mark.parametrize(
    ("key", "high"),
    [("attention.head_count", 1024), ("attention.head_count_kv", 1024),
     ("feed_forward_length", 2**20)],
)  # fmt: skip
def test_arrays_of_layers(key, high):
    """One entry for each block, all equal; files hold numpy integers."""
    others = {"attention.head_count": high} if key.endswith("kv") else {}
    others |= {"attention.head_count_kv": 1} if key.endswith("count") else {}
    for make in (list, tuple, np.array):
        for value in (high, 4):
            config = gguf(**others | {key: make([value, value])})
            name = {"attention.head_count": "num_heads", "attention.head_count_kv": "num_kv_heads"}
            assert getattr(config, name.get(key, "intermediate_size")) == value
            assert type(getattr(config, name.get(key, "intermediate_size"))) is int
    wrong = ([4], [4, 4, 4], [], [4, 0], [high + 1, high + 1], [4, -4], [4, 4.0], [4, True])
    for values in wrong:
        fields = others | {key: values}
        refused(key, gguf, **fields)
    fields = others | {key: [4, 2]}
    unsupported(f"{key} differs", gguf, **fields)


def test_defaults_of_sizes():
    """Key/value heads are all heads; a head is its share of the width, at least 1."""
    config = hf(num_key_value_heads=None, head_dim=None, hidden_size=67)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    fields = {"attention.head_count_kv": None, "attention.key_length": None}
    config = gguf(**fields, embedding_length=57)
    assert (config.num_kv_heads, config.head_dim) == (4, 14)
    assert config.attention_scale == 14**-0.5
    refused("1 rotary dimensions in a head of 1", hf, head_dim=None, hidden_size=3)
    refused("1 rotary dimensions in a head of 1", gguf, **fields, embedding_length=3)
    for fields in ({"attention.value_length": 15}, {"attention.value_length": 17}):
        unsupported("dimensions and values", gguf, **fields)
    assert gguf(**{"attention.value_length": 16}) == gguf()


@pytest.mark.parametrize(("heads", "kv_heads", "fits"), [(4, 4, True), (6, 2, True), (6, 4, False),
                                                         (2, 4, False), (5, 2, False)])  # fmt: skip
def test_heads_share_key_value_heads_evenly(heads, kv_heads, fits):
    for read, fields in (
        (hf, {"num_attention_heads": heads, "num_key_value_heads": kv_heads}),
        (gguf, {"attention.head_count": heads, "attention.head_count_kv": kv_heads}),
    ):
        if fits:
            assert read(**fields).num_heads == heads
        else:
            refused(f"{heads} heads cannot share {kv_heads} key/value heads", read, **fields)


def full_layers(config):
    return [i for i, kind in enumerate(config.layer_types) if kind == "full"]


def test_patterns_of_windows():
    """Every n-th layer is full; 0: none; 6 by default."""
    for pattern, expected in ((0, []), (1, list(range(14))), (3, [2, 5, 8, 11]), (6, [5, 11]),
                              (None, [5, 11]), (15, []), (2**16, [])):  # fmt: skip
        fields = {"sliding_window_pattern": pattern, "num_hidden_layers": 14}
        assert full_layers(hf(**fields)) == expected
        fields = {"attention.sliding_window_pattern": pattern, "block_count": 14}
        assert full_layers(gguf(**fields)) == expected
    for pattern in (-1, 2**16 + 1, 1.5, "3", True):
        refused("pattern", hf, sliding_window_pattern=pattern)
    for pattern in (-1, 2**16 + 1, 1.5, "3"):
        fields = {"attention.sliding_window_pattern": pattern}
        refused("pattern", gguf, **fields)


def test_layer_types_name_every_layer():
    types = ["full_attention", "sliding_attention"]
    assert hf(layer_types=types).layer_types == ("full", "sliding")
    for wrong in (types[:1], [*types, types[0]], ["full_attention", "linear_attention"], "ab", 2):
        refused("layer_types", hf, layer_types=wrong)


def test_the_window_of_gemma3():
    assert hf(sliding_window=None).sliding_window == 4096  # the class's default
    refused("sliding_window is None", gguf, **{"attention.sliding_window": None})
    assert hf("qwen3").sliding_window == hf("llama").sliding_window == 0


def test_a_head_for_drafts_is_a_block_of_gguf_files():
    for blocks, heads, layers in ((2, 1, 1), (3, 1, 2), (1, 0, 1)):
        config = gguf("qwen3", block_count=blocks, nextn_predict_layers=heads)
        assert (config.num_layers, config.num_mtp_layers) == (layers, heads)
        assert len(config.layer_types) == layers
    refused("block_count", gguf, "qwen3", block_count=1, nextn_predict_layers=1)
    refused("nextn", gguf, "qwen3", block_count=9, nextn_predict_layers=2)


# --- What a family alone has


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_fast", "silu "])
def test_other_activations_are_refused(name):
    unsupported("hidden_act", hf, "llama", hidden_act=name)
    unsupported("hidden_activation", hf, hidden_activation=name)


def test_names_of_activations():
    for name, expected in (("silu", "silu"), ("swish", "silu"), ("gelu_new", "gelu_tanh"),
                           ("gelu_pytorch_tanh", "gelu_tanh")):  # fmt: skip
        assert hf("qwen3", hidden_act=name).activation == expected
        assert hf(hidden_activation=name).activation == expected
    for arch in ("llama", "qwen2", "qwen3"):
        assert hf(arch).activation == gguf(arch).activation == "silu"
    # Gemma's older field names another function than the model was trained with.
    assert hf(hidden_act="gelu").activation == gguf().activation == "gelu_tanh"


def test_attention_that_is_not_causal_is_refused():
    key = "use_bidirectional_attention"
    unsupported(key, hf, **{key: True})
    assert hf(**{key: False}) == hf(**{key: None}) == hf()
    refused(key, hf, **{key: "yes"})


def test_whether_the_head_is_the_embedding():
    for arch, default in (("llama", False), ("qwen2", False), ("qwen3", False), ("gemma3", True)):
        assert hf(arch).tie_embeddings is default
        for value in (True, False):
            assert hf(arch, tie_word_embeddings=value).tie_embeddings is value
        refused("tie_word", hf, arch, tie_word_embeddings=1)


@pytest.mark.parametrize("layers", [61, 62, 63])
def test_the_query_scale_of_gemma3_in_gguf_files(layers):
    """A GGUF file does not say it: 27B, known by its layers, has a rule of its own."""
    expected = (64 / 4) ** -0.5 if layers == 62 else 24**-0.5
    config = gguf(block_count=layers, **{"attention.key_length": 24})
    assert config.attention_scale == expected
    assert gguf("qwen3", block_count=62, **{"attention.key_length": 24}).attention_scale == 24**-0.5


def test_eps_by_default():
    for arch in ("llama", "qwen2", "qwen3", "gemma3"):
        assert hf(arch, rms_norm_eps=None).norm_eps == 1e-6  # of all classes of transformers
    refused("rms_epsilon is None", gguf, **{"attention.layer_norm_rms_epsilon": None})


def test_scales_by_default():
    assert hf(head_dim=24).attention_scale == 256**-0.5
    assert hf(head_dim=24, query_pre_attn_scalar=96).attention_scale == 96**-0.5
    for arch in ("llama", "qwen2", "qwen3"):
        config = hf(arch, head_dim=24, query_pre_attn_scalar=96)
        assert config.attention_scale == 24**-0.5
        assert (config.embedding_scale, config.logit_softcap) == (1.0, 0.0)
    assert (
        hf(hidden_size=72).embedding_scale == gguf(embedding_length=72).embedding_scale == 72**0.5
    )
