"""The mix of a step in one launch: its CUDA source on a processor, and the choice of kernel.

On a machine with a GPU the op's tests run the kernel there.
"""

import pytest
import torch

from tests.dsv4_cases import strided
from tiercel.kernels.fused import mhc_mix_step as kernel
from tiercel.reference import mhc_mix as oracle

EPS = (1e-6, 1e-6, 1e-3)
ITERS = 20
N = 4


def make_case(num_tokens, hidden, y_dtype, device="cpu"):
    """What a step takes: no value equals another's, and rows have gaps."""
    rows = N * (2 + N)
    scales = torch.arange(1, N + 1.0, device=device)[:, None]
    streams = torch.randn(num_tokens, N, hidden, device=device) * scales
    streams[-1] *= 1e-3  # so small that rms_eps decides
    wide = torch.full((num_tokens, N, hidden + 8), float("nan"), device=device).bfloat16()
    wide[..., :hidden] = streams
    y = torch.full((num_tokens, hidden + 4), float("nan"), device=device).to(y_dtype)
    y[:, :hidden] = torch.randn(num_tokens, hidden, device=device)
    post = torch.rand(num_tokens, N, device=device)
    comb = torch.rand(num_tokens, N, N, device=device)  # not symmetric
    fn = torch.randn(rows, N * hidden, device=device) / (N * hidden) ** 0.5
    scale = torch.tensor([1.3, 0.7, 1.9], device=device)
    weights = (fn, scale, torch.randn(rows, device=device))
    before = (wide[..., :hidden], y[:, :hidden], post, comb)
    return before, weights, torch.randn(hidden, device=device)


def run(before, weights, norm):
    """Streams, x, post and comb in poisoned memory, with a row of guard."""
    num_tokens, _, hidden = before[0].shape
    device, nan = before[0].device, float("nan")
    out = torch.full((num_tokens + 1, N, hidden), nan, device=device).bfloat16()
    x = torch.full((num_tokens + 1, hidden), nan, device=device).bfloat16()
    post = torch.full((num_tokens + 1, N), nan, device=device)
    comb = torch.full((num_tokens + 1, N, N), nan, device=device)
    results = (out, x, post, comb)
    kernel.launch_mhc_mix_step(
        before, weights, out[:-1], x[:-1], (post[:-1], comb[:-1]), norm, EPS, ITERS
    )
    assert all(tensor[-1].isnan().all() for tensor in results)
    return tuple(tensor[:-1] for tensor in results)


def check(found, before, weights, norm):
    """The post, and the pre of the streams as they were rounded."""
    out, x, post, comb = found
    expected = oracle.post_sum(*(tensor.cpu() for tensor in before))
    unit = 2**-8 + 1e-5
    torch.testing.assert_close(out.double().cpu(), expected, rtol=unit, atol=unit)
    arguments = [tensor.cpu() for tensor in (out, *weights)]
    pre, expected_post, expected_comb = oracle.coefficients(*arguments, *EPS[:2], ITERS)
    mixed = oracle.pre_sum(arguments[0], pre)
    mean = mixed.square().mean(1, keepdim=True)
    expected_x = mixed / (mean + EPS[2]).sqrt() * norm.double().cpu()
    torch.testing.assert_close(x.double().cpu(), expected_x, rtol=unit, atol=unit)
    for one, other in ((post, expected_post), (comb, expected_comb)):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("y_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(3, 512), (1, 1536)])
@pytest.mark.usefixtures("on_processor")
def test_the_source_matches_oracle(num_tokens, hidden, y_dtype):
    case = make_case(num_tokens, hidden, y_dtype)
    check(run(*case), *case)


def test_inputs_are_read_after_the_wait(on_processor):
    before, weights, norm = make_case(2, 512, torch.float32)
    before = tuple(tensor.contiguous() for tensor in before)
    in_time = run(before, weights, norm)
    kept = [tensor.clone() for tensor in before]
    for tensor in before:
        tensor.fill_(float("nan"))
    on_processor.late = [tensor.copy_(old) for tensor, old in zip(before, kept, strict=True)]
    late = run(before, weights, norm)
    assert all(torch.equal(one, other) for one, other in zip(late, in_time, strict=True))


@pytest.mark.usefixtures("on_processor")
def test_a_token_has_the_same_bits_in_any_launch():
    before, weights, norm = make_case(3, 512, torch.bfloat16)
    every = run(before, weights, norm)
    some = run(tuple(tensor[1:2] for tensor in before), weights, norm)
    assert all(torch.equal(one, all_[1:2]) for one, all_ in zip(some, every, strict=True))


def test_refusals():
    (streams, y, *_), _, _ = make_case(2, 512, torch.float32)

    def refusal(streams=streams, y=y, out_dtype=torch.bfloat16):
        return kernel.mhc_mix_step_refusal(streams, y, out_dtype)

    assert refusal() == ""
    assert refusal(streams[:, :2]) == "there are 2 streams"
    assert "480 channels" in refusal(streams[..., :480], y[:, :480])
    assert "not bfloat16" in refusal(streams.float())
    assert "not bfloat16" in refusal(out_dtype=torch.float32)
    assert refusal(y=y.half()) == "y is torch.float16"
    assert refusal(y=strided(y.contiguous())) == "rows are not aligned"


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 7168])
@pytest.mark.parametrize("num_tokens", [1, 8, 16])
def test_shapes_of_deepseek_v4(num_tokens, hidden, device):
    for y_dtype in (torch.bfloat16, torch.float32):
        case = make_case(num_tokens, hidden, y_dtype, device)
        found = run(*case)
        check(found, *case)
        before, *rest = case
        alone = run(tuple(tensor[-1:] for tensor in before), *rest)
        assert all(torch.equal(one, all_[-1:]) for one, all_ in zip(alone, found, strict=True))
