"""The kernel of sparse attention against the oracle: lists, formats, splits, heads, poison."""

import pytest
import torch

from tests.dsv4_cases import captured, poison, strided
from tiercel.kernels.attention import sparse_attention as kernel
from tiercel.ops import sparse_attention as op
from tiercel.ops.block_quantize import decode_kv_entries, encode_kv_entries
from tiercel.ops.sparse_attention import SlottedKV, kernel_refusal, sparse_attention
from tiercel.ops.sparse_attention_torch import PagedEntries
from tiercel.reference import sparse_attention as oracle

# In the interpreter products are float32, whatever the dtype of q.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TABLES = torch.tensor([[3, 1, 6], [2, 5, 4]])  # block 0 is poison


def launch(q, parts, sink, splits):
    """The kernel by itself, into poisoned memory, on any device."""
    num_tokens, num_heads, d = q.shape
    nan = {"fill_value": float("nan"), "device": q.device}
    out = torch.full((num_tokens + 2, num_heads, d), dtype=q.dtype, **nan)
    partial, stats = None, None
    if splits > 1:
        partial = torch.full((num_tokens, splits, num_heads, d), **nan)
        stats = torch.full((num_tokens, splits, 2, num_heads), **nan)
    keys = [kernel.KeyPart(*op._arguments(part)) for part in parts]
    kernel.launch_sparse_attention(q, keys, sink, d**-0.5, out[1:-1], partial, stats)
    assert out[0].isnan().all()  # nothing outside is written
    assert out[-1].isnan().all()
    return out[1:-1]


def make_cache(form, d, per_block, device):
    """7 blocks as planes of one pool with other bytes between them; block 0 is NaN."""
    vectors = torch.randn(7, per_block, d)
    vectors[0] = float("nan")
    if form != "encoded":
        dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
        pool = torch.full((7, per_block + 1, d), float("nan"), dtype=dtype)
        pool[:, :per_block] = vectors
        return pool.to(device)[:, :per_block], None, 0
    encoded = encode_kv_entries(vectors, 64)
    pool = torch.full((7, per_block + 1, d + 64 + 16), 255, dtype=torch.uint8)
    pool[:, :per_block, : d + 64] = encoded[..., : d + 64]
    return pool.to(device)[:, :per_block, : d + 64], encoded[..., d + 64 :].to(device), 64


def make_part(kind, form, d, per_block, num_keys, device, num_tokens=3):
    cache, scales, rotary = make_cache(form, d, per_block, device)
    seq_ids = torch.tensor([1, 0, 1])[torch.arange(num_tokens) % 3].to(device)
    tables = TABLES.int().to(device)
    if kind == "slots":
        slots = per_block + torch.randint(0, 6 * per_block, (num_tokens, num_keys))
        slots[torch.rand(slots.shape) < 0.3] = -1
        slots[-1] = -1
        return SlottedKV(cache, slots.to(device), scales, rotary)
    if kind == "chosen":
        chosen = torch.randint(-1, 3 * per_block, (num_tokens, num_keys), dtype=torch.int32)
        chosen[-1] = -1
        listed = PagedEntries(tables, seq_ids, num_keys, chosen=chosen.to(device))
    else:
        ends = torch.tensor([3 * per_block, 2, 0])[torch.arange(num_tokens) % 3]
        listed = PagedEntries(tables, seq_ids, num_keys, ends=ends.to(device))
    return SlottedKV(cache, listed, scales, rotary)


