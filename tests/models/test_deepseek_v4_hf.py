"""Random tiny DeepSeek-V4 models as transformers saves them, against its own forward pass.

Shapes are sampled: all kinds of layers and of routing, sizes that no block of 128 divides, and a
window and top-k that a prompt of 300 tokens passes many times. Every parameter has spread, so that
none could be left out, and a change of any field changes the reference.
"""

import random

import numpy as np
import pytest
import torch
import transformers

from tests.tiny_llm import greedy, open_tiny

KINDS = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
PROMPT_LEN, ANSWER_LEN, CHUNK = 300, 6, 47  # past two entries of 128 tokens
TOLERANCE = 2e-4  # logits spread by 2
DECIDES = 20 * TOLERANCE
# Rounding decides a near tie of the indexer or of a router. Changes of all weights by NUDGE move
# logits by 6e-5, and by 0.1 where they decide a tie: prompts with near ties are left out.
NUDGE, NUM_NUDGES, STEADY, MOST_PROMPTS = 1e-6, 6, 1e-3, 20
NUM_DEFAULT, NUM_SLOW = 3, 60
CASES = [
    pytest.param(seed, marks=[pytest.mark.slow] * (seed >= NUM_DEFAULT)) for seed in range(NUM_SLOW)
]


def log_uniform(rng, low, high):
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def sample_values(rng):
    """Fields of a config; every kind of layer occurs, the first layers route by token id."""
    groups = rng.choice((1, 2, 3))
    rotary_dim = rng.choice((8, 16, 32))
    ratios = [0, 4, 128, *rng.choices((0, 4, 128), k=rng.choice((0, 1, 2)))]
    rng.shuffle(ratios)
    num_hash = rng.randrange(len(ratios))
    experts = rng.randint(4, 9)
    return {
        "vocab_size": rng.randint(131, 151),
        "hidden_size": rng.choice((72, 96, 136, 160)),
        "moe_intermediate_size": rng.choice((40, 64, 88)),
        "num_hidden_layers": len(ratios),
        "num_attention_heads": groups * rng.choice((1, 2, 3)),
        "head_dim": rotary_dim + rng.choice((40, 64, 88)),
        "q_lora_rank": rng.choice((48, 56, 72)),
        "num_experts_per_tok": rng.randint(1, 3),
        "n_routed_experts": experts,
        "routed_scaling_factor": rng.uniform(1, 3),
        "max_position_embeddings": 1024,
        "layer_types": [KINDS[ratio] for ratio in ratios],
        "mlp_layer_types": ["hash_moe"] * num_hash + ["moe"] * (len(ratios) - num_hash),
        "hc_sinkhorn_iters": rng.randint(1, 6),
        "hc_eps": log_uniform(rng, 1e-3, 1e-1),
        "rms_norm_eps": log_uniform(rng, 1e-3, 1e-1),
        "swiglu_limit": rng.uniform(0.5, 1.5),
        "sliding_window": rng.randint(8, 12),
        "o_groups": groups,
        "o_lora_rank": rng.choice((24, 40, 48)),
        "index_n_heads": rng.randint(10, 14),
        "index_head_dim": rng.choice((32, 64)),
        "index_topk": rng.randint(5, 7),
        "num_nextn_predict_layers": 0,
        "rope_theta": log_uniform(rng, 50, 10000),
        "compress_rope_theta": log_uniform(rng, 50, 160000),
        "qk_rope_head_dim": rotary_dim,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": rng.uniform(2, 16),
            "original_max_position_embeddings": rng.randint(64, 512),
            "beta_fast": rng.uniform(8, 32),
            "beta_slow": rng.uniform(0.5, 2),
        },
    }


def changes_of(values):
    """The values with one field changed; weights have the same shapes."""
    factors = {
        "routed_scaling_factor": 1.1,
        "hc_eps": 2,
        "rms_norm_eps": 2,
        "swiglu_limit": 0.8,
        "rope_theta": 1.5,
        "compress_rope_theta": 1.5,
    }
    yield from ((name, values | {name: values[name] * factor}) for name, factor in factors.items())
    names = ("hc_sinkhorn_iters", "sliding_window", "index_topk")
    yield from ((name, values | {name: values[name] + 1}) for name in names)
    rope = values["rope_parameters"]
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        changed = rope | {name: rope[name] * 4}
        yield name, values | {"rope_parameters": changed}


