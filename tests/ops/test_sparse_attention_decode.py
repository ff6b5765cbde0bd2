"""The kernel of few tokens against the oracle: lists, turns, borders, clusters, refusals."""

import pytest
import torch

from tests.dsv4_cases import captured, poison
from tests.ops.test_sparse_attention_kernel import check, expected, make_part
from tiercel.kernels.attention import sparse_attention as general
from tiercel.kernels.attention import sparse_attention_decode as kernel
from tiercel.ops import sparse_attention as op
from tiercel.ops.sparse_attention import SlottedKV
from tiercel.ops.sparse_attention_torch import PagedEntries

SMALL = (2, 32, 1)  # CTAs of a cluster, keys of a turn, CTAs of an SM


def launch(q, parts, sink, config=SMALL):
    """The kernel by itself, into poisoned memory."""
    num_tokens, num_heads, d = q.shape
    out = torch.full((num_tokens + 2, num_heads, d), float("nan"), dtype=q.dtype, device=q.device)
    keys = [general.KeyPart(*op._arguments(part)) for part in parts]
    assert kernel.decode_refusal(q, keys) == ""
    kernel.launch_sparse_attention_decode(q, keys, sink, d**-0.5, out[1:-1], config)
    assert out[0].isnan().all()  # nothing outside is written
    assert out[-1].isnan().all()
    return out[1:-1]


def make_q(num_tokens, num_heads, device):
    """Rows with gaps, aligned."""
    wide = torch.full((num_tokens, num_heads + 1, 520), float("nan"), device=device).bfloat16()
    wide[:, 1:, :512] = 2 * torch.randn(num_tokens, num_heads, 512, device=device)
    return wide[:, 1:, :512]


# Heads, (kind, entries of a block, keys) of each part.
CASES = {
    "csa": (32, [("run", 32, 90), ("chosen", 32, 70)]),
    "hca": (16, [("run", 30, 80), ("run", 1, 3)]),
    "slots": (16, [("slots", 7, 5), ("slots", 12, 66)]),
    "window": (16, [("run", 50, 128)]),
}


@pytest.fixture
def anywhere(request, device):
    """The kernel on the GPU, or on a processor."""
    if device.type == "cpu":
        request.getfixturevalue("on_processor")
    return device


