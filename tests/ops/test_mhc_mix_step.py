"""A step between two blocks in one launch: its CUDA source on a processor.

On a machine with a GPU the kernel runs there.
"""

import pytest
import torch

from tests.ops.test_mhc_mix_finish import COLUMNS, EPS, ITERS, ROWS, N, check
from tiercel import env
from tiercel.kernels.fused import mhc_mix_step as kernel
from tiercel.ops import mhc_mix as op
from tiercel.reference import mhc_mix as oracle


def make_case(num_tokens, hidden, dtype, device="cpu"):
    """Streams with gaps between rows, a block's output with its weights, the next one's weights."""
    wide = torch.full((num_tokens, N, hidden + 8), float("nan"), device=device).bfloat16()
    wide[..., :hidden] = torch.randn(num_tokens, N, hidden, device=device)
    y = torch.full((num_tokens, hidden + 4), float("nan"), dtype=dtype, device=device)
    y[:, :hidden] = torch.randn(num_tokens, hidden, device=device)
    wide[-1] *= 1e-3  # so small that rms_eps decides
    y[-1] *= 1e-3
    post, comb = (torch.rand(num_tokens, *shape, device=device) for shape in ((N,), (N, N)))
    fn = torch.randn(ROWS, N * hidden, device=device) / (N * hidden) ** 0.5
    scale = torch.tensor([1.3, 0.7, 1.9], device=device)
    weights = (fn, scale, torch.randn(ROWS, device=device))
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
    pieces = -(-hidden // kernel.PIECE)
    parts = torch.full((num_tokens, pieces, COLUMNS), nan, device=device)
    tickets = torch.zeros(kernel.MOST_TOKENS, dtype=torch.int32, device=device)
    given = (parts, tickets, out[:-1], x[:-1], (post[:-1], comb[:-1]), norm, EPS, ITERS)
    kernel.launch_mhc_mix_step(before, weights, *given)
    assert all(tensor[-1].isnan().all() for tensor in (out, x, post, comb))
    assert not tickets.any()
    return out[:-1], x[:-1], post[:-1], comb[:-1]


def check_step(found, before, weights, norm):
    """The rest from the streams that were written: they are rounded before."""
    expected = oracle.post_sum(*(tensor.cpu() for tensor in before))
    torch.testing.assert_close(found[0].double().cpu(), expected, rtol=2**-8, atol=1e-5)
    check(found[1:], found[0], weights[0], weights[1:], norm)


# Hidden sizes: half a piece, pieces that divide them, a last piece of few channels.
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "dtype", "has_norm"),
    [(3, 72, torch.float32, True), (2, 512, torch.bfloat16, False), (1, 1160, torch.float32, True)],
)
def test_the_source_matches_oracle(num_tokens, hidden, dtype, has_norm, on_processor):
    before, weights, norm = make_case(num_tokens, hidden, dtype)
    norm = norm if has_norm else None
    found = run(before, weights, norm)
    check_step(found, before, weights, norm)
    on_processor.seed += 1  # another CTA of each token is the last
    again = run(before, weights, norm)
    alone = run([tensor[:1] for tensor in before], weights, norm)
    for one, other, single in zip(found, again, alone, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[:1], single)


def test_inputs_are_read_after_the_wait(on_processor):
    before, weights, norm = make_case(1, 256, torch.float32)
    before = [tensor.contiguous() for tensor in before]
    in_time = run(before, weights, norm)
    kept = [tensor.clone() for tensor in before]
    for tensor in before:
        tensor.fill_(float("nan"))
    on_processor.late = [tensor.copy_(one) for tensor, one in zip(before, kept, strict=True)]
    late = run(before, weights, norm)
    assert all(torch.equal(one, other) for one, other in zip(late, in_time, strict=True))


def test_refusals():
    (streams, y, *_), *_ = make_case(2, 512, torch.bfloat16)
    x = torch.empty(2, 512).bfloat16()
    assert kernel.step_refusal(streams, y, x) == ""
    assert kernel.step_refusal(streams, y.float(), x) == ""
    assert "float16" in kernel.step_refusal(streams, y.half(), x)
    assert "17 tokens" in kernel.step_refusal(streams[:1].expand(17, -1, -1), y, x)
    assert "output are not aligned" in kernel.step_refusal(streams, y[:, 1:], x)
    assert kernel.step_refusal(streams.float(), y, x) == "not bfloat16"


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4096, 7168])
@pytest.mark.parametrize("num_tokens", [1, 8, 16])
def test_shapes_of_deepseek_v4(num_tokens, hidden, device):
    before, weights, norm = make_case(num_tokens, hidden, torch.float32, device)
    check_step(run(before, weights, norm), before, weights, norm)


@pytest.mark.usefixtures("on_processor")
def test_the_op_takes_one_launch_with_tickets(monkeypatch):
    before, weights, norm = make_case(2, 256, torch.bfloat16)
    tickets = torch.zeros(op.MOST_COUNTED, dtype=torch.int32)
    options = {"rms_eps": EPS[0], "hc_eps": EPS[1], "norm_eps": EPS[2], "sinkhorn_iters": ITERS}
    options |= {"norm_weight": norm, "out_dtype": torch.bfloat16, "tickets": tickets}
    by_torch = op.mhc_mix_step(before[0], before[1:], *weights, **options)
    monkeypatch.setattr(op, "step_refusal", lambda streams, y: "")
    monkeypatch.setenv("TIERCEL_MHC_STEP", "1")
    found = op.mhc_mix_step(before[0], before[1:], *weights, **options)
    expected = run(before, weights, norm)
    for one, other, single in zip(found, by_torch, expected, strict=True):
        assert torch.equal(one, single)
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    monkeypatch.setenv("TIERCEL_MHC_KERNEL", "0")
    assert not env.has_mhc_step()
