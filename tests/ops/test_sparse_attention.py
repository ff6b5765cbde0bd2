"""Attention of DeepSeek-V4: reference, oracle, merges, masked rows, encoded entries, poison."""

import pytest
import torch

from tests.dsv4_cases import captured, case, poison, strided
from tiercel.errors import ArgumentError
from tiercel.ops import sparse_attention_torch as torch_ops
from tiercel.ops.block_quantize import decode_kv_entries, encode_kv_entries
from tiercel.ops.sparse_attention import (
    SlottedKV,
    merge_attention,
    sparse_attention,
    sparse_attention_partial,
)
from tiercel.reference import sparse_attention as oracle

# Tokens, heads, d, keys of each of two parts.
SHAPES = [(1, 4, 96, (12, 7)), (7, 6, 40, (5, 33)), (3, 64, 512, (8, 3)), (9, 3, 24, (1, 1))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}


def from_mask(kv, mask):
    """One block that holds all vectors, and each token's slots, those of others -1."""
    slots = torch.arange(kv.shape[0], device=kv.device).expand(mask.shape)
    return SlottedKV(kv.unsqueeze(0), torch.where(mask, slots, -1))


def make_part(num_tokens, num_keys, d, dtype, device):
    """A pool whose block 0 is NaN, and slots in any order with about a third missing."""
    pool = torch.randn(6, 5, d + 3, device=device).to(dtype)
    pool[0] = float("nan")
    slots = torch.stack([5 + torch.randperm(25).repeat(2)[:num_keys] for _ in range(num_tokens)])
    slots[torch.rand(slots.shape) < 0.3] = -1
    return SlottedKV(pool[..., :d], slots.to(device))


def keys_of(parts):
    """For each token its vectors, for the oracle."""
    rows = []
    for t in range(parts[0].slots.shape[0]):
        vectors = [p.cache.cpu().flatten(0, 1)[p.slots[t][p.slots[t] >= 0].cpu()] for p in parts]
        rows.append(torch.cat(vectors))
    return rows


def test_joint_attention_matches_the_reference(device):
    data = case("sink", device)
    part = from_mask(data["kv"], data["mask"])
    out = sparse_attention(strided(data["q"]), (part,), data["sink"], 40**-0.5)
    torch.testing.assert_close(out, data["out"], rtol=0, atol=1e-5)
    assert torch.equal(out[1], torch.zeros(6, 40, device=device))


