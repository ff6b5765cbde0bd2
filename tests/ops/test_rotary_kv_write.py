"""Norm, rotation and cache write of heads: kernel and op against rotation by complex numbers."""

import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels.attention.rotary_kv_write import launch_rotary_kv_write
from tiercel.ops.rotary_kv_write import rotary_kv_write
from tiercel.reference import rotary_kv_write as oracle

# (tokens, num_heads, num_kv_heads, head_dim, half): full and partial rotation, odd counts of
# everything; programs with heads of one kind and of all three.
SHAPES = [
    (1, 1, 1, 2, 1),
    (5, 3, 1, 64, 32),
    (7, 9, 3, 64, 24),
    (3, 5, 5, 256, 128),
    (4, 2, 1, 100, 13),
    (2, 32, 8, 128, 64),
]
# Triton's interpreter cuts bfloat16 off where a GPU rounds: a whole unit instead of half of one.
KERNEL_BFLOAT16 = 2**-8 if torch.cuda.is_available() else 2**-7
# Relative to the pair's length: half a unit in the last place for the one rounding of the result.
# float32 adds the rounding of products, norm and table.
KERNEL = {
    torch.float32: 1e-6,
    torch.bfloat16: KERNEL_BFLOAT16 + 1e-5,
    torch.float16: 2**-11 + 1e-5,
}
# A CPU rounds between norm and rotation too.
OP = {torch.float32: 1e-6, torch.bfloat16: 2**-7 + 1e-5, torch.float16: 2**-10 + 1e-5}
POSITIONS = 5000  # angles far beyond one turn
EPS = 1e-4


class Case:
    """Inputs, poisoned caches of 3 blocks after a guard block, and the result of the oracle."""

    def __init__(self, tokens, num_heads, kv_heads, head_dim, half, dtype, device, *, norms):
        self.heads = torch.randn(tokens, num_heads + 2 * kv_heads, head_dim).to(dtype).to(device)
        self.heads[:, ::3] *= 1e-2  # heads so small that eps decides
        inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        every = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), inverse)
        self.table = torch.stack((every.cos(), every.sin()), dim=1).float().to(device)
        positions = torch.randint(0, POSITIONS, (tokens,), dtype=torch.int32)
        positions[0] = POSITIONS - 1
        self.positions, self.angles = positions.to(device), every[positions.long()]
        shape = (2, 4, 5, kv_heads, head_dim)
        self.guarded = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.caches = tuple(self.guarded[:, 1:])
        self.slots = torch.randperm(15)[:tokens].to(device)
        self.slots[1::3] = -1
        self.weights = tuple(torch.randn(2, head_dim, device=device)) if norms else None
        self.kv_heads, self.half = kv_heads, half

    def run(self, name):
        q_weight, k_weight = self.weights or (None, None)
        first = (self.heads, self.positions, self.table, *self.caches, self.slots)
        if name == "kernel":
            launch_rotary_kv_write(*first, q_weight, k_weight, EPS)
        else:
            rotary_kv_write(*first, q_weight=q_weight, k_weight=k_weight, eps=EPS)

    def check(self, before, tolerance):
        weights = self.weights and tuple(weight.cpu() for weight in self.weights)
        wanted = torch.full(self.caches[0].shape, float("nan"), dtype=torch.float64)
        caches = (wanted, wanted.clone())
        expected = oracle.rotary_kv_write(
            before.cpu(), self.angles, *caches, self.slots.cpu(), weights, EPS
        )
        self._close(self.heads[:, : -self.kv_heads], expected[:, : -self.kv_heads], tolerance)
        assert torch.equal(self.heads[:, -self.kv_heads :], before[:, -self.kv_heads :])
        for actual, cache in zip(self.caches, caches, strict=True):
            written = ~cache.isnan()
            assert torch.equal(~actual.isnan().cpu(), written)
            rows = written.all(dim=(-1, -2))
            self._close(actual.cpu()[rows], cache[rows], tolerance)
        assert self.guarded[:, 0].isnan().all()  # where a slot of -1 would land

    def _close(self, actual, expected, tolerance):
        """Within a share of each pair's length; other dimensions, of their own size."""
        half = self.half
        size = expected.abs()
        pairs = expected[..., : 2 * half].unflatten(-1, (2, half)).norm(dim=-2)
        size[..., : 2 * half] = torch.cat((pairs, pairs), dim=-1)
        error = (actual.double().cpu() - expected).abs()
        assert (error <= tolerance * size + 1e-7).all(), (error / size).max()