def make_model(values, state=None):
    """The model of transformers, random unless `state` has its tensors."""
    config = transformers.DeepseekV4Config(
        **values, bos_token_id=0, eos_token_id=1, attn_implementation="eager"
    )
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    if state is None:
        for name, tensor in model.state_dict().items():
            tensor.copy_(random_tensor(name, tensor, values))
    else:
        model.load_state_dict(state)
    return model


def random_tensor(name, tensor, values):
    """Values with spread: norms about 1, biases, sinks and scales of order 1, rows near 1 long."""
    if name.endswith("tid2eid"):
        rows, chosen = tensor.shape
        noise = torch.rand(rows, values["n_routed_experts"])
        return noise.argsort(1)[:, :chosen]
    noise = torch.randn(tensor.shape)
    if name.endswith("norm.weight"):
        return 1 + 0.3 * noise
    if name.endswith("scale"):
        return 1 + 0.5 * noise
    if "embed_tokens" in name or tensor.dim() == 1 or name.endswith("position_bias"):
        return 0.7 * noise
    gain = 2 if "lm_head" in name or "gate.weight" in name else 1.2
    return noise * (gain / tensor.shape[-1] ** 0.5)


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def is_steady(model, ids):
    """Whether no choice of entries or experts is a near tie."""
    expected = logits_of(model, ids)
    state = model.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    largest = 0.0
    for _ in range(NUM_NUDGES):
        for name, tensor in state.items():
            if tensor.is_floating_point():
                tensor.copy_(kept[name] * (1 + NUDGE * torch.randn(tensor.shape)))
        largest = max(largest, np.abs(logits_of(model, ids) - expected).max())
    model.load_state_dict(kept)
    return largest < STEADY


def sampled(seed, folder=None):
    """A model by seed, saved to `folder`, its fields, and a prompt without near ties."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    values = sample_values(rng)
    model = make_model(values)
    if folder:
        model.save_pretrained(folder)
    for _ in range(MOST_PROMPTS):
        ids = rng.choices(range(values["vocab_size"]), k=PROMPT_LEN)
        if is_steady(model, ids):
            return model, values, ids
    raise AssertionError("every prompt has near ties")


@pytest.mark.parametrize("seed", CASES)
def test_logits_equal_those_of_transformers(tmp_path, seed):
    """The whole prompt in one step, in chunks, and tokens after it one by one."""
    model, _, ids = sampled(seed, tmp_path)
    expected = logits_of(model, ids)
    assert 1 < expected.std() < 4
    with open_tiny(tmp_path, max_num_batched_tokens=512) as llm:
        np.testing.assert_allclose(llm.logits(ids), expected, atol=TOLERANCE, rtol=0)
    with open_tiny(tmp_path, max_num_batched_tokens=CHUNK) as llm:
        np.testing.assert_allclose(llm.logits(ids), expected, atol=TOLERANCE, rtol=0)
        (output,) = llm.generate({"prompt_token_ids": ids}, greedy(ANSWER_LEN, logprobs=0))
    (answer,) = output.outputs
    following = logits_of(model, ids + answer.token_ids)[PROMPT_LEN - 1 : -1]
    logprobs = torch.from_numpy(following).log_softmax(1)
    for row, token, entry in zip(logprobs, answer.token_ids, answer.logprobs, strict=True):
        assert row[token] >= row.max() - 2 * TOLERANCE
        assert abs(entry.logprob - row[token]) <= 2 * TOLERANCE


def test_every_field_decides():
    """A field that is read wrongly shows in the logits."""
    model, values, ids = sampled(0)
    expected, state = logits_of(model, ids), model.state_dict()
    for name, changed in changes_of(values):
        actual = logits_of(make_model(changed, state), ids)
        assert np.abs(actual - expected).max() > DECIDES, name


def test_every_tensor_decides():
    """A tensor that is left out, or taken from another layer, shows in the logits."""
    model, values, ids = sampled(0)
    expected = logits_of(model, ids)
    for name, tensor in model.state_dict().items():
        kept = tensor.clone()
        tensor.copy_(random_tensor(name, tensor, values))
        assert np.abs(logits_of(model, ids) - expected).max() > DECIDES, name
        tensor.copy_(kept)