def test_partial_attention_matches_the_reference(device):
    data = case("sink", device)
    outs, lses = [], []
    for name, keys in (("a", slice(0, 12)), ("b", slice(12, 33))):
        part = from_mask(data["kv"][keys], data["mask"][:, keys])
        out, lse = sparse_attention_partial(data["q"], (part,), 40**-0.5)
        torch.testing.assert_close(out, data[f"part_{name}.out"], rtol=0, atol=1e-5)
        torch.testing.assert_close(lse, data[f"part_{name}.lse"], rtol=0, atol=1e-5)
        outs.append(data[f"part_{name}.out"])
        lses.append(data[f"part_{name}.lse"])
    merged = merge_attention(tuple(outs), tuple(lses), data["sink"], torch.float32)
    torch.testing.assert_close(merged, data["out"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_heads", "d", "counts"), SHAPES)
def test_matches_oracle(num_tokens, num_heads, d, counts, dtype, monkeypatch, device):
    q = strided((3 * torch.randn(num_tokens, num_heads, d, device=device)).to(dtype))
    parts = tuple(make_part(num_tokens, count, d, dtype, device) for count in counts)
    for part in parts:
        part.slots[-1] = -1  # a row without keys
    sink = torch.randn(num_heads, device=device) * 2
    tolerance = TOLERANCE[dtype]
    for budget in (1, 1 << 28):  # a token at a time, and all
        monkeypatch.setattr(torch_ops, "WORKSPACE_BYTES", budget)
        for given in (sink, None):
            poison(device)
            out = sparse_attention(q, parts, given, d**-0.5)
            assert out.dtype == dtype
            cpu_sink = None if given is None else given.cpu()
            expected, _ = oracle.sparse_attention(q.cpu(), keys_of(parts), cpu_sink, d**-0.5)
            torch.testing.assert_close(
                out.double().cpu(), expected, rtol=tolerance, atol=4 * tolerance
            )
            assert torch.equal(out[-1], torch.zeros_like(out[-1]))


@pytest.mark.parametrize(("num_tokens", "num_heads", "d", "counts"), SHAPES)
def test_merged_parts_are_the_joint_result(num_tokens, num_heads, d, counts, device):
    q = torch.randn(num_tokens, num_heads, d, device=device)
    parts = tuple(make_part(num_tokens, count, d, torch.float32, device) for count in counts)
    parts[0].slots[0] = -1  # one branch is empty
    parts[1].slots[-1] = -1
    sink = torch.randn(num_heads, device=device)
    outs, lses = zip(*(sparse_attention_partial(q, (p,), d**-0.5) for p in parts), strict=True)
    for part, lse in zip(parts, lses, strict=True):
        _, expected = oracle.sparse_attention(q.cpu(), keys_of((part,)), None, d**-0.5)
        torch.testing.assert_close(lse.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    outs[0][0] = float("nan")  # the output of an empty part is ignored
    for given in (sink, None):
        merged = merge_attention(outs, lses, given, torch.float32)
        joint = sparse_attention(q, parts, given, d**-0.5)
        torch.testing.assert_close(merged, joint, rtol=1e-5, atol=1e-5)


def test_encoded_entries_are_their_decoded_values(device):
    entries = encode_kv_entries(torch.randn(6, 5, 512, device=device), 64)
    slots = torch.randint(-1, 30, (4, 9), dtype=torch.int32, device=device)
    q, sink = torch.randn(4, 3, 512, device=device), torch.randn(3, device=device)
    packed = SlottedKV(entries[..., :576], slots, entries[..., 576:], rotary_dim=64)
    plain = SlottedKV(decode_kv_entries(entries, 64), slots)
    results = [sparse_attention(q, (part,), sink, 512**-0.5) for part in (packed, plain)]
    assert torch.equal(*results)
    assert results[0].abs().max() > 0.1


def test_large_scores_and_sinks_stay_finite(device):
    kv = 100 * torch.randn(1, 9, 40, device=device)
    part = SlottedKV(kv, torch.arange(9, device=device)[None])
    q = 100 * torch.randn(1, 3, 40, device=device)
    sink = torch.tensor([-1e5, 0.0, 1e7], device=device)
    out = sparse_attention(q, (part,), sink, 1.0)
    best = (q[0] @ kv[0].t()).argmax(1)
    expected = torch.stack((kv[0, best[0]], kv[0, best[1]], torch.zeros(40, device=device)))
    torch.testing.assert_close(out[0], expected)


def test_a_listed_nan_stays_in_its_row(device):
    pool = torch.randn(2, 4, 40, device=device)
    pool[1, 1] = float("nan")
    part = SlottedKV(pool, torch.tensor([[0, 5], [0, 4]], device=device))
    out = sparse_attention(torch.randn(2, 3, 40, device=device), (part,), None, 1.0)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_no_tokens_and_no_keys(device):
    pool = torch.randn(2, 4, 40, device=device)
    none = SlottedKV(pool, torch.zeros(3, 0, dtype=torch.int64, device=device))
    q, sink = torch.randn(3, 2, 40, device=device), torch.randn(2, device=device)
    for given in (sink, None):
        out = sparse_attention(q, (none,), given, 1.0)
        assert torch.equal(out, torch.zeros_like(q))
    assert sparse_attention_partial(q, (none,), 1.0)[1].eq(-torch.inf).all()
    some = SlottedKV(pool, torch.zeros(0, 5, dtype=torch.int64, device=device))
    assert sparse_attention(q[:0], (some,), sink, 1.0).shape == (0, 2, 40)


def test_op_names_the_bad_argument(device):
    q, sink = torch.randn(2, 3, 40, device=device), torch.randn(3, device=device)
    pool, slots = torch.randn(2, 4, 40, device=device), torch.zeros(2, 5, dtype=torch.int64)
    slots = slots.to(device)
    part = SlottedKV(pool, slots)
    with pytest.raises(ArgumentError, match=r"q is \(3, 40\), 1 parts"):
        sparse_attention(q[0], (part,), sink, 1.0)
    with pytest.raises(ArgumentError, match=r"0 parts"):
        sparse_attention(q, (), sink, 1.0)
    with pytest.raises(ArgumentError, match=r"the sink is \(2,\)"):
        sparse_attention(q, (part,), sink[:2], 1.0)
    with pytest.raises(ArgumentError, match=r"a cache is \(2, 4, 39\)"):
        sparse_attention(q, (SlottedKV(pool[..., :39], slots),), sink, 1.0)
    with pytest.raises(ArgumentError, match=r"a cache is torch\.uint8 without scales"):
        sparse_attention(q, (SlottedKV(pool.byte(), slots),), sink, 1.0)
    with pytest.raises(ArgumentError, match=r"slots are \(1, 5\)"):
        sparse_attention(q, (SlottedKV(pool, slots[:1]),), sink, 1.0)
    with pytest.raises(ArgumentError, match=r"torch\.float32 for 2 tokens"):
        sparse_attention(q, (SlottedKV(pool, slots.float()),), sink, 1.0)
    lse = torch.zeros(2, 3, device=device)
    with pytest.raises(ArgumentError, match="2 outputs"):
        merge_attention((q, q), (lse,), sink, torch.float32)
    with pytest.raises(ArgumentError, match=r"log-sum-exps are \[\(2, 2\)\]") as error:
        merge_attention((q,), (lse[:, :2],), sink, torch.float32)
    assert error.value.hint == "Pass (2, 3)."


@pytest.mark.gpu
def test_replay_equals_eager(device):
    q, sink = torch.randn(5, 4, 512, device=device).bfloat16(), torch.randn(4, device=device)
    entries = encode_kv_entries(torch.randn(6, 5, 512, device=device), 64)
    slots = torch.randint(-1, 30, (5, 9), device=device)
    part = SlottedKV(entries[..., :576], slots, entries[..., 576:], rotary_dim=64)

    def run():
        return sparse_attention(q, (part, part), sink, 512**-0.5)

    assert torch.equal(captured(run), run())
