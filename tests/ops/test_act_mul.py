"""The gated activation: kernel and op against the oracle."""

import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels.fused import act_mul as kernel
from tiercel.ops.act_mul import ACTIVATIONS, act_mul
from tiercel.reference import act_mul as oracle

# (rows, inner): on both sides of the kernel's block of 1024, no multiple of it.
SHAPES = [(1, 1), (3, 100), (5, 1023), (2, 1025), (4, 1536), (1, 5000)]
# Triton's interpreter cuts bfloat16 off where a GPU rounds: a whole unit instead of half of one.
KERNEL_BFLOAT16 = 2**-8 if torch.cuda.is_available() else 2**-7
# Relative. The kernel rounds the result once: half a unit in the last place. float32 has the
# exponential's error instead, up to |gate| units, here below 10.
KERNEL = {torch.float32: 2e-6, torch.bfloat16: KERNEL_BFLOAT16 + 1e-5, torch.float16: 2**-11 + 1e-5}
# On a CPU the activation is rounded before the product, and vectorised exp and tanh are coarser.
OP = {torch.float32: 5e-6, torch.bfloat16: 2**-7 + 1e-4, torch.float16: 2**-10 + 1e-4}
# Absolute: 0.5 y (1 + tanh) cancels for y below -3, where 1 + tanh keeps the spacing of 1; float16
# has subnormals 6e-8 apart. Both are times |up|, below 5.
SMALLEST = 1.5e-6


def make_case(rows, inner, dtype, device):
    x = (2 * torch.randn(rows, 2 * inner + 5)).to(dtype).to(device)[:, : 2 * inner]  # strided rows
    x[:, 0] = 9.0  # saturated: the identity
    x[-1, inner - 1] = -9.0  # saturated: zero
    return x


def check(out, x, activation, tolerance):
    expected = oracle.act_mul(x, activation)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance[x.dtype], atol=SMALLEST)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", KERNEL, ids=str)
@pytest.mark.parametrize(("rows", "inner"), SHAPES)
def test_kernel_matches_oracle(rows, inner, dtype, activation, device):
    x = make_case(rows, inner, dtype, device)
    guarded = torch.full((rows + 2, inner), float("nan"), dtype=dtype, device=device)
    kernel.launch_act_mul(*x.chunk(2, dim=1), guarded[1:-1], activation)
    check(guarded[1:-1], x, activation, KERNEL)
    assert guarded[0].isnan().all()  # nothing outside the rows is written
    assert guarded[-1].isnan().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", OP, ids=str)
@pytest.mark.parametrize(("rows", "inner"), SHAPES)
def test_op_matches_oracle(rows, inner, dtype, activation, device):
    x = make_case(rows, inner, dtype, device)
    before = x.clone()
    out = act_mul(x, activation)
    assert out.is_contiguous()
    assert out.dtype == dtype
    check(out, x, activation, OP)
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy, in the interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extremes_stay_finite(activation, device):
    gate = torch.tensor([-3e4, -100.0, -0.0, 0.0, 100.0, 3e4], device=device)
    x = torch.cat((gate, torch.full_like(gate, 0.5))).unsqueeze(0)
    out = torch.full((1, 6), float("nan"), device=device)
    kernel.launch_act_mul(*x.chunk(2, dim=1), out, activation)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 50.0, 1.5e4]])
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(act_mul(x, activation).cpu(), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", KERNEL, ids=str)
def test_a_limit_clamps_both(dtype, device):
    """Gate above alone, up on both sides; NaN stays NaN."""
    x = make_case(4, 1025, dtype, device)
    gate, up = x[:, :1025], x[:, 1025:]
    gate[1, 3] = up[2, 5] = float("nan")
    out = torch.full((4, 1025), float("nan"), dtype=dtype, device=device)
    kernel.launch_act_mul(gate, up, out, "silu", 1.5)
    clamped = torch.cat((gate.clamp(max=1.5), up.clamp(-1.5, 1.5)), dim=1)
    expected = oracle.act_mul(clamped.cpu(), "silu")
    tolerance = {"rtol": KERNEL[dtype], "atol": SMALLEST, "equal_nan": True}
    torch.testing.assert_close(out.double().cpu(), expected, **tolerance)


@pytest.mark.gpu
def test_offsets_pass_32_bits(device):
    stride = 2**30 + 1  # row 2 begins past 2**31 elements
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((3, 64), (stride, 1))
    x.copy_(torch.randn(3, 64))
    check(act_mul(x, "silu"), x, "silu", OP)


def test_no_rows(device):
    x = torch.empty(0, 10, device=device)
    kernel.launch_act_mul(*x.chunk(2, dim=1), torch.empty(0, 5, device=device), "silu")
    assert act_mul(x, "silu").shape == (0, 5)


def test_op_names_the_bad_argument(device):
    x = torch.randn(3, 10, device=device)
    with pytest.raises(ArgumentError, match=r"x is \(3, 9\)"):
        act_mul(x[:, :9], "silu")
    with pytest.raises(ArgumentError, match=r"x is \(10,\)"):
        act_mul(x[0], "silu")
    with pytest.raises(ArgumentError, match="activation 'relu'"):
        act_mul(x, "relu")
    with pytest.raises(ArgumentError, match=r"act_mul: x has inner stride 3"):
        act_mul(torch.randn(10, 3, device=device).t(), "silu")
