"""RMSNorm, and the sum before it: kernel and op against the oracle."""

import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.kernels.fused import rms_norm as kernel
from tiercel.ops.rms_norm import rms_norm
from tiercel.reference import rms_norm as oracle

# (rows, hidden). Square sizes and powers of two hide stride and mask faults: most are neither.
SHAPES = [(1, 1), (3, 100), (5, 64), (2, 576), (7, 257), (1, 5120), (1, 16384)]
# Triton's interpreter cuts bfloat16 off where a GPU rounds: a whole unit instead of half of one.
KERNEL_BFLOAT16 = 2**-8 if torch.cuda.is_available() else 2**-7
# Relative: half a unit in the last place, for the one rounding of the result, and the float32 sum.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: KERNEL_BFLOAT16 + 1e-5,
    torch.float16: 2**-11 + 1e-5,
}
SMALLEST = 1e-7  # absolute: results among float16's subnormals, which are 6e-8 apart
EPS = 1e-5


def make_case(rows, hidden, dtype, device):
    """Rows cut out of wider ones."""
    x = torch.randn(rows, hidden + 3).to(dtype).to(device)[:, 1 : hidden + 1]
    x[1::2] *= 1e-3  # rows so small that eps decides
    return x, torch.randn(hidden, device=device)


def check(out, x, weight, eps=EPS):
    expected = oracle.rms_norm(x, weight, eps)
    rtol = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected.view(out.shape), rtol=rtol, atol=SMALLEST)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_kernel_matches_oracle(rows, hidden, dtype, device):
    x, weight = make_case(rows, hidden, dtype, device)
    guarded = torch.full((rows + 2, hidden), float("nan"), dtype=dtype, device=device)
    kernel.launch_rms_norm(x, weight, guarded[1:-1], EPS)
    check(guarded[1:-1], x, weight)
    assert guarded[0].isnan().all()  # nothing outside the rows is written
    assert guarded[-1].isnan().all()


@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
def test_kernel_rounds_to_the_dtype_of_out(out_dtype, device):
    x, weight = make_case(4, 72, torch.bfloat16, device)
    out = torch.full((4, 72), float("nan"), dtype=out_dtype, device=device)
    kernel.launch_rms_norm(x, weight, out, EPS)
    check(out, x, weight)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_op_matches_oracle(rows, hidden, dtype, device):
    x, weight = make_case(rows, hidden, dtype, device)
    out = rms_norm(x, weight, EPS)
    assert out.is_contiguous()
    assert out.dtype == dtype
    check(out, x, weight)


@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
def test_op_gives_the_dtype_asked_for(out_dtype, device):
    x, weight = make_case(4, 72, torch.bfloat16, device)
    out = rms_norm(x, weight, EPS, out_dtype)
    assert out.dtype == out_dtype
    check(out, x, weight)


def test_eps_keeps_a_row_of_zeros_finite(device):
    weight = torch.randn(65, device=device)
    assert torch.equal(
        rms_norm(torch.zeros(2, 65, device=device), weight, EPS).cpu(), torch.zeros(2, 65)
    )


def test_squares_of_large_float16_do_not_overflow(device):
    x, weight = make_case(2, 130, torch.float16, device)
    x = x * 0 + 6e4
    out = torch.full((2, 130), float("nan"), dtype=torch.float16, device=device)
    kernel.launch_rms_norm(x, weight, out, EPS)
    check(out, x, weight)
    check(rms_norm(x, weight, EPS), x, weight)


@pytest.mark.gpu
def test_offsets_pass_32_bits(device):
    stride = 2**30 + 1  # row 2 begins past 2**31 elements
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((3, 48), (stride, 1))
    x.copy_(torch.randn(3, 48))
    weight = torch.randn(48, device=device)
    check(rms_norm(x, weight, EPS), x, weight)


@pytest.mark.parametrize("run", ["kernel", "op"])
@pytest.mark.parametrize("has_weight", [False, True], ids=["plain", "sandwich"])
@pytest.mark.parametrize("update_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_an_update_is_added_first(rows, hidden, update_dtype, has_weight, run, device):
    x, weight = make_case(rows, hidden, torch.float32, device)
    before, stored = x.clone(), x._base.clone()
    update = (3 * torch.randn(rows, hidden)).to(update_dtype).to(device)
    update_weight = torch.randn(hidden, device=device) if has_weight else None
    if run == "kernel":
        out = torch.full((rows, hidden), float("nan"), device=device)
        kernel.launch_rms_norm(x, weight, out, EPS, update, update_weight)
    else:
        out = rms_norm(x, weight, EPS, update=update, update_weight=update_weight)
    added = update.double()
    if update_weight is not None:
        added = oracle.rms_norm(update, update_weight, EPS)
    expected = before.double() + added
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=5e-6)
    check(out, x, weight)
    x.copy_(before)
    assert torch.equal(x._base, stored)  # nothing beside the rows was written


def test_a_column_of_its_own_may_have_any_stride(device):
    x, weight = torch.randn(1, 5, device=device).t(), torch.randn(1, device=device)
    assert x.stride(1) != 1
    check(rms_norm(x, weight, EPS), x, weight)


def test_no_rows(device):
    x, weight = torch.empty(0, 8, device=device), torch.randn(8, device=device)
    assert rms_norm(x, weight, EPS, update=x.half()).shape == (0, 8)
    kernel.launch_rms_norm(x, weight, torch.empty_like(x), EPS)


def test_launch_parameters_cover_the_row():
    last = 0
    for hidden in range(1, kernel.MAX_HIDDEN + 1, 7):
        block, num_warps = kernel.select_rms_norm(hidden)
        assert hidden <= block < 2 * hidden or hidden == block == 1
        assert block & (block - 1) == 0
        assert num_warps in (4, 8, 16)
        assert last <= num_warps  # longer rows never get fewer warps
        last = num_warps
    assert kernel.select_rms_norm(kernel.MAX_HIDDEN)[0] == kernel.MAX_HIDDEN


def test_a_row_that_does_not_fit_a_block_is_refused_before_the_launch(device, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    hidden = kernel.MAX_HIDDEN + 1
    x, weight = torch.randn(1, hidden, device=device), torch.randn(hidden, device=device)
    with pytest.raises(ArgumentError, match="a row of 16385 does not fit"):
        rms_norm(x, weight, EPS)


def test_op_names_the_bad_argument(device):
    x, weight = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    with pytest.raises(ArgumentError, match=r"weight is torch.float32 \(5,\) but x has 6 columns"):
        rms_norm(x, weight[:5], EPS)
    with pytest.raises(ArgumentError, match=r"weight is torch.bfloat16 \(6,\)"):
        rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(ArgumentError, match="x has 1 dimensions"):
        rms_norm(x[0], weight, EPS)
    with pytest.raises(ArgumentError, match="x has inner stride 4"):
        rms_norm(torch.randn(6, 4, device=device).t(), weight, EPS)
    with pytest.raises(ArgumentError, match=r"the update is \(3, 6\) but x is \(4, 6\)"):
        rms_norm(x, weight, EPS, update=x[:3])
    with pytest.raises(ArgumentError, match=r"the update is \(4, 6\)"):
        rms_norm(x, weight, EPS, update=torch.randn(6, 4, device=device).t())
    with pytest.raises(ArgumentError, match=r"update_weight is torch.float32 \(5,\)"):
        rms_norm(x, weight, EPS, update=x.clone(), update_weight=weight[:5])
