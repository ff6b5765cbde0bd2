"""Rotary embedding in place: kernel and op against rotation by complex numbers."""

import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels import rotary as kernel
from tiercel.ops.rotary import rotary_
from tiercel.reference import rotary as oracle

# (tokens, heads, head_dim, half): full and partial rotation, odd counts of everything.
SHAPES = [(1, 1, 2, 1), (5, 3, 64, 32), (7, 12, 64, 24), (3, 5, 256, 128), (4, 1, 100, 13)]
# Triton's interpreter cuts bfloat16 off where a GPU rounds: a whole unit instead of half of one.
KERNEL_BFLOAT16 = 2**-8 if torch.cuda.is_available() else 2**-7
# Relative to the pair's length: half a unit in the last place for the one rounding of the result.
# float32 adds the rounding of two products and of the table's cos and sin.
TOLERANCE = {
    torch.float32: 3e-7,
    torch.bfloat16: KERNEL_BFLOAT16 + 1e-6,
    torch.float16: 2**-11 + 1e-6,
}
POSITIONS = 5000  # angles far beyond one turn


def make_case(tokens, heads, head_dim, half, dtype, device):
    """Heads cut out of a fused row, (tokens, heads, head_dim); positions, table and angles."""
    fused = torch.randn(tokens, heads + 3, head_dim).to(dtype).to(device)
    inverse = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    every = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), inverse)
    table = torch.stack((every.cos(), every.sin()), dim=1).float().to(device)
    positions = torch.randint(0, POSITIONS, (tokens,), dtype=torch.int32)
    positions[0] = POSITIONS - 1
    return fused, positions.to(device), table, every[positions.long()]


def check(out, before, angles):
    """Compare with the oracle; what does not rotate keeps its bits."""
    half = angles.shape[1]
    before, result = before.cpu(), out.cpu()
    expected = oracle.rotary(before, angles)
    assert torch.equal(result[..., 2 * half :], before[..., 2 * half :])
    pairs = before.double()[..., : 2 * half].unflatten(-1, (2, half)).norm(dim=-2).repeat(1, 1, 2)
    error = (result.double() - expected)[..., : 2 * half].abs()
    assert (error <= TOLERANCE[out.dtype] * pairs).all(), (error / pairs).max()


@pytest.mark.parametrize("run", [kernel.launch_rotary, rotary_], ids=["kernel", "op"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "half"), SHAPES)
def test_matches_oracle(tokens, heads, head_dim, half, dtype, run, device):
    case = make_case(tokens, heads, head_dim, half, dtype, device)
    fused, positions, table, angles = case
    before = fused.clone()
    run(fused[:, 1:-2], positions, table)
    check(fused[:, 1:-2], before[:, 1:-2], angles)
    assert torch.equal(
        fused[:, :1], before[:, :1]
    )  # the neighbours in the fused row keep their bits
    assert torch.equal(fused[:, -2:], before[:, -2:])


def test_position_zero_keeps_every_bit(device):
    fused, positions, table, _ = make_case(3, 2, 10, 5, torch.bfloat16, device)
    before = fused.clone()
    kernel.launch_rotary(fused, torch.zeros_like(positions), table)
    rotary_(fused, torch.zeros_like(positions), table)
    assert torch.equal(fused, before)


def test_op_returns_its_argument(device):
    fused, positions, table, _ = make_case(3, 2, 10, 5, torch.float32, device)
    x = fused[:, :4]
    assert rotary_(x, positions, table).data_ptr() == x.data_ptr()


@pytest.mark.gpu
def test_offsets_pass_32_bits(device):
    stride = 2**30 + 1  # token 2 begins past 2**31 elements
    _, positions, table, angles = make_case(3, 2, 16, 8, torch.bfloat16, device)
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((3, 2, 16), (stride, 16, 1))
    x.copy_(torch.randn(3, 2, 16))
    before = x.contiguous()
    check(rotary_(x, positions, table), before, angles)


def test_no_tokens(device):
    _, positions, table, _ = make_case(1, 2, 8, 4, torch.float32, device)
    x = torch.empty(0, 2, 8, device=device)
    kernel.launch_rotary(x, positions[:0], table)
    assert rotary_(x, positions[:0], table).shape == (0, 2, 8)


def test_op_names_the_bad_argument(device):
    fused, positions, table, _ = make_case(3, 2, 8, 4, torch.float32, device)
    with pytest.raises(ArgumentError, match=r"x is \(3, 5, 8\) and positions \(2,\)"):
        rotary_(fused, positions[:2], table)
    with pytest.raises(ArgumentError, match=r"x is \(3, 8\)"):
        rotary_(fused[:, 0], positions, table)
    with pytest.raises(ArgumentError, match=r"table is \(5000, 2, 4\) for heads of 6"):
        rotary_(fused[..., :6], positions, table)
    with pytest.raises(ArgumentError, match=r"table is \(5000, 8\)"):
        rotary_(fused, positions, table.flatten(1))
    with pytest.raises(ArgumentError, match="x has inner stride 5"):
        rotary_(torch.randn(3, 8, 5, device=device).transpose(1, 2), positions, table)
