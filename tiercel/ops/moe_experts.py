"""The routed experts of DeepSeek-V4, and the clamped SwiGLU of all its experts."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops import moe_experts_torch as torch_ops
from tiercel.ops.moe_experts_torch import Experts
from tiercel.quant import QuantTensor

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Clamped SwiGLU silu(min(gate, limit)) * clamp(up, -limit, limit).

    Args:
        gate: (...) float; clamped above alone.
        up: the shape of gate.
        limit: > 0; None for no clamp.

    Returns:
        (...) in the dtype of gate; float32 inside, rounded once.

    Raises:
        ArgumentError: the shapes disagree, or the limit is not positive.

    Source: "GLU Variants Improve Transformer", arXiv 2002.05202; the clamp of the inference code
    published with DeepSeek-V4.
    """
    if gate.shape != up.shape:
        raise ArgumentError(
            f"clamped_swiglu: gate is {tuple(gate.shape)} but up is {tuple(up.shape)}.",
            hint="Pass equal shapes.",
        )
    _check_limit("clamped_swiglu", limit)
    return torch_ops.swiglu(gate, up, limit).to(gate.dtype)


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    *,
    limit: float | None,
    rounds_activations: bool = False,
) -> Tensor:
    """Sum over a token's experts of weight * w2 swiglu(w1 x, w3 x).

    Choice: the pairs (token, slot) are sorted by expert into padded tiles of one expert each, and
    the products are batched over tiles whose experts were decoded. The number of tiles follows
    from the shapes, so there is no host sync, and the op can be captured in a CUDA graph.

    Args:
        x: (T, hidden), float32, bfloat16 or float16, with any strides.
        ids: (T, topk) int64, experts of each token, distinct or not; each within the stack (not
            checked on a device).
        weights: (T, topk) float32; multiplied into the activations before w2.
        experts: stacks of w1 (gate), w3 (up) and w2 (down), a float Tensor or
            weights of any type in layout FILE or BLOCKS.
        limit: of the clamped SwiGLU, > 0; None for no clamp.
        rounds_activations: the inputs of all products are rounded to FP8 in groups of 128, as in
            the published code (native numerics).

    Returns:
        (T, hidden), contiguous, dtype of x. Float32 inside; the slots are added in their order, and
        the sum is rounded once. Memory: about 1 GB of decoded weights (one expert's if that is
        more), and 4 * hidden * T * topk bytes.

    Raises:
        ArgumentError: shapes or dtypes disagree, or the limit is not positive.

    Source: the inference code published with DeepSeek-V4; tiles of one expert as in MegaBlocks,
    arXiv 2211.15841.
    """
    if x.dim() != 2 or x.dtype not in _FLOATS:
        raise ArgumentError(
            f"moe_experts: x is {tuple(x.shape)} {x.dtype}.",
            hint="Pass (tokens, hidden) in float32, bfloat16 or float16.",
        )
    if (
        ids.dim() != 2
        or ids.shape[0] != x.shape[0]
        or ids.shape[1] < 1
        or ids.dtype != torch.int64
        or weights.shape != ids.shape
    ):
        raise ArgumentError(
            f"moe_experts: ids are {tuple(ids.shape)} {ids.dtype} and weights "
            f"{tuple(weights.shape)} for {x.shape[0]} tokens.",
            hint=f"Pass ids ({x.shape[0]}, topk) torch.int64 and weights of the same shape.",
        )
    _check_limit("moe_experts", limit)
    _check_experts(experts, x.shape[1])
    if x.shape[0] == 0:
        return torch.empty_like(x)
    tiles = torch_ops.make_tiles(ids, experts.num_experts)
    pairs = torch_ops.run_experts(x.float(), tiles, weights, experts, limit, rounds_activations)
    return torch_ops.sum_slots(pairs, ids.shape[1]).to(x.dtype)


def _check_limit(name: str, limit: float | None) -> None:
    if limit is not None and not limit > 0:
        raise ArgumentError(
            f"{name}: limit={limit}.", hint="Pass a positive limit, or None for no clamp."
        )


def _check_experts(experts: Experts, hidden: int) -> None:
    shapes = tuple(tuple(stack.shape) for stack in (experts.w1, experts.w3, experts.w2))
    num_experts, inter = (shapes[0][0], shapes[0][1]) if len(shapes[0]) == 3 else (0, 0)
    expected = (
        (num_experts, inter, hidden),
        (num_experts, inter, hidden),
        (num_experts, hidden, inter),
    )
    if shapes != expected or num_experts < 1:
        raise ArgumentError(
            f"moe_experts: w1, w3 and w2 are {shapes} but x has {hidden} columns.",
            hint="Pass (experts, inter, hidden) twice and (experts, hidden, inter).",
        )
    for stack in (experts.w1, experts.w3, experts.w2):
        if isinstance(stack, QuantTensor):
            stack.check("moe_experts")
