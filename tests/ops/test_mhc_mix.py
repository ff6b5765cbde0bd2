"""The residual streams of DeepSeek-V4: reference, oracle, and properties of the mix."""

import pytest
import torch

from tests.dsv4_cases import captured, case, poison, strided
from tiercel.errors import ArgumentError
from tiercel.kernels.fused import mhc_mix as kernel
from tiercel.ops import mhc_mix as op
from tiercel.ops.mhc_mix import (
    mhc_mix_collapse,
    mhc_mix_post,
    mhc_mix_pre,
    mhc_mix_refusal,
    mhc_mix_step,
    step_refusal,
)
from tiercel.ops.rms_norm import rms_norm
from tiercel.reference import mhc_mix as oracle

OPTIONS = {"rms_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20}
EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
SHAPES = [(1, 4, 24), (5, 4, 96), (3, 2, 33), (7, 3, 160)]  # tokens, streams, hidden
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}


def make_case(num_tokens, n, hidden, dtype, device):
    """Random everywhere: equal streams, a symmetric comb or zero bases would hide faults."""
    rows = n * (2 + n)
    streams = torch.randn(num_tokens, n, hidden, device=device) * torch.arange(1, n + 1.0)[
        :, None
    ].to(device)
    streams[-1] *= 1e-3  # so small that rms_eps decides
    fn = torch.randn(rows, n * hidden, device=device) / (n * hidden) ** 0.5
    scale = torch.tensor([1.3, 0.7, 1.9], device=device)
    base = torch.randn(rows, device=device)
    return strided(streams.to(dtype)), fn, scale, base