# Interpreted, 16 bits of the shape with partial rotation by default.
CASES = [
    pytest.param(
        *(shape, dtype, run),
        marks=[pytest.mark.slow]
        * (run == "kernel" and dtype != torch.float32 and shape != SHAPES[2]),
    )
    for shape in SHAPES
    for dtype in KERNEL
    for run in ("kernel", "op")
]


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(("shape", "dtype", "run"), CASES, ids=str)
def test_matches_oracle(shape, dtype, run, norms, device):
    case = Case(*shape, dtype, device, norms=norms)
    before = case.heads.clone()
    case.run(run)
    case.check(before, (KERNEL if run == "kernel" else OP)[dtype])


@pytest.mark.parametrize("run", ["kernel", "op"])
def test_position_zero_without_norms_keeps_every_bit(run, device):
    case = Case(3, 2, 1, 10, 5, torch.bfloat16, device, norms=False)
    before = case.heads.clone()
    case.positions.zero_()
    case.run(run)
    assert torch.equal(case.heads, before)


@pytest.mark.parametrize("run", ["kernel", "op"])
def test_the_cache_holds_the_bits_of_the_heads(run, device):
    case = Case(6, 4, 2, 32, 16, torch.float16, device, norms=True)
    case.run(run)
    for token, slot in enumerate(case.slots.tolist()):
        if slot >= 0:
            place = slot // 5, slot % 5
            assert torch.equal(case.caches[0][place], case.heads[token, 4:6])
            assert torch.equal(case.caches[1][place], case.heads[token, 6:])