@pytest.mark.parametrize("has_sink", [True, False], ids=["sink", "no sink"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_the_oracle(name, has_sink, anywhere):
    heads, shapes = CASES[name]
    parts = [make_part(kind, "encoded", 512, *sizes, anywhere) for kind, *sizes in shapes]
    q = make_q(3, heads, anywhere)
    sink = 2 * torch.randn(heads, device=anywhere) if has_sink else None
    out = launch(q, parts, sink)
    check(out, expected(q, parts, sink))
    if name == "slots":
        assert torch.equal(out[-1], torch.zeros_like(out[-1]))  # a token without keys


@pytest.mark.parametrize("num_keys", [1, 15, 16, 17, 127, 128, 129])
def test_borders_of_units_and_turns(num_keys, anywhere):
    part = make_part("chosen", "encoded", 512, 128, num_keys, anywhere)
    q = make_q(2, 16, anywhere)
    listed = part.slots
    rows = PagedEntries(listed.block_tables, listed.seq_ids[:2], num_keys, chosen=listed.chosen[:2])
    parts = [SlottedKV(part.cache, rows, part.scales, 64)]
    check(launch(q, parts, None), expected(q, parts, None))


def test_clusters_of_other_sizes(anywhere):
    """Without a cluster, with 4 CTAs of which some have no keys; turns of other lengths."""
    parts = [make_part("run", "encoded", 512, 32, 90, anywhere)]
    q = make_q(3, 16, anywhere)
    sink = torch.randn(16, device=anywhere)
    wanted = expected(q, parts, sink)
    for config in ((1, 32, 1), (4, 80, 1)):
        check(launch(q, parts, sink, config), wanted)


def test_other_tokens_and_longer_lists_change_no_bit(anywhere):
    part = make_part("run", "encoded", 512, 64, 150, anywhere)
    q, listed = make_q(3, 16, anywhere), part.slots
    full = launch(q, [part], None)
    alone = PagedEntries(listed.block_tables, listed.seq_ids[:1], 190, ends=listed.ends[:1] - 60)
    ends = listed.ends[:1].int()  # as a step has them
    short = PagedEntries(listed.block_tables, listed.seq_ids[:1], 150, ends=ends)
    ours = launch(q[:1], [SlottedKV(part.cache, short, part.scales, 64)], None)
    assert torch.equal(full[:1], ours)
    outs = [
        launch(q[:1], [SlottedKV(part.cache, rows, part.scales, 64)], None)
        for rows in (
            alone,
            PagedEntries(alone.block_tables, alone.seq_ids, 140, ends=alone.ends),
        )
    ]
    assert torch.equal(*outs)  # both see 132 keys


def test_scales_of_all_sizes(anywhere):
    """Large and tiny groups of channels, whose scales leave the range of one factor."""
    part = make_part("slots", "encoded", 512, 8, 20, anywhere)
    scales = part.scales.clone()
    scales[..., 0], scales[..., 1], scales[..., 2] = 150, 5, 1
    parts = [SlottedKV(part.cache, part.slots, scales, 64)]
    q = make_q(3, 16, anywhere)
    q[..., :64] *= 2.0**-30
    out = launch(q, parts, None)
    check(out[..., :64], expected(q, parts, None)[..., :64])
    check(out[..., 192:], expected(q, parts, None)[..., 192:])


def test_the_launch_fits_the_kernel():
    cluster, tile, ctas = kernel.LAUNCH
    assert tile % 16 == 0
    assert 2048 % cluster == 0
    assert ctas * kernel.smem_bytes(tile) <= 227 << 10


def test_refusals_say_why(device):
    part = make_part("run", "encoded", 512, 8, 20, device)
    keys = [general.KeyPart(*op._arguments(part))]
    q = make_q(3, 16, device)
    assert kernel.decode_refusal(q, keys) == ""
    assert kernel.decode_refusal(q[:, :5], keys).startswith("q is (3, 5, 512)")
    assert kernel.decode_refusal(q.repeat(6, 1, 1), keys) == "18 tokens, 20 keys"
    long = make_part("run", "encoded", 512, 64, kernel.MOST_KEYS + 1, device)
    reason = kernel.decode_refusal(q, [general.KeyPart(*op._arguments(long))])
    assert reason == f"3 tokens, {kernel.MOST_KEYS + 1} keys"
    wide = torch.zeros(3, 16, 516, device=device).bfloat16()[..., 4:]
    assert kernel.decode_refusal(wide, keys) == "rows of q are not aligned"
    plain = make_part("run", "bfloat16", 512, 8, 20, device)
    reason = kernel.decode_refusal(q, [general.KeyPart(*op._arguments(plain))])
    assert reason == "vectors are not encoded in aligned rows"


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16])
@pytest.mark.parametrize("heads", [64, 128])
def test_the_op_takes_it(num_tokens, heads, device, monkeypatch):
    """At the shapes of the models; the general kernel is not needed, and replay is the same."""
    q = torch.randn(num_tokens, heads, 512, device=device).bfloat16()
    parts = (
        make_part("run", "encoded", 512, 128, 128, device, num_tokens),
        make_part("chosen", "encoded", 512, 32, 512, device, num_tokens),
    )
    sink = torch.randn(heads, device=device)
    monkeypatch.setattr(general, "launch_sparse_attention", None)
    poison(device)
    out = op.sparse_attention(q, parts, sink, 512**-0.5)
    check(out[:4], expected(q[:4], parts, sink))
    assert torch.equal(captured(lambda: op.sparse_attention(q, parts, sink, 512**-0.5)), out)