def check(out, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


def test_pre_matches_the_reference(device):
    data = case("mhc", device)
    x, post, comb = mhc_mix_pre(data["streams"], data["fn"], data["scale"], data["base"], **OPTIONS)
    for name, out in (("x", x), ("post", post), ("comb", comb)):
        torch.testing.assert_close(out, data[name], rtol=0, atol=1e-5)


def test_post_matches_the_reference(device):
    data = case("mhc", device)
    out = mhc_mix_post(data["streams"], data["y"], data["post"], data["comb"])
    torch.testing.assert_close(out, data["out"], rtol=0, atol=1e-5)


def test_collapse_matches_the_reference(device):
    data = case("mhc", device)
    head = (data["head_fn"], data["head_scale"], data["head_base"])
    out = mhc_mix_collapse(data["streams"], *head, **EPS)
    torch.testing.assert_close(out, data["head_out"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_pre_matches_oracle(shape, dtype, device):
    streams, *weights = make_case(*shape, dtype, device)
    before = streams.clone()
    poison(device)
    x, post, comb = mhc_mix_pre(streams, *weights, **OPTIONS)
    assert torch.equal(streams, before)
    assert x.dtype == dtype
    arguments = [tensor.cpu() for tensor in (streams, *weights)]
    pre, expected_post, expected_comb = oracle.coefficients(*arguments, 1e-6, 1e-6, 20)
    check(x, oracle.pre_sum(arguments[0], pre), dtype)
    check(post, expected_post, torch.float32)
    check(comb, expected_comb, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_post_matches_oracle(shape, dtype, device):
    num_tokens, n, hidden = shape
    streams, *_ = make_case(*shape, dtype, device)
    y = strided(torch.randn(num_tokens, hidden, device=device).to(dtype))
    post = torch.rand(num_tokens, n, device=device)
    comb = torch.rand(num_tokens, n, n, device=device)  # not symmetric
    poison(device)
    out = mhc_mix_post(streams, y, post, comb)
    assert out.is_contiguous()
    assert out.dtype == dtype
    expected = oracle.post_sum(*(tensor.cpu() for tensor in (streams, y, post, comb)))
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_collapse_matches_oracle(shape, dtype, device):
    num_streams = shape[1]
    streams, fn, scale, base = make_case(*shape, dtype, device)
    weights = (fn[:num_streams].contiguous(), scale[:1], base[:num_streams])
    poison(device)
    out = mhc_mix_collapse(streams, *weights, rms_eps=1e-6, hc_eps=1e-2)  # each eps decides
    assert out.dtype == dtype
    expected = oracle.collapse(*(tensor.cpu() for tensor in (streams, *weights)), 1e-6, 1e-2)
    check(out, expected, dtype)


def test_comb_is_doubly_stochastic(device):
    # The same values on each device: how far 20 iterations come depends on them.
    case = make_case(11, 4, 96, torch.float32, torch.device("cpu"))
    streams, *weights = (tensor.to(device) for tensor in case)
    _, _, comb = mhc_mix_pre(streams, *weights, **OPTIONS)
    ones = torch.ones(11, 4, device=device)
    torch.testing.assert_close(comb.sum(1), ones, rtol=0, atol=1e-5)  # the last step
    torch.testing.assert_close(comb.sum(2), ones, rtol=0, atol=1e-2)
    _, _, one = mhc_mix_pre(streams, *weights, **(OPTIONS | {"sinkhorn_iters": 1}))
    assert (one.sum(2) - 1).abs().max() > 0.1  # the iterations matter here


def test_large_coefficients_stay_finite(device):
    streams, fn, scale, base = make_case(3, 4, 24, torch.float32, device)
    for out in mhc_mix_pre(streams, fn, scale * 1e3, base * 1e3, **OPTIONS):
        assert out.isfinite().all()


def test_no_tokens(device):
    streams, *weights = make_case(2, 4, 24, torch.bfloat16, device)
    x, post, comb = mhc_mix_pre(streams[:0], *weights, **OPTIONS)
    assert (x.shape, post.shape, comb.shape) == ((0, 24), (0, 4), (0, 4, 4))
    assert mhc_mix_post(streams[:0], x, post, comb).shape == (0, 4, 24)


def test_op_names_the_bad_argument(device):
    streams, fn, scale, base = make_case(2, 4, 24, torch.float32, device)
    with pytest.raises(ArgumentError, match=r"streams are \(4, 24\)"):
        mhc_mix_pre(streams[0], fn, scale, base, **OPTIONS)
    with pytest.raises(ArgumentError, match=r"fn, scale and base are \(\(24, 95\)") as error:
        mhc_mix_pre(streams, fn[:, :95], scale, base, **OPTIONS)
    assert "((24, 96), (3,), (24,)) in float32" in error.value.hint
    with pytest.raises(ArgumentError, match=r"torch\.bfloat16"):
        mhc_mix_pre(streams, fn.bfloat16(), scale, base, **OPTIONS)
    with pytest.raises(ArgumentError, match="0 iterations"):
        mhc_mix_pre(streams, fn, scale, base, **(OPTIONS | {"sinkhorn_iters": 0}))
    with pytest.raises(ArgumentError, match=r"mhc_mix_collapse: fn, scale and base are"):
        mhc_mix_collapse(streams, fn, scale, base, **EPS)
    x, post, comb = mhc_mix_pre(streams, fn, scale, base, **OPTIONS)
    with pytest.raises(ArgumentError, match=r"y, post and comb are \(\(1, 24\)"):
        mhc_mix_post(streams, x[:1], post, comb)


# The kernels take 2, 4 or 8 streams; hidden sizes on both sides of a piece of 128.
KERNEL_SHAPES = [(1, 4, 24), (3, 2, 129), (6, 4, 300)]
ITERS = 3  # the interpreter takes milliseconds for each
# Triton's interpreter cuts bfloat16 off where a GPU rounds: a whole unit instead of half of one.
UNIT = 2**-8 if torch.cuda.is_available() else 2**-7
KERNEL = {torch.float32: 1e-5, torch.bfloat16: UNIT + 1e-5, torch.float16: 2**-11 + 1e-5}


def run_kernel(streams, weights, norm=None, *, is_collapse=False, out_dtype=None):
    """x, post and comb of the kernels in poisoned memory, with a row of guard."""
    num_tokens, n, hidden = streams.shape
    nan, device = float("nan"), streams.device
    x = torch.full((num_tokens + 1, hidden), nan, dtype=out_dtype or streams.dtype, device=device)
    post = torch.full((num_tokens + 1, n), nan, device=device)
    comb = torch.full((num_tokens + 1, n, n), nan, device=device)
    shape = kernel.parts_shape(num_tokens, n, hidden, weights[0].shape[0])
    parts = torch.full(shape, nan, device=device)
    coefficients = None if is_collapse else (post[:-1], comb[:-1])
    eps = (1e-6, 1e-2 if is_collapse else 1e-6, 1e-3)
    kernel.launch_mhc_mix(streams, weights, parts, x[:-1], coefficients, norm, eps, ITERS)
    assert all(tensor[-1].isnan().all() for tensor in (x, post, comb))
    return x[:-1], post[:-1], comb[:-1]


def check_kernel(out, expected, dtype):
    tolerance = KERNEL[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", KERNEL, ids=str)
@pytest.mark.parametrize("shape", KERNEL_SHAPES)
def test_kernels_match_oracle(shape, dtype, device):
    num_tokens, n, hidden = shape
    streams, *weights = make_case(*shape, dtype, device)
    x, post, comb = run_kernel(streams, weights)
    arguments = [tensor.cpu() for tensor in (streams, *weights)]
    pre, expected_post, expected_comb = oracle.coefficients(*arguments, 1e-6, 1e-6, ITERS)
    expected_x = oracle.pre_sum(arguments[0], pre)
    check_kernel(x, expected_x, dtype)
    check_kernel(post, expected_post, torch.float32)
    check_kernel(comb, expected_comb, torch.float32)
    norm = torch.randn(hidden, device=device)
    normed, *_ = run_kernel(streams, weights, norm, out_dtype=torch.float32)
    mean = expected_x.square().mean(1, keepdim=True)
    check_kernel(normed, expected_x / (mean + 1e-3).sqrt() * norm.double().cpu(), torch.float32)
    head = (weights[0][:n].contiguous(), weights[1][:1], weights[2][:n])
    x, *_ = run_kernel(streams, head, is_collapse=True)
    check_kernel(x, oracle.collapse(arguments[0], *(w.cpu() for w in head), 1e-6, 1e-2), dtype)
    y = strided(torch.randn(num_tokens, hidden, device=device).to(dtype))
    out = torch.full((num_tokens + 1, n, hidden), float("nan"), dtype=dtype, device=device)
    kernel.launch_mhc_mix_post(streams, y, post, comb, out[:-1])
    assert out[-1].isnan().all()
    expected = oracle.post_sum(*(tensor.cpu() for tensor in (streams, y, post, comb)))
    check_kernel(out[:-1], expected, dtype)


def run_step(before, weights, norm, out_dtype):
    """Streams, x, post and comb of a step's kernels in poisoned memory, with a row of guard."""
    streams = before[0]
    num_tokens, n, hidden = streams.shape
    nan, device = float("nan"), streams.device
    out = torch.full((num_tokens + 1, n, hidden), nan, dtype=streams.dtype, device=device)
    x = torch.full((num_tokens + 1, hidden), nan, dtype=out_dtype, device=device)
    post = torch.full((num_tokens + 1, n), nan, device=device)
    comb = torch.full((num_tokens + 1, n, n), nan, device=device)
    parts = torch.full(kernel.step_parts_shape(num_tokens, n, hidden), nan, device=device)
    results = (out, x, post, comb)
    kernel.launch_mhc_mix_step(
        before, weights, parts, out[:-1], x[:-1], (post[:-1], comb[:-1]), norm, (1e-6, 1e-6, 1e-3),
        ITERS,
    )  # fmt: skip
    assert all(tensor[-1].isnan().all() for tensor in results)
    return tuple(tensor[:-1] for tensor in results)


@pytest.mark.parametrize("dtype", KERNEL, ids=str)
@pytest.mark.parametrize("shape", KERNEL_SHAPES)
def test_a_step_matches_oracle(shape, dtype, device):
    """The post of one block and the pre of the next; x is of the streams as they were rounded."""
    num_tokens, n, hidden = shape
    streams, *weights = make_case(*shape, dtype, device)
    y = strided(torch.randn(num_tokens, hidden, device=device))
    before = (
        streams,
        y,
        torch.rand(num_tokens, n, device=device),
        torch.rand(num_tokens, n, n, device=device),
    )
    norm = torch.randn(hidden, device=device)
    out, x, post, comb = run_step(before, weights, norm, torch.float32)
    check_kernel(out, oracle.post_sum(*(tensor.cpu() for tensor in before)), dtype)
    arguments = [tensor.cpu() for tensor in (out, *weights)]
    pre, expected_post, expected_comb = oracle.coefficients(*arguments, 1e-6, 1e-6, ITERS)
    mixed = oracle.pre_sum(arguments[0], pre)
    mean = mixed.square().mean(1, keepdim=True)
    check_kernel(x, mixed / (mean + 1e-3).sqrt() * norm.double().cpu(), torch.float32)
    check_kernel(post, expected_post, torch.float32)
    check_kernel(comb, expected_comb, torch.float32)


@pytest.mark.parametrize(("num_tokens", "hidden"), [(19, 300), (47, 161)])
def test_a_step_of_many_matches_oracle(num_tokens, hidden, device):
    """Tensor cores, several tiles of tokens, pieces with a short one at the end."""
    streams, *weights = make_case(num_tokens, 4, hidden, torch.bfloat16, device)
    y = strided(torch.randn(num_tokens, hidden, device=device))
    post, comb = torch.rand(num_tokens, 4), torch.rand(num_tokens, 4, 4)
    before = (streams, y, post.to(device), comb.to(device))
    norm = torch.randn(hidden, device=device)
    out, x, post, comb = run_step(before, weights, norm, torch.float32)
    check_kernel(out, oracle.post_sum(*(tensor.cpu() for tensor in before)), torch.bfloat16)
    arguments = [tensor.cpu() for tensor in (out, *weights)]
    pre, expected_post, expected_comb = oracle.coefficients(*arguments, 1e-6, 1e-6, ITERS)
    mixed = oracle.pre_sum(arguments[0], pre)
    mean = mixed.square().mean(1, keepdim=True)
    check_kernel(x, mixed / (mean + 1e-3).sqrt() * norm.double().cpu(), torch.float32)
    check_kernel(post, expected_post, torch.float32)
    check_kernel(comb, expected_comb, torch.float32)


def test_a_step_has_the_same_bits_in_any_launch_of_few(device):
    streams, *weights = make_case(9, 4, 160, torch.bfloat16, device)
    norm = torch.randn(160, device=device)
    update = (torch.randn(9, 160), torch.rand(9, 4), torch.rand(9, 4, 4))
    before = (streams, *(tensor.to(device) for tensor in update))
    every = run_step(before, weights, norm, torch.bfloat16)
    for first, last in ((0, 1), (3, 8)):
        part = tuple(tensor[first:last] for tensor in before)
        some = run_step(part, weights, norm, torch.bfloat16)
        for one, all_of_them in zip(some, every, strict=True):
            assert torch.equal(one, all_of_them[first:last])


@pytest.mark.parametrize("is_kernel", [False, True])
def test_a_step_is_a_post_and_a_pre(is_kernel, device, monkeypatch):
    if is_kernel:
        monkeypatch.setattr(op, "mhc_mix_refusal", lambda streams, is_product=False: "")
    streams, *weights = make_case(3, 4, 96, torch.float32, device)
    y = torch.randn(3, 96, device=device)
    _, post, comb = mhc_mix_pre(streams, *weights, **OPTIONS)
    options = {"norm_weight": torch.randn(96, device=device), "norm_eps": 1e-5}
    options |= {"out_dtype": torch.float32, **OPTIONS}
    found = mhc_mix_step(streams, (y, post, comb), *weights, **options)
    between = mhc_mix_post(streams, y, post, comb)
    expected = (between, *mhc_mix_pre(between, *weights, **options))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    with pytest.raises(ArgumentError, match="y, post and comb are"):
        mhc_mix_step(streams, (y[:, :95], post, comb), *weights, **options)


def test_refusals_of_a_step(device):
    streams = torch.randn(17, 4, 96, device=device)
    assert step_refusal(streams[:, :2], streams[:, 0]) == "17 tokens of 2 streams are too many"
    many = torch.randn(65, 4, 96, device=device)
    assert step_refusal(many, many[:, 0]) == "65 tokens of 4 streams are too many"
    y = torch.randn(96, 3, device=device).mT
    assert step_refusal(streams[:3], y) == "the channels of y are not next to each other"
    here = step_refusal(streams[:3], streams[:3, 0])
    assert here == ("" if streams.is_cuda else "the streams are not on a GPU")


def test_many_tokens_match_oracle(device):
    """Tensor cores, two tiles of tokens, pieces of 1,024 channels with a short one at the end."""
    streams, *weights = make_case(70, 2, 1061, torch.bfloat16, device)
    x, post, comb = run_kernel(streams, weights)
    arguments = [tensor.cpu() for tensor in (streams, *weights)]
    pre, expected_post, expected_comb = oracle.coefficients(*arguments, 1e-6, 1e-6, ITERS)
    check_kernel(x, oracle.pre_sum(arguments[0], pre), torch.bfloat16)
    check_kernel(post, expected_post, torch.float32)
    check_kernel(comb, expected_comb, torch.float32)


def test_a_token_has_the_same_bits_in_any_launch_of_few(device):
    streams, *weights = make_case(16, 4, 160, torch.bfloat16, device)
    norm = torch.randn(160, device=device)
    every = run_kernel(streams, weights, norm)
    for first, last in ((0, 1), (9, 10), (3, 8)):
        some = run_kernel(streams[first:last], weights, norm)
        for one, all_of_them in zip(some, every, strict=True):
            assert torch.equal(one, all_of_them[first:last])


def test_kernels_of_no_tokens_do_nothing(device):
    streams, *weights = make_case(2, 4, 24, torch.bfloat16, device)
    assert run_kernel(streams[:0], weights)[0].shape == (0, 24)
    out = torch.empty(0, 4, 24, device=device)
    kernel.launch_mhc_mix_post(streams[:0], out[:, 0], out[:, :, 0], out[:, :, :4], out)


def test_the_norm_follows_the_sum(device):
    streams, *weights = make_case(5, 4, 96, torch.bfloat16, device)
    norm = torch.randn(96, device=device)
    x, post, comb = mhc_mix_pre(streams, *weights, **OPTIONS)
    options = {"norm_weight": norm, "norm_eps": 1e-3, "out_dtype": torch.float32}
    normed, *others = mhc_mix_pre(streams, *weights, **OPTIONS, **options)
    assert normed.dtype == torch.float32
    expected = rms_norm(x, norm, 1e-3, torch.float32)
    torch.testing.assert_close(normed, expected, rtol=0.02, atol=0.02)
    assert torch.equal(others[0], post)
    assert torch.equal(others[1], comb)
    with pytest.raises(ArgumentError, match=r"norm_weight is \(95,\)"):
        mhc_mix_pre(streams, *weights, **OPTIONS, **(options | {"norm_weight": norm[:95]}))


def test_refusals_name_the_reason(monkeypatch):
    streams = torch.empty(20, 4, 96)
    assert mhc_mix_refusal(streams) == "the streams are not on a GPU"

    class OnGpu(torch.Tensor):
        is_cuda = True

    def refusal(tensor, **options):
        return mhc_mix_refusal(tensor.as_subclass(OnGpu), **options)

    assert refusal(streams) == ""
    assert refusal(streams.bfloat16(), is_product=True) == ""
    assert refusal(streams, is_product=True) == "more than 16 tokens are not bfloat16"
    assert refusal(streams[:16], is_product=True) == ""
    assert refusal(streams[:, :3]) == "the streams are not 2, 4 or 8"
    assert "next to each other" in refusal(streams.transpose(1, 2)[:, :4])
    assert "registers" in refusal(torch.empty(1, 4, 8200))
    monkeypatch.setenv("TIERCEL_MHC_KERNEL", "0")
    assert refusal(streams) == "TIERCEL_MHC_KERNEL=0"


@pytest.mark.gpu
def test_replay_equals_eager(device):
    streams, *weights = make_case(5, 4, 96, torch.bfloat16, device)

    def run():
        x, post, comb = mhc_mix_pre(streams, *weights, **OPTIONS)
        return mhc_mix_post(streams, x, post, comb)

    assert torch.equal(captured(run), run())


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 7168])
def test_true_shapes_match_pytorch_and_bits_stay(hidden, device, monkeypatch):
    streams, *weights = make_case(300, 4, hidden, torch.bfloat16, device)
    y = torch.randn(300, hidden, device=device).bfloat16()

    def run(count):
        x, post, comb = mhc_mix_pre(streams[:count], *weights, **OPTIONS)
        return x, post, comb, mhc_mix_post(streams[:count], y[:count], post, comb)

    many, few = run(300), run(16)
    for count in (1, 2, 5):
        for some, all_of_them in zip(run(count), few, strict=True):
            assert torch.equal(some, all_of_them[:count])
    monkeypatch.setenv("TIERCEL_MHC_KERNEL", "0")
    for out, expected in ((many, run(300)), (few, run(16))):
        for one, other in zip(out, expected, strict=True):
            tolerance = 2e-2 if one.dtype == torch.bfloat16 else 2e-5
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
