"""The choice by a CTA against the oracle and the composite keys of the PyTorch path."""

import pytest
import torch

from tests.ops.test_indexer_topk import chosen
from tiercel.kernels.attention import indexer_select as kernel
from tiercel.ops import indexer_topk_torch as torch_ops
from tiercel.reference import indexer_topk as oracle


@pytest.fixture
def anywhere(request, device):
    """The kernel on the GPU, or on a processor."""
    if device.type == "cpu":
        request.getfixturevalue("on_processor")
    return device


def select(scores, visible, topk, config=None):
    """Entries that the kernel chooses, into poisoned memory with gaps."""
    num_tokens = scores.shape[0]
    out = torch.full((num_tokens + 2, topk + 3), 7, dtype=torch.int32, device=scores.device)
    seen = torch.arange(scores.shape[1], device=scores.device) < visible[:, None]
    padded = torch.where(seen, scores, float("-inf"))
    padded = torch.nn.functional.pad(padded, (0, -scores.shape[1] % 16), value=float("-inf"))
    bests = kernel.make_bests(num_tokens, scores.shape[1], scores.device)
    bests[:] = padded.view(num_tokens, -1, 16).amax(2)
    kernel.launch_indexer_select(scores, bests, visible, out[1:-1, :topk], config)
    assert out[[0, -1]].eq(7).all()
    assert out[:, topk:].eq(7).all()
    return out[1:-1, :topk].contiguous()


def expected(scores, visible, topk):
    keys = torch_ops.sort_keys(scores, 0, visible)
    return torch_ops.entries_of(torch.topk(keys, topk, dim=1).values)


# Scores whole in shared memory; by groups; by groups with candidates that do not fit.
WHOLE = kernel.SelectConfig(8192, 8192, False)
GROUPED = kernel.SelectConfig(65536, 512, True)
TIGHT = kernel.SelectConfig(65536, 32, True)
CONFIGS = [WHOLE, GROUPED, TIGHT]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_choice_is_the_oracle_s(dtype, config, anywhere):
    scores = torch.randn(3, 1100, device=anywhere)
    visible = torch.tensor([1100, 77, 1001], dtype=dtype, device=anywhere)
    scores[1, 77:] = float("nan")  # not visible
    out = select(scores, visible, 100, config)
    assert chosen(out) == oracle.topk(scores, visible, 100)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_equal_and_extreme_scores(config, anywhere):
    scores = torch.randint(-2, 3, (4, 900)).float() * 0.5
    scores[0] = 0.0
    scores[0, ::3] = -0.0
    scores[1, 850:] = torch.tensor([float("inf"), -float("inf"), 1e-45, -1e-45, 3e38]).repeat(10)
    scores[2, 100:] = float("nan")  # not visible
    scores = scores.to(anywhere)
    visible = torch.tensor([900, 900, 100, 999], dtype=torch.int32, device=anywhere)
    for topk in (5, 31):
        out = select(scores, visible, topk, config)
        assert torch.equal(out, expected(scores, visible, topk))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_fewer_visible_entries_than_are_chosen(config, anywhere):
    scores = torch.randn(3, 60, device=anywhere)
    visible = torch.tensor([0, 31, 60], dtype=torch.int32, device=anywhere)
    out = select(scores, visible, 40, config)
    assert out[0].eq(-1).all()
    assert out[1].tolist() == [*range(31), *[-1] * 9]
    assert torch.equal(out[2:], expected(scores, visible, 40)[2:])


@pytest.mark.parametrize(
    "config", [kernel.SelectConfig(32768, 32768, False), GROUPED, TIGHT], ids=str
)
def test_several_turns(config, anywhere):
    """More than 1,024 scores and groups, among them runs of equal ones."""
    scores = torch.randn(1, 20000, device=anywhere).round(decimals=2)
    visible = torch.tensor([19999], dtype=torch.int32, device=anywhere)
    out = select(scores, visible, 512, config)
    assert torch.equal(out, expected(scores, visible, 512))


@pytest.mark.parametrize("entries", [65537, 131073, 262144])
def test_groups_that_are_joined(entries, anywhere):
    scores = torch.randn(1, entries, device=anywhere)
    visible = torch.tensor([entries], device=anywhere)
    out = select(scores, visible, 600)
    assert torch.equal(out, expected(scores, visible, 600))


def test_nan_is_a_choice(anywhere):
    """Of a request that failed: entries in order, each once."""
    scores = torch.full((1, 1000), float("nan"), device=anywhere)
    scores[0, :10] = 1.0
    visible = torch.tensor([1000], device=anywhere)
    for config in CONFIGS:
        out = select(scores, visible, 100, config)[0].tolist()
        assert out == list(range(10, 110))


def test_launches_fit_the_shared_memory():
    for entries in (1, 8192, 8193, 16384, 16385, kernel.MOST_ENTRIES):
        config = kernel.select_indexer_select(entries)
        assert config.most >= entries
        assert config.has_groups or config.capacity >= entries
        assert kernel.smem_bytes(config) <= 227 << 10


def test_refusals_say_why(device):
    long = kernel.MOST_ENTRIES + 1
    for tokens, entries in ((1, long), (65, 16384)):
        reason = kernel.select_refusal(tokens, entries, device)
        assert reason == f"{tokens} tokens, {entries} entries"
    for tokens, entries in ((1, 600), (64, long - 1)):
        assert kernel.select_refusal(tokens, entries, device) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("entries", [513, 2048, 8192, 32768, 200001, 262144])
@pytest.mark.parametrize("topk", [512, 1024])
def test_sizes_of_the_models(entries, topk, device):
    scores = torch.randn(4, entries, device=device)
    scores[1] = scores[1].round(decimals=1)
    scores[2] = 0.0
    visible = torch.tensor([entries, entries - 1, entries, topk - 1], device=device)
    topk = min(topk, entries)
    assert torch.equal(select(scores, visible, topk), expected(scores, visible, topk))
