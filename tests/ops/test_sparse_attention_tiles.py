"""The kernel of wgmma against the oracle: lists, tiles, borders, clusters, poison, refusals."""

from types import SimpleNamespace

import pytest
import torch

from tests.dsv4_cases import captured, poison
from tests.launches_on_cpu import QUICK_TO_RUN, encode_tensor_map
from tests.ops.test_sparse_attention_decode import make_q
from tests.ops.test_sparse_attention_kernel import check, expected, make_part
from tiercel.kernels.attention import sparse_attention as general
from tiercel.kernels.attention import sparse_attention_tiles as kernel
from tiercel.kernels.attention.sparse_attention_parts import division
from tiercel.kernels.runtime import rtc
from tiercel.ops import sparse_attention as op
from tiercel.ops.sparse_attention import SlottedKV
from tiercel.ops.sparse_attention_torch import PagedEntries

LEVEL = QUICK_TO_RUN


@pytest.fixture
def anywhere(request, device, monkeypatch):
    """The kernel on the GPU, or on a processor that has two places for CTAs."""
    if device.type == "cpu":
        processor = request.getfixturevalue("on_processor")
        processor.seed += 1
        few = SimpleNamespace(multi_processor_count=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
        monkeypatch.setattr(rtc, "_encode_tensor_map", encode_tensor_map)
    return device


def launch(q, parts, sink, cluster=1):
    """The kernel by itself, into poisoned memory."""
    num_tokens, num_heads, d = q.shape
    out = torch.full((num_tokens + 2, num_heads, d), float("nan"), dtype=q.dtype, device=q.device)
    keys = [general.KeyPart(*op._arguments(part)) for part in parts]
    assert kernel.tiles_refusal(q, keys) == ""
    kernel.launch_sparse_attention_tiles(q, keys, sink, d**-0.5, out[1:-1], cluster)
    assert out[0].isnan().all()  # nothing outside is written
    assert out[-1].isnan().all()
    return out[1:-1]


# Heads, (kind, entries of a block, keys) of each part.
CASES = {
    "csa": (64, [("run", 32, 90), ("chosen", 32, 70)]),
    "hca": (128, [("run", 30, 80), ("run", 1, 3)]),
    "slots": (16, [("slots", 7, 5), ("slots", 12, 66)]),
    "window": (70, [("run", 50, 128)]),
}


@pytest.mark.parametrize(("name", "cluster"), [(name, 1) for name in CASES] + [("hca", 2)])
def test_kernel_matches_the_oracle(name, cluster, anywhere):
    heads, shapes = CASES[name]
    parts = [make_part(kind, "encoded", 512, *sizes, anywhere) for kind, *sizes in shapes]
    q = make_q(3, heads, anywhere)
    for sink in (2 * torch.randn(heads, device=anywhere), None):
        out = launch(q, parts, sink, cluster)
        check(out, expected(q, parts, sink))
        if name == "slots":
            assert torch.equal(out[-1], torch.zeros_like(out[-1]))  # a token without keys


def some_tokens(part, num_tokens, num_keys):
    """The first tokens of a part of chosen entries, with lists of so many."""
    listed = part.slots
    chosen = listed.chosen[:num_tokens, :num_keys].contiguous()
    rows = PagedEntries(listed.block_tables, listed.seq_ids[:num_tokens], num_keys, chosen=chosen)
    return SlottedKV(part.cache, rows, part.scales, 64)


@pytest.mark.parametrize("num_keys", [1, 63, 64, 65, 127, 128, 129])
def test_borders_of_tiles(num_keys, anywhere):
    part = some_tokens(make_part("chosen", "encoded", 512, 128, 129, anywhere), 1, num_keys)
    q = make_q(1, 64, anywhere)
    check(launch(q, [part], None), expected(q, [part], None))


def test_clusters_of_which_some_have_no_keys(anywhere):
    part = some_tokens(make_part("chosen", "encoded", 512, 128, 150, anywhere), 2, 150)
    q = make_q(2, 64, anywhere)
    sink = torch.randn(64, device=anywhere)
    check(launch(q, [part], sink, 4), expected(q, [part], sink))
    nothing = part.slots.chosen.fill_(-1)
    assert nothing.eq(-1).all()
    for cluster in (1, 4):
        for given in (sink, None):
            out = launch(q, [part], given, cluster)
            assert torch.equal(out, torch.zeros_like(out))


def test_other_tokens_and_longer_lists_change_no_bit(anywhere):
    part = make_part("run", "encoded", 512, 64, 150, anywhere)
    q, listed = make_q(3, 64, anywhere), part.slots
    for cluster in (1, 2):
        full = launch(q, [part], None, cluster)
        ends = listed.ends[:1].clamp(max=150)
        outs = [
            launch(q[:1], [SlottedKV(part.cache, rows, part.scales, 64)], None, cluster)
            for rows in (
                PagedEntries(listed.block_tables, listed.seq_ids[:1], 150, ends=listed.ends[:1]),
                PagedEntries(listed.block_tables, listed.seq_ids[:1], 150, ends=ends),
                PagedEntries(listed.block_tables, listed.seq_ids[:1], 400, ends=ends),
            )
        ]
        assert torch.equal(full[:1], outs[0])
        assert torch.equal(outs[1], outs[2])  # both see 150 keys


def test_nan_that_is_not_listed_stays_where_it_is(anywhere):
    """Behind a sequence's end, in the block of its last entry, as a failed request leaves it."""
    part = make_part("run", "encoded", 512, 32, 90, anywhere)
    q = make_q(3, 64, anywhere)
    wanted = expected(q, [part], None)
    scales, cache = part.scales.clone(), part.cache.clone()
    seen = torch.zeros(scales.shape[:2], dtype=torch.bool, device=anywhere)
    tables, ends = part.slots.block_tables, part.slots.ends
    for token, sequence in enumerate(part.slots.seq_ids.tolist()):
        for entry in range(max(0, ends[token].item() - 90), ends[token].item()):
            seen[tables[sequence, entry // 32].item(), entry % 32] = True
    scales[~seen], cache[~seen] = 255, 255  # NaN in either form
    check(launch(q, [SlottedKV(cache, part.slots, scales, 64)], None), wanted)


def test_large_scores_sinks_and_scales(anywhere):
    """Maxima that grow from tile to tile, sinks beyond all scores, groups of any scale."""
    part = some_tokens(make_part("chosen", "encoded", 512, 64, 130, anywhere), 1, 130)
    part.slots.chosen[:] = torch.arange(130, dtype=torch.int32, device=anywhere)
    scales = part.scales.clone()
    scales[..., 0], scales[..., 1], scales[..., 2] = 150, 5, 1
    part = SlottedKV(part.cache, part.slots, scales, 64)
    q = make_q(1, 64, anywhere)
    q[..., :64] *= 2.0**-22
    out = launch(q, [part], None)
    wanted = expected(q, [part], None)
    check(out[..., :64], wanted[..., :64])
    check(out[..., 192:], wanted[..., 192:])
    sink = torch.tensor([-1e5, 0.0, 1e7, float("-inf")], device=anywhere).repeat(16)
    for cluster in (1, 2):
        out = launch(q, [part], sink, cluster)
        check(out[..., 192:], expected(q, [part], sink)[..., 192:])
        assert torch.equal(out[:, 2], torch.zeros_like(out[:, 2]))


def test_refusals_say_why(device):
    part = make_part("run", "encoded", 512, 8, 20, device)
    q = make_q(3, 16, device)

    def refusal(q, part):
        return kernel.tiles_refusal(q, [general.KeyPart(*op._arguments(part))])

    assert refusal(q, part) == ""
    assert refusal(q.half(), part) == "q is (3, 16, 512) torch.float16"
    wide = torch.zeros(3, 16, 516, device=device).bfloat16()[..., 4:]
    assert refusal(wide, part) == "rows of q are not aligned"
    plain = make_part("run", "bfloat16", 512, 8, 20, device)
    assert refusal(q, plain) == "vectors are not encoded in aligned rows"
    odd = torch.zeros(7, 8, 9, dtype=torch.uint8, device=device)[..., 1:]
    assert (
        refusal(q, SlottedKV(part.cache, part.slots, odd, 64)) == "scales are not in aligned rows"
    )


def test_more_tokens_have_smaller_clusters():
    assert [kernel.select_sparse_attention_tiles(n) for n in (1, 16, 17, 64, 65)] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 30, 32, 50, 128, 1000])
def test_division_by_a_product(divisor):
    factor, shift = division(divisor)
    assert factor < 1 << 32
    for n in (0, 1, divisor - 1, divisor, 123456789, 2**31 - 2, 2**31 // divisor * divisor - 1):
        assert (n * factor >> 32 + shift if factor else n) == n // divisor


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300])
@pytest.mark.parametrize("heads", [64, 128])
def test_shapes_of_the_models(num_tokens, heads, device):
    q = torch.randn(num_tokens, heads, 512, device=device).bfloat16()
    parts = (
        make_part("run", "encoded", 512, 128, 128, device, num_tokens),
        make_part("chosen", "encoded", 512, 32, 512, device, num_tokens),
    )
    sink = torch.randn(heads, device=device)
    poison(device)
    cluster = kernel.select_sparse_attention_tiles(num_tokens)
    out = launch(q, parts, sink, cluster)
    check(out[:4], expected(q[:4], parts, sink))
    assert torch.equal(launch(q, parts, sink, cluster), out)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [17, 70])
def test_the_op_takes_it(num_tokens, device, monkeypatch):
    """The general kernel is not needed, and replay gives the same bits."""
    q = torch.randn(num_tokens, 64, 512, device=device).bfloat16()
    parts = (
        make_part("run", "encoded", 512, 128, 128, device, num_tokens),
        make_part("chosen", "encoded", 512, 32, 512, device, num_tokens),
    )
    sink = torch.randn(64, device=device)
    monkeypatch.setattr(general, "launch_sparse_attention", None)
    poison(device)
    out = op.sparse_attention(q, parts, sink, 512**-0.5)
    check(out[:4], expected(q[:4], parts, sink))
    assert torch.equal(captured(lambda: op.sparse_attention(q, parts, sink, 512**-0.5)), out)
