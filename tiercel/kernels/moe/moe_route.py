"""The router of DeepSeek-V4: scores, the choice of experts and their weights in one launch.

Floor: a token's logits are read once. One warp chooses a token's experts: the best of packed keys,
a float's bits in order and then the lower expert first, once for each expert.
"""

import functools

import torch
import triton
import triton.language as tl

from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

MAX_EXPERTS = 2048  # the logits of a token in the registers of a warp


@triton.jit
def scores(z):
    """sqrt(softplus(z)), without cancellation.

    log1p(e) = 2 artanh(e / (2 + e)), whose series has a ratio below 1 / 9.
    """
    e = tl.exp(-tl.abs(z))
    w = e / (2.0 + e)
    s = w * w
    series = 1.0 / 15.0
    series = series * s + 1.0 / 13.0
    series = series * s + 1.0 / 11.0
    series = series * s + 1.0 / 9.0
    series = series * s + 1.0 / 7.0
    series = series * s + 1.0 / 5.0
    series = series * s + 1.0 / 3.0
    series = series * s + 1.0
    return tl.sqrt(tl.where(z < 0.0, 0.0, z) + 2.0 * w * series)  # NaN is not below 0


@triton.jit
def normalised(chosen, scale):
    """Scores over their sum, times scale."""
    return chosen / (tl.sum(chosen, axis=0) + 1e-20) * scale


@triton.jit
def store_pairs(
    ids_ptr, weights_ptr, ids, weights, is_chosen, token,
    TOPK: tl.constexpr, FIRST: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """A token's experts and weights; of one rank's experts alone, as `own_pairs` has them."""
    if OWN > 0:
        local = ids - FIRST
        is_own = is_chosen & (local >= 0) & (local < OWN)
        here = tl.max(tl.where(is_own, local, 0), axis=0)
        ids = tl.where(is_own, local, tl.where(token == 0, here, -1))
        weights = tl.where(is_own, weights, 0.0)
    place = token * TOPK + tl.arange(0, ids.shape[0])
    tl.store(ids_ptr + place, ids, mask=is_chosen)
    tl.store(weights_ptr + place, weights, mask=is_chosen)


@triton.jit(do_not_specialize=["scale"])
def learned_kernel(
    logits_ptr,  # (tokens, EXPERTS)
    bias_ptr,  # (EXPERTS,) float32
    ids_ptr,  # (tokens, TOPK) int64
    weights_ptr,  # (tokens, TOPK) float32
    scale,
    TOKEN_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= EXPERTS
    TOPK: tl.constexpr,
    PLACES: tl.constexpr,  # a power of two >= TOPK
    FIRST: tl.constexpr,  # expert of this rank
    OWN: tl.constexpr,  # experts of this rank; 0: all are
    IS_DEPENDENT: tl.constexpr,
):
    """The experts of one token."""
    expert = tl.arange(0, BLOCK)
    mask = expert < EXPERTS
    bias = tl.load(bias_ptr + expert, mask=mask, other=0.0)
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + token * TOKEN_STRIDE
    z = tl.load(logits + expert * EXPERT_STRIDE, mask=mask, other=0.0).to(tl.float32)
    value = scores(z) + bias
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value != value, 0x7FC00000, bits)  # first, as in a descending sort
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    least = -(1 << 62)
    key = tl.where(mask, ordered * BLOCK + (BLOCK - 1 - expert), least)
    place = tl.arange(0, PLACES)
    ids = tl.zeros((PLACES,), tl.int64)
    for turn in tl.static_range(TOPK):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, least, key)
        ids = tl.where(place == turn, BLOCK - 1 - (best & (BLOCK - 1)), ids)
    is_chosen = place < TOPK
    z = tl.load(logits + ids * EXPERT_STRIDE, mask=is_chosen, other=0.0).to(tl.float32)
    chosen = tl.where(is_chosen, scores(z), 0.0)
    weights = normalised(chosen, scale)
    store_pairs(ids_ptr, weights_ptr, ids, weights, is_chosen, token, TOPK, FIRST, OWN)


@triton.jit(do_not_specialize=["scale"])
def hash_kernel(
    logits_ptr,  # (tokens, experts)
    table_ptr,  # (vocab, TOPK) int64, contiguous
    token_ids_ptr,  # (tokens,)
    ids_ptr,  # (tokens, TOPK) int64
    weights_ptr,  # (tokens, TOPK) float32
    scale,
    TOKEN_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    TOPK: tl.constexpr,
    PLACES: tl.constexpr,  # a power of two >= TOPK
    FIRST: tl.constexpr,  # expert of this rank
    OWN: tl.constexpr,  # experts of this rank; 0: all are
    IS_DEPENDENT: tl.constexpr,
):
    """The experts of one token."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    mask = place < TOPK
    row = tl.load(token_ids_ptr + token).to(tl.int64)
    ids = tl.load(table_ptr + row * TOPK + place, mask=mask, other=0)
    logits = logits_ptr + token * TOKEN_STRIDE + ids * EXPERT_STRIDE
    z = tl.load(logits, mask=mask, other=0.0).to(tl.float32)
    chosen = tl.where(mask, scores(z), 0.0)
    weights = normalised(chosen, scale)
    store_pairs(ids_ptr, weights_ptr, ids, weights, mask, token, TOPK, FIRST, OWN)


@functools.cache
def _launch(
    strides: tuple[int, int], num_experts: int, topk: int, own: range, is_hash: bool
) -> TritonLaunch:
    constants = {"TOKEN_STRIDE": strides[0], "EXPERT_STRIDE": strides[1]}
    constants |= {"FIRST": own.start, "OWN": len(own)}
    places = {"TOPK": topk, "PLACES": max(2, triton.next_power_of_2(topk))}
    if is_hash:
        return TritonLaunch(hash_kernel, 1, constants | places)
    block = max(32, triton.next_power_of_2(num_experts))
    sizes = {"EXPERTS": num_experts, "BLOCK": block}
    return TritonLaunch(learned_kernel, 1, constants | sizes | places)


def launch_moe_route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    own: range | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated."""
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    strides = logits.stride(0), logits.stride(1)
    launch = _launch(strides, num_experts, ids.shape[1], own or range(0), False)
    launch((num_tokens, 1, 1), (logits, bias, ids, weights), (scale,))


def launch_moe_route_hash(
    logits: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    own: range | None = None,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated."""
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return
    strides = logits.stride(0), logits.stride(1)
    launch = _launch(strides, num_experts, ids.shape[1], own or range(0), True)
    launch((num_tokens, 1, 1), (logits, table, token_ids, ids, weights), (scale,))