def expected(q, parts, sink):
    """The oracle's output, of vectors that are listed without the code under test."""
    rows = []
    for t in range(q.shape[0]):
        vectors = []
        for part in parts:
            cache, listed, per_block = part.cache, part.slots, part.cache.shape[1]
            if part.scales is not None:
                cache = decode_kv_entries(part.cache, 64, part.scales)
            cache = cache.cpu().double()
            if isinstance(listed, PagedEntries):
                table = TABLES[listed.seq_ids[t].item()].tolist()
                if listed.chosen is not None:
                    entries = [e for e in listed.chosen[t].tolist() if e >= 0]
                else:
                    end = listed.ends[t].item()
                    entries = range(max(0, end - listed.num_entries), end)
                places = [(table[e // per_block], e % per_block) for e in entries]
            else:
                places = [divmod(s, per_block) for s in listed[t].tolist() if s >= 0]
            vectors += [cache[place] for place in places]
        rows.append(torch.stack(vectors) if vectors else torch.zeros(0, q.shape[2]).double())
    given = None if sink is None else sink.cpu()
    return oracle.sparse_attention(q.cpu(), rows, given, q.shape[2] ** -0.5)[0]


def check(out, wanted):
    error = (out.double().cpu() - wanted).abs().max() / wanted.abs().max()
    assert error <= TOLERANCE[out.dtype]
    cosine = torch.cosine_similarity(out.double().cpu().flatten(), wanted.flatten(), dim=0)
    assert cosine >= 0.9995


# Heads, d, (kind, form, entries of a block, keys) of each part, splits, dtype on a GPU.
CASES = {
    "csa": (5, 512, [("run", "encoded", 32, 90), ("chosen", "encoded", 32, 70)], 3),
    "hca": (20, 128, [("run", "bfloat16", 30, 80), ("run", "bfloat16", 1, 9)], 1),
    "slots": (70, 64, [("slots", "float32", 7, 5), ("slots", "bfloat16", 12, 66)], 2),
    "window": (3, 32, [("run", "float32", 50, 128)], 1),
    "encoded slots": (16, 128, [("slots", "encoded", 9, 130)], 2),
}


@pytest.mark.parametrize("has_sink", [True, False], ids=["sink", "no sink"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_oracle(name, has_sink, device):
    heads, d, shapes, splits = CASES[name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = strided((2 * torch.randn(3, heads, d)).to(dtype).to(device))
    parts = [make_part(kind, form, d, *sizes, device) for kind, form, *sizes in shapes]
    sink = 2 * torch.randn(heads, device=device) if has_sink else None
    out = launch(q, parts, sink, splits)
    check(out[:-1], expected(q, parts, sink)[:-1])
    assert torch.equal(out[-1], torch.zeros_like(out[-1]))  # a row without keys


def test_the_torch_path_lists_the_same_keys(device):
    parts = (
        make_part("run", "float32", 40, 5, 9, device),
        make_part("chosen", "bfloat16", 40, 4, 6, device),
    )
    q, sink = torch.randn(3, 4, 40, device=device), torch.randn(4, device=device)
    out = sparse_attention(q, parts, sink, 40**-0.5)
    torch.testing.assert_close(out.double().cpu(), expected(q, parts, sink), rtol=0, atol=1e-5)


def test_half_rounds_once(device):
    q = torch.randn(1, 2, 64, device=device).half()
    parts = [make_part("chosen", "bfloat16", 64, 20, 40, device, num_tokens=2)]
    listed = parts[0].slots
    chosen = PagedEntries(listed.block_tables, listed.seq_ids[:1], 40, chosen=listed.chosen[:1])
    parts = [SlottedKV(parts[0].cache, chosen)]
    check(launch(q, parts, None, 1), expected(q, parts, None))


def test_splits_and_other_tokens_change_no_bit(device):
    """The same token alone and among others; two splits as one kernel would sum them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(3, 4, 64, device=device).to(dtype)
    part = make_part("run", "float32", 64, 60, 150, device)
    full = launch(q, [part], None, 2)
    listed = part.slots
    alone = PagedEntries(listed.block_tables, listed.seq_ids[:1], 150, ends=listed.ends[:1])
    out = launch(q[:1], [SlottedKV(part.cache, alone)], None, 2)
    assert torch.equal(full[:1], out)


def test_large_scores_and_sinks_stay_finite(device):
    kv = 100 * torch.randn(1, 9, 64, device=device)
    part = SlottedKV(kv, torch.arange(9, device=device)[None])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = (100 * torch.randn(1, 3, 64, device=device)).to(dtype)
    sink = torch.tensor([-1e5, 0.0, 1e7], device=device)
    for splits in (1, 2):
        out = launch(q, [part], sink, splits).float()
        assert out.isfinite().all()
        assert torch.equal(out[0, 2], torch.zeros(64, device=device))
        best = (q[0].float() @ kv[0].t()).argmax(1)
        torch.testing.assert_close(out[0, :2], kv[0, best[:2]], rtol=1e-2, atol=1e-2)


def test_what_lists_could_hold_changes_no_bit(device):
    """Lists of 70 and of 300 entries at most, of which a token sees 70; so with more splits."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, sink = torch.randn(3, 4, 64, device=device).to(dtype), torch.randn(4, device=device)
    part = make_part("run", "float32", 64, 100, 70, device)
    listed, outs = part.slots, []
    for num_entries, splits in ((70, 2), (300, 5)):
        ends = listed.ends.clamp(max=70)
        wider = PagedEntries(listed.block_tables, listed.seq_ids, num_entries, ends=ends)
        outs.append(launch(q, [SlottedKV(part.cache, wider)], sink, splits))
    assert torch.equal(*outs)


def test_the_op_allocates_for_its_splits(device):
    """The path of a GPU: two parts in 3 splits, and one part of one tile."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(3, 4, 64, device=device).to(dtype)
    parts = (
        make_part("run", "bfloat16", 64, 50, 70, device),
        make_part("chosen", "float32", 64, 8, 20, device),
    )
    sink = torch.randn(4, device=device)
    for given in (parts, parts[1:]):
        out = op._launch(q, given, sink, 64**-0.5)
        assert out.is_contiguous()
        check(out, expected(q, given, sink))
    nothing = torch.full((4,), float("-inf"), device=device)  # a sink of no weight
    out = op._launch(q, parts[1:], nothing, 64**-0.5)
    check(out, expected(q, parts[1:], None))


def test_split_counts():
    assert [kernel.num_splits(n, (128, 512)) for n in (1, 4, 16)] == [10, 10, 10]
    assert [kernel.num_splits(n, (128, 512)) for n in (17, 64)] == [2, 2]
    assert kernel.num_splits(4096, (128, 512)) == 1
    assert kernel.num_splits(1, (128, 8192)) == 32
    assert kernel.num_splits(1, (0,)) == 1


def test_no_tokens(device):
    part = SlottedKV(torch.randn(2, 4, 64, device=device), torch.zeros(0, 5).long().to(device))
    assert launch(torch.empty(0, 2, 64, device=device), [part], None, 1).shape == (0, 2, 64)


def test_refusals_say_why(device):
    part = make_part("slots", "encoded", 128, 4, 5, device)
    q = torch.randn(3, 2, 128, device=device).bfloat16()
    assert kernel_refusal(q, (part, part)) == ""
    assert kernel_refusal(q.float(), (part,)) == "q is torch.float32"
    assert kernel_refusal(q, (part,) * 3) == "3 tokens, 3 parts"
    assert kernel_refusal(q[..., :96], (part,)) == "96 channels"
    other = SlottedKV(part.cache, part.slots, part.scales, rotary_dim=32)
    assert "32 bfloat16" in kernel_refusal(q, (other,))
    turned = SlottedKV(torch.randn(2, 128, 4, device=device).mT, part.slots)
    assert "strides (512, 1, 4)" in kernel_refusal(q, (turned,))
    lists = SlottedKV(part.cache, part.slots.t().contiguous().t(), part.scales, 64)
    assert kernel_refusal(q, (lists,)) == "lists with strides"


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 300])
@pytest.mark.parametrize("heads", [64, 128])
def test_op_matches_oracle(num_tokens, heads, device):
    """The op's own split, at the shapes of the models; replay gives the same bits."""
    q = torch.randn(num_tokens, heads, 512, device=device).bfloat16()
    parts = (
        make_part("run", "encoded", 512, 128, 128, device, num_tokens),
        make_part("chosen", "encoded", 512, 32, 512, device, num_tokens),
    )
    sink = torch.randn(heads, device=device)

    def run():
        return sparse_attention(q, parts, sink, 512**-0.5)

    poison(device)
    out = run()
    check(out[:4], expected(q[:4], parts, sink))
    assert torch.equal(captured(run), out)


@pytest.mark.gpu
def test_a_switch_takes_the_kernel_out(device, monkeypatch):
    q = torch.randn(3, 64, 512, device=device).bfloat16()
    part = make_part("run", "encoded", 512, 128, 128, device)
    out = sparse_attention(q, (part,), None, 512**-0.5)
    monkeypatch.setenv("TIERCEL_SPARSE_ATTENTION_KERNEL", "0")
    monkeypatch.setattr(kernel, "launch_sparse_attention", None)
    check(out[:2], sparse_attention(q, (part,), None, 512**-0.5)[:2].double().cpu())
