"""Writing into the paged cache: bit by bit, and nothing else changes."""

import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels import kv_write as kernel
from tiercel.ops.kv_write import kv_write
from tiercel.reference import kv_write as oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each is: tokens, heads, head_dim, num_blocks, block_size.
SHAPES = [
    (1, 1, 1, 3, 2),
    (5, 3, 64, 4, 4),
    (17, 1, 256, 3, 64),
    (33, 2, 96, 20, 3),
    (7, 5, 33, 6, 7),
]


def make_case(tokens, heads, head_dim, num_blocks, block_size, dtype, device):
    """Keys and values cut out of a fused row; poisoned caches; slots outside the null block."""
    fused = torch.randn(tokens, 2 + 2 * heads, head_dim).to(dtype).to(device)
    k, v = fused[:, 2 : 2 + heads], fused[:, 2 + heads :]
    # A guard block lies before each cache, where a slot of -1 would land.
    shape = (2, 1 + num_blocks, block_size, heads, head_dim)
    caches = list(torch.full(shape, float("nan"), dtype=dtype, device=device)[:, 1:])
    places = torch.randperm((num_blocks - 1) * block_size)
    return k, v, caches, (block_size + places[:tokens]).to(device)


def guard_of(cache):
    """The block before a cache."""
    return cache.as_strided(
        cache[0].shape, cache[0].stride(), cache.storage_offset() - cache[0].numel()
    )


def same_bits(a, b):
    kind = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.cpu().view(kind), b.cpu().view(kind))  # NaN poison compares as bits


@pytest.mark.parametrize("run", [kernel.launch_kv_write, kv_write], ids=["kernel", "op"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "num_blocks", "block_size"), SHAPES)
def test_matches_oracle(tokens, heads, head_dim, num_blocks, block_size, dtype, run, device):
    k, v, caches, slots = make_case(tokens, heads, head_dim, num_blocks, block_size, dtype, device)
    slots[1::3] = -1
    expected = [cache.clone() for cache in caches]
    oracle.kv_write(k, v, *expected, slots)
    run(k, v, *caches, slots)
    assert same_bits(caches[0], expected[0])
    assert same_bits(caches[1], expected[1])
    assert caches[0][0].isnan().all()  # the null block
    assert caches[1][0].isnan().all()
    assert guard_of(caches[0]).isnan().all()
    assert guard_of(caches[1]).isnan().all()


@pytest.mark.parametrize("run", [kernel.launch_kv_write, kv_write], ids=["kernel", "op"])
def test_slot_minus_one_writes_nothing(run, device):
    k, v, caches, slots = make_case(5, 2, 8, 3, 4, torch.bfloat16, device)
    run(k, v, *caches, torch.full_like(slots, -1))
    assert guard_of(caches[0]).isnan().all()
    assert guard_of(caches[1]).isnan().all()
    assert caches[0].isnan().all()
    assert caches[1].isnan().all()


@pytest.mark.parametrize("run", [kernel.launch_kv_write, kv_write], ids=["kernel", "op"])
def test_every_bit_pattern_passes(run, device):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(256, 2, 128)
    k = bits.view(torch.bfloat16).to(device)  # NaN payloads, infinities, subnormals
    caches = [torch.zeros(5, 64, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
    run(k, k.flip(0), *caches, torch.arange(256, device=device))  # slot 0 is one too
    assert torch.equal(caches[0][:4].flatten(0, 1).cpu().view(torch.int16), bits)
    assert torch.equal(caches[1][:4].flatten(0, 1).cpu().view(torch.int16), bits.flip(0))


@pytest.mark.gpu
def test_offsets_pass_32_bits(device):
    num_blocks, width = 2**31 // (64 * 256) + 2, 256
    caches = [
        torch.zeros(num_blocks, 64, 1, width, dtype=torch.bfloat16, device=device) for _ in range(2)
    ]
    k = torch.randn(2, 1, width, device=device).bfloat16()
    slots = torch.tensor([num_blocks * 64 - 1, 64], device=device)  # the first lies past 2**31
    kv_write(k, -k, *caches, slots)
    assert torch.equal(caches[0][-1, -1], k[0])
    assert torch.equal(caches[1][-1, -1], -k[0])
    assert torch.equal(caches[0][1, 0], k[1])
    assert int(caches[0].count_nonzero()) == int(k.count_nonzero())


@pytest.mark.parametrize("run", [kernel.launch_kv_write, kv_write], ids=["kernel", "op"])
def test_no_tokens(run, device):
    k, v, caches, slots = make_case(1, 2, 8, 3, 4, torch.float32, device)
    run(k[:0], v[:0], *caches, slots[:0])
    assert caches[0].isnan().all()


def test_op_names_the_bad_argument(device):
    k, v, caches, slots = make_case(5, 2, 8, 3, 4, torch.float32, device)
    with pytest.raises(ArgumentError, match=r"k \(5, 2, 8\), v \(5, 1, 8\)"):
        kv_write(k, v[:, :1], *caches, slots)
    with pytest.raises(ArgumentError, match=r"slots \(4,\) do not fit"):
        kv_write(k, v, *caches, slots[:4])
    with pytest.raises(ArgumentError, match=r"cache \(3, 4, 2, 7\)"):
        kv_write(k, v, caches[0][..., :7], caches[1], slots)
    with pytest.raises(
        ArgumentError, match=r"k is torch.bfloat16, v torch.bfloat16, caches torch.float32"
    ):
        kv_write(k.bfloat16(), v.bfloat16(), *caches, slots)
    with pytest.raises(ArgumentError, match="not equal and contiguous"):
        kv_write(k, v, caches[0].transpose(0, 1), caches[1], slots)
    with pytest.raises(ArgumentError, match="heads are not adjacent"):
        kv_write(
            k[:, :, ::2], v[:, :, ::2], *[cache[..., :4].contiguous() for cache in caches], slots
        )
    with pytest.raises(ArgumentError, match=r"k is torch.float32, v torch.bfloat16"):
        kv_write(k, v.bfloat16(), *caches, slots)