@pytest.mark.parametrize("run", ["kernel", "op"])
def test_slot_0_is_a_slot(run, device):
    """The least slot that is written, beside one that is not."""
    case = Case(3, 4, 2, 8, 4, torch.float32, device, norms=False)
    case.slots = torch.tensor([-1, 0, 14], device=device)
    case.run(run)
    for slot, token in ((0, 1), (14, 2)):
        assert torch.equal(case.caches[0][slot // 5, slot % 5], case.heads[token, 4:6])
        assert torch.equal(case.caches[1][slot // 5, slot % 5], case.heads[token, 6:])
    assert int(case.caches[0].isfinite().sum()) == 2 * 2 * 8


@pytest.mark.parametrize("run", ["kernel", "op"])
def test_a_tokens_bits_are_its_own(run, device):
    case = Case(7, 6, 2, 64, 32, torch.float16, device, norms=True)
    before = case.heads.clone()
    case.run(run)
    whole = case.heads
    for token in range(7):
        case.heads = before[token : token + 1].clone()
        positions, slots = case.positions, case.slots
        case.positions, case.slots = positions[token : token + 1], slots[token : token + 1]
        case.run(run)
        assert torch.equal(case.heads[0], whole[token])
        case.positions, case.slots = positions, slots


@pytest.mark.parametrize("run", ["kernel", "op"])
def test_no_tokens(run, device):
    case = Case(1, 2, 1, 8, 4, torch.float32, device, norms=False)
    case.heads, case.positions, case.slots = case.heads[:0], case.positions[:0], case.slots[:0]
    case.run(run)
    assert case.guarded.isnan().all()


@pytest.mark.gpu
def test_offsets_pass_32_bits(device):
    num_blocks, width = 2**31 // (64 * 256) + 2, 256
    caches = [
        torch.zeros(num_blocks, 64, 1, width, dtype=torch.bfloat16, device=device) for _ in range(2)
    ]
    heads = torch.randn(2, 3, width, device=device).bfloat16()
    table = torch.tensor([1.0, 0.0], device=device).view(1, 2, 1).repeat(1, 1, 128)
    slots = torch.tensor([num_blocks * 64 - 1, 64], device=device)  # the first is past 2**31
    rotary_kv_write(heads, torch.zeros(2, dtype=torch.int32, device=device), table, *caches, slots)
    assert torch.equal(caches[0][-1, -1, 0], heads[0, 1])
    assert torch.equal(caches[1][-1, -1, 0], heads[0, 2])
    assert torch.equal(caches[0][1, 0, 0], heads[1, 1])
    assert int(caches[0].count_nonzero()) == int(heads[:, 1].count_nonzero())


def test_op_names_the_bad_argument(device):
    case = Case(5, 3, 1, 8, 4, torch.float32, device, norms=False)
    heads, positions, table, slots = case.heads, case.positions, case.table, case.slots
    k, v = case.caches
    weight = torch.ones(8, device=device)
    with pytest.raises(ArgumentError, match=r"heads are \(5, 5, 8\) in steps of"):
        rotary_kv_write(heads.transpose(0, 1), positions, table, k, v, slots)
    with pytest.raises(ArgumentError, match=r"positions \(4,\) and slots \(5,\)"):
        rotary_kv_write(heads, positions[:4], table, k, v, slots)
    with pytest.raises(ArgumentError, match=r"slots \(4,\) do not fit"):
        rotary_kv_write(heads, positions, table, k, v, slots[:4])
    with pytest.raises(ArgumentError, match=r"table is \(5000, 8\)"):
        rotary_kv_write(heads, positions, table.flatten(1), k, v, slots)
    with pytest.raises(ArgumentError, match="not equal and contiguous"):
        rotary_kv_write(heads, positions, table, k.transpose(0, 1), v, slots)
    with pytest.raises(ArgumentError, match=r"do not fit a cache of \(3, 5, 1, 7\)"):
        rotary_kv_write(
            heads, positions, table, k[..., :7].contiguous(), v[..., :7].contiguous(), slots
        )
    with pytest.raises(ArgumentError, match=r"heads \(5, 1, 8\) do not fit a cache of"):
        rotary_kv_write(heads[:, :1].contiguous(), positions, table, k, v, slots)
    with pytest.raises(ArgumentError, match=r"table is \(5000, 2, 5\) for heads of 8"):
        rotary_kv_write(heads, positions, torch.cat((table, table[..., :1]), 2), k, v, slots)
    with pytest.raises(ArgumentError, match=r"table is \(5000, 3, 4\)"):
        rotary_kv_write(heads, positions, torch.cat((table, table[:, :1]), 1), k, v, slots)
    with pytest.raises(ArgumentError, match=r"caches torch.float32 and torch.float16"):
        rotary_kv_write(heads, positions, table, k, v.half(), slots)
    with pytest.raises(ArgumentError, match=r"k_weight is torch.float32 \(7,\) for heads of 8"):
        rotary_kv_write(heads, positions, table, k, v, slots, q_weight=weight, k_weight=weight[:7])
    with pytest.raises(ArgumentError, match=r"heads are torch.float16, caches torch.float32"):
        rotary_kv_write(heads.half(), positions, table, k, v, slots)
    with pytest.raises(ArgumentError, match="k_weight is missing"):
        rotary_kv_write(heads, positions, table, k, v, slots, q_weight=weight)
    with pytest.raises(ArgumentError, match=r"q_weight is torch.float16 \(8,\)"):
        rotary_kv_write(
            heads, positions, table, k, v, slots, q_weight=weight.half(), k_weight=weight
        )
