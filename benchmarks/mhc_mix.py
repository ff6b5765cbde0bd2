"""The residual streams of DeepSeek-V4 against their floor in bytes.

    python -m benchmarks.mhc_mix --device cuda --out FILE.json

Floor: pre reads the streams and fn and writes x, normed or not; post reads the streams and y and
writes the streams; a step, as layers call it, does both for two blocks and reads the streams once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main, relative_error
from tiercel.ops.mhc_mix import mhc_mix_collapse, mhc_mix_post, mhc_mix_pre, mhc_mix_step
from tiercel.reference import mhc_mix as oracle

STREAMS, ROWS, ITERS, EPS = 4, 24, 20, 1e-6
HIDDEN = {"Flash": 4096, "Pro": 7168}
TOKENS = {"cuda": (1, 8, 16, 64, 256, 4096), "cpu": (1, 16)}


@dataclass(frozen=True)
class Inputs:
    """Streams (T, 4, hidden) and y (T, hidden) in bfloat16, weights in float32."""

    streams: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    y: Tensor
    post: Tensor
    comb: Tensor
    norm: Tensor


def pre(inputs: Inputs) -> Tensor:
    weights = (inputs.fn, inputs.scale, inputs.base)
    return mhc_mix_pre(inputs.streams, *weights, rms_eps=EPS, hc_eps=EPS, sinkhorn_iters=ITERS)[0]


def normed(inputs: Inputs) -> Tensor:
    """As a layer calls pre: with the block's norm."""
    weights = (inputs.fn, inputs.scale, inputs.base)
    norm = {"norm_weight": inputs.norm, "norm_eps": EPS}
    return mhc_mix_pre(
        inputs.streams, *weights, rms_eps=EPS, hc_eps=EPS, sinkhorn_iters=ITERS, **norm
    )[0]


def post(inputs: Inputs) -> Tensor:
    return mhc_mix_post(inputs.streams, inputs.y, inputs.post, inputs.comb)


def collapse(inputs: Inputs) -> Tensor:
    weights = (inputs.fn[:STREAMS], inputs.scale[:1], inputs.base[:STREAMS])
    return mhc_mix_collapse(inputs.streams, *weights, rms_eps=EPS, hc_eps=EPS)


def step(inputs: Inputs) -> Tensor:
    """The post of a block and the pre of the next, with its norm."""
    update, weights = (inputs.y, inputs.post, inputs.comb), (inputs.fn, inputs.scale, inputs.base)
    norm = {"norm_weight": inputs.norm, "norm_eps": EPS, "out_dtype": torch.bfloat16}
    return mhc_mix_step(
        inputs.streams, update, *weights, rms_eps=EPS, hc_eps=EPS, sinkhorn_iters=ITERS, **norm
    )[1]


def expected_step(inputs: Inputs) -> Tensor:
    streams = oracle.post_sum(
        *(part.cpu() for part in (inputs.streams, inputs.y, inputs.post, inputs.comb))
    )
    return expected_normed(replace(inputs, streams=streams.bfloat16()))


def expected_pre(inputs: Inputs) -> Tensor:
    weights = (inputs.fn.cpu(), inputs.scale.cpu(), inputs.base.cpu())
    streams = inputs.streams.cpu()
    return oracle.pre_sum(streams, oracle.coefficients(streams, *weights, EPS, EPS, ITERS)[0])


def expected_normed(inputs: Inputs) -> Tensor:
    x = expected_pre(inputs)
    return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * inputs.norm.double().cpu()


def expected_post(inputs: Inputs) -> Tensor:
    return oracle.post_sum(inputs.streams, inputs.y, inputs.post, inputs.comb)


def expected_collapse(inputs: Inputs) -> Tensor:
    weights = (inputs.fn[:STREAMS], inputs.scale[:1], inputs.base[:STREAMS])
    return oracle.collapse(inputs.streams, *weights, EPS, EPS)


def make_inputs(seed: int, num_tokens: int, hidden: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def sample(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    return Inputs(
        sample(num_tokens, STREAMS, hidden).bfloat16(),
        sample(ROWS, STREAMS * hidden) / (STREAMS * hidden) ** 0.5,
        sample(3),
        sample(ROWS),
        sample(num_tokens, hidden).bfloat16(),
        sample(num_tokens, STREAMS),
        sample(num_tokens, STREAMS, STREAMS),
        sample(hidden),
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield pre, post and collapse at each shape; bytes moved define the floor."""
    for model, hidden in HIDDEN.items():
        for num_tokens in TOKENS[device.type]:
            row = 2 * num_tokens * hidden
            for name, run, expected, num_bytes in (
                ("pre", pre, expected_pre, (STREAMS + 1) * row + 4 * ROWS * STREAMS * hidden),
                (
                    "pre and norm",
                    normed,
                    expected_normed,
                    (STREAMS + 1) * row + 4 * ROWS * STREAMS * hidden + 4 * hidden,
                ),
                ("post", post, expected_post, (2 * STREAMS + 1) * row),
                (
                    "step",
                    step,
                    expected_step,
                    (2 * STREAMS + 2) * row + 4 * ROWS * STREAMS * hidden + 4 * hidden,
                ),
                ("collapse", collapse, expected_collapse, (STREAMS + 1) * row + 64 * hidden),
            ):
                yield Case(
                    name=f"{model} {name} tokens={num_tokens}",
                    make=lambda seed, t=num_tokens, h=hidden: make_inputs(seed, t, h, device),
                    run=run,
                    check=lambda x, run=run, expected=expected: relative_error(
                        run(x).cpu(), expected(x).cpu()
                    ),
                    tolerance=5e-3,
                    num_bytes=num_bytes,
                )


if __name__ == "__main__":
    main(__doc__, cases)
