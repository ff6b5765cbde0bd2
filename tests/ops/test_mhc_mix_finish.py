"""The end of a mix in one launch: its CUDA source on a processor, and the choice of kernel.

On a machine with a GPU the op's tests run the kernel there.
"""

import pytest
import torch

from tiercel.kernels.fused import mhc_mix_finish as kernel
from tiercel.reference import mhc_mix as oracle

EPS = (1e-6, 1e-6, 1e-3)
ITERS, N, ROWS, COLUMNS = 20, 4, 24, 32


def make_case(num_tokens, hidden, splits, device="cpu"):
    """Streams with gaps between rows, products in pieces, weights; columns without use are NaN."""
    scales = torch.arange(1, N + 1.0, device=device)[:, None]
    wide = torch.full((num_tokens, N, hidden + 8), float("nan"), device=device).bfloat16()
    wide[..., :hidden] = torch.randn(num_tokens, N, hidden, device=device) * scales
    wide[-1] *= 1e-3  # so small that rms_eps decides
    streams = wide[..., :hidden]
    fn = torch.randn(ROWS, N * hidden, device=device) / (N * hidden) ** 0.5
    u = streams.float().flatten(1)
    parts = torch.full((num_tokens, splits, COLUMNS), float("nan"), device=device)
    shares = torch.rand(splits, device=device) + 0.1
    shares /= shares.sum()
    sums = torch.cat((u @ fn.T, u.square().sum(1, keepdim=True)), dim=1)
    parts[..., : ROWS + 1] = sums[:, None] * shares[:, None]
    scale = torch.tensor([1.3, 0.7, 1.9], device=device)
    weights = (scale, torch.randn(ROWS, device=device))
    return streams, fn, parts, weights, torch.randn(hidden, device=device)


def run(streams, parts, weights, norm):
    """x, post and comb in poisoned memory, with a row of guard."""
    num_tokens, _, hidden = streams.shape
    device, nan = streams.device, float("nan")
    x = torch.full((num_tokens + 1, hidden), nan, device=device).bfloat16()
    post = torch.full((num_tokens + 1, N), nan, device=device)
    comb = torch.full((num_tokens + 1, N, N), nan, device=device)
    coefficients = (post[:-1], comb[:-1])
    kernel.launch_mhc_mix_finish(streams, parts, weights, x[:-1], coefficients, norm, EPS, ITERS)
    assert all(tensor[-1].isnan().all() for tensor in (x, post, comb))
    return x[:-1], post[:-1], comb[:-1]


def check(found, streams, fn, weights, norm):
    x, post, comb = found
    arguments = [tensor.cpu() for tensor in (streams, fn, *weights)]
    pre, expected_post, expected_comb = oracle.coefficients(*arguments, *EPS[:2], ITERS)
    mixed = oracle.pre_sum(arguments[0], pre)
    if norm is not None:
        mean = mixed.square().mean(1, keepdim=True)
        mixed = mixed / (mean + EPS[2]).sqrt() * norm.double().cpu()
    unit = 2**-8 + 1e-5
    torch.testing.assert_close(x.double().cpu(), mixed, rtol=unit, atol=unit)
    for one, other in ((post, expected_post), (comb, expected_comb)):
        torch.testing.assert_close(one.double().cpu(), other, rtol=2e-5, atol=2e-5)


# Hidden sizes: lanes without channels, all lanes with some, two runs of some lanes.
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "splits"), [(3, 72, 5), (1, 4096, 32), (2, 5000, 17)]
)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.usefixtures("on_processor")
def test_the_source_matches_oracle(num_tokens, hidden, splits, has_norm):
    streams, fn, parts, weights, norm = make_case(num_tokens, hidden, splits)
    norm = norm if has_norm else None
    check(run(streams, parts, weights, norm), streams, fn, weights, norm)


def test_inputs_are_read_after_the_wait(on_processor):
    streams, _, parts, weights, norm = make_case(2, 512, 8)
    streams = streams.contiguous()
    in_time = run(streams, parts, weights, norm)
    kept = streams.clone(), parts.clone()
    for tensor in (streams, parts):
        tensor.fill_(float("nan"))
    on_processor.late = [streams.copy_(kept[0]), parts.copy_(kept[1])]
    late = run(streams, parts, weights, norm)
    assert all(torch.equal(one, other) for one, other in zip(late, in_time, strict=True))


@pytest.mark.usefixtures("on_processor")
def test_a_token_has_the_same_bits_in_any_launch():
    streams, _, parts, weights, norm = make_case(3, 512, 8)
    every = run(streams, parts, weights, norm)
    some = run(streams[1:2], parts[1:2], weights, norm)
    assert all(torch.equal(one, all_[1:2]) for one, all_ in zip(some, every, strict=True))


def test_refusals():
    streams, *_ = make_case(2, 512, 4)
    x = torch.empty(2, 512).bfloat16()
    assert kernel.finish_refusal(streams, x) == ""
    assert kernel.finish_refusal(streams[:, :2], x) == "there are 2 streams"
    assert "510 channels" in kernel.finish_refusal(streams[..., :510], x)
    assert kernel.finish_refusal(streams.float(), x) == "not bfloat16"
    assert kernel.finish_refusal(streams, x.float()) == "not bfloat16"
    odd = torch.empty(2, N, 516).bfloat16()[..., :512]
    assert "not aligned" in kernel.finish_refusal(odd, x)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 7168])
@pytest.mark.parametrize("num_tokens", [1, 8, 300])
def test_shapes_of_deepseek_v4(num_tokens, hidden, device):
    streams, fn, parts, weights, norm = make_case(num_tokens, hidden, 32, device)
    check(run(streams, parts, weights, norm), streams, fn, weights, norm)
