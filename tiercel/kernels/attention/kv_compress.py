"""The compressors of DeepSeek-V4: softmax sums of an entry's terms, norm and RoPE; their inputs.

Floor: the kv and gate inputs of an entry's terms are read once, and the entry is written once. A
program forms one entry, TERMS terms at a time with an online softmax per channel; a row without
entry ends at once. Terms are rows of this step, or rows of the cache.
"""

import functools

import torch
import triton
import triton.language as tl

from tiercel.kernels.fused.latent_rope import cache_constants, normed, rotated
from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

TERMS = 16  # at most, whose inputs are in flight together
STORE_BLOCK = 1024  # channels of an input that a program stores
MAX_WIDTH = 2048


@triton.jit
def load_terms(
    fresh_ptr,
    stored_ptr,
    fresh,
    stored,
    half,
    channel,
    other,
    FRESH: tl.constexpr,
    STORED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Inputs (terms, channels) of terms in this step or in the cache; `other` where in neither."""
    mask = channel[None, :] < WIDTH
    row = fresh * FRESH + half
    new = tl.load(
        fresh_ptr + row[:, None] + channel[None, :],
        mask=(fresh >= 0)[:, None] & mask,
        other=other,
    )
    place = stored // STORED[0] * STORED[1] + stored % STORED[0] * STORED[2] + half
    old = tl.load(
        stored_ptr + place[:, None] + channel[None, :],
        mask=(stored >= 0)[:, None] & mask,
        other=other,
    )
    return tl.where((fresh >= 0)[:, None], new, old)


@triton.jit
def compressed_entry(
    kv_ptr,
    gate_ptr,
    bias_ptr,
    stored_kv_ptr,
    stored_gate_ptr,
    fresh_ptr,  # of the entry's terms
    stored_ptr,
    weight_ptr,
    table_ptr,
    entry,
    eps,
    FRESH: tl.constexpr,
    STORED_KV: tl.constexpr,
    STORED_GATE: tl.constexpr,
    RATIO: tl.constexpr,
    COUNT: tl.constexpr,
    TERMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """An entry (1, BLOCK) from its terms, normed and rotated; names as in `kv_compress_kernel`."""
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COUNT, TERMS):
        term = start + tl.arange(0, TERMS)
        is_term = term < COUNT
        fresh = tl.load(fresh_ptr + term, mask=is_term, other=-1)
        stored = tl.load(stored_ptr + term, mask=is_term, other=-1)
        # With overlap, the terms of the tokens before use the first half of the channels.
        half = term // RATIO * WIDTH
        gate = load_terms(
            gate_ptr, stored_gate_ptr, fresh, stored, half, channel, float("-inf"),
            FRESH[1], STORED_GATE, WIDTH,
        )  # fmt: skip
        kv = load_terms(
            kv_ptr, stored_kv_ptr, fresh, stored, half, channel, 0.0,
            FRESH[0], STORED_KV, WIDTH,
        )  # fmt: skip
        if bias_ptr is not None:
            CHANNELS: tl.constexpr = WIDTH * (COUNT // RATIO)
            place_of_bias = term % RATIO * CHANNELS + half
            biases = bias_ptr + place_of_bias[:, None] + channel[None, :]
            is_new = (fresh >= 0)[:, None] & mask[None, :]
            gate += tl.load(biases, mask=is_new, other=0.0)
        most = tl.maximum(best, tl.max(gate, axis=0))
        shift = tl.where(most == float("-inf"), 0.0, most)  # no term yet: weights of 0
        factor = tl.exp(best - shift)
        weights = tl.exp(gate - shift[None, :])
        total = total * factor + tl.sum(weights, axis=0)
        sums = sums * factor + tl.sum(weights * kv, axis=0)
        best = most
    x = tl.where(mask, sums, 0.0) / tl.where(mask, total, 1.0)
    x = normed(tl.reshape(x, (1, BLOCK)), weight_ptr, channel, eps, WIDTH)
    return rotated(x, table_ptr, entry * RATIO, WIDTH, BLOCK, HALF, False)


@triton.jit(do_not_specialize=["eps"])
def kv_compress_kernel(
    kv_ptr,  # (tokens, WIDTH or 2 * WIDTH) float32, inner stride 1
    gate_ptr,  # as kv
    bias_ptr,  # (RATIO, WIDTH or 2 * WIDTH) float32, added to this step's gates, or None
    stored_kv_ptr,  # (blocks, rows, WIDTH or 2 * WIDTH) float32, inner stride 1
    stored_gate_ptr,  # as stored_kv
    entries_ptr,  # (N,) int64
    fresh_ptr,  # (N, COUNT) int64
    stored_ptr,  # (N, COUNT) int64
    weight_ptr,  # (WIDTH,) float32
    table_ptr,  # (positions, 2, HALF) float32
    out_ptr,  # (N, WIDTH) float32, contiguous
    eps,
    FRESH: tl.constexpr,  # strides of kv and gate
    STORED_KV: tl.constexpr,  # rows of a block, strides of blocks and rows
    STORED_GATE: tl.constexpr,
    TERM_STRIDE: tl.constexpr,  # from one entry's terms to the next
    RATIO: tl.constexpr,
    COUNT: tl.constexpr,  # terms of an entry
    TERMS: tl.constexpr,  # a power of two
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= WIDTH
    HALF: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One entry."""
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(entries_ptr + row)
    channel = tl.arange(0, BLOCK)
    mask = channel < WIDTH
    out = out_ptr + row * WIDTH + channel
    if entry < 0:
        tl.store(out, tl.zeros((BLOCK,), tl.float32), mask=mask)
    else:
        x = compressed_entry(
            *(kv_ptr, gate_ptr, bias_ptr, stored_kv_ptr, stored_gate_ptr),
            *(fresh_ptr + row * TERM_STRIDE, stored_ptr + row * TERM_STRIDE),
            *(weight_ptr, table_ptr, entry, eps, FRESH, STORED_KV, STORED_GATE),
            *(RATIO, COUNT, TERMS, WIDTH, BLOCK, HALF),
        )
        tl.store(out, tl.reshape(x, (BLOCK,)), mask=mask)


@triton.jit
def store_inputs(
    kv_ptr,
    gate_ptr,
    bias_ptr,
    stored_kv_ptr,
    stored_gate_ptr,
    token,
    position,
    slot,
    channel,
    FRESH: tl.constexpr,
    STORED_KV: tl.constexpr,
    STORED_GATE: tl.constexpr,
    RATIO: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Some channels of a token's kv and gate to a slot; names as in `input_write_kernel`."""
    mask = channel < CHANNELS
    kv = tl.load(kv_ptr + token * FRESH[0] + channel, mask=mask)
    gate = tl.load(gate_ptr + token * FRESH[1] + channel, mask=mask)
    gate += tl.load(bias_ptr + position % RATIO * CHANNELS + channel, mask=mask)
    place = stored_kv_ptr + slot // STORED_KV[0] * STORED_KV[1] + slot % STORED_KV[0] * STORED_KV[2]
    tl.store(place + channel, kv, mask=mask)
    place = stored_gate_ptr + slot // STORED_GATE[0] * STORED_GATE[1]
    tl.store(place + slot % STORED_GATE[0] * STORED_GATE[2] + channel, gate, mask=mask)


@triton.jit
def input_write_kernel(
    kv_ptr,  # (tokens, CHANNELS) float32, inner stride 1
    gate_ptr,  # as kv
    bias_ptr,  # (RATIO, CHANNELS) float32
    positions_ptr,  # (tokens,)
    slots_ptr,  # (tokens,) int64
    stored_kv_ptr,  # (blocks, rows, CHANNELS) float32, inner stride 1
    stored_gate_ptr,  # as stored_kv
    FRESH: tl.constexpr,
    STORED_KV: tl.constexpr,
    STORED_GATE: tl.constexpr,
    RATIO: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """BLOCK channels of a token's kv and of its gate with the position bias."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        position = tl.load(positions_ptr + token)
        store_inputs(
            *(kv_ptr, gate_ptr, bias_ptr, stored_kv_ptr, stored_gate_ptr),
            *(token, position, slot, channel),
            *(FRESH, STORED_KV, STORED_GATE, RATIO, CHANNELS),
        )


Strides = tuple[int, int, int]


@functools.cache
def _compress(
    fresh: tuple[int, int], stored: tuple[Strides, Strides], term_stride: int,
    sizes: tuple[int, int, int, int],
) -> TritonLaunch:  # fmt: skip
    """sizes: tokens of an entry, its terms, its channels, pairs that rotate."""
    ratio, count, width, half = sizes
    terms = min(TERMS, triton.next_power_of_2(count))
    block = max(16, triton.next_power_of_2(width))
    constants = {
        "FRESH": fresh,
        "STORED_KV": stored[0],
        "STORED_GATE": stored[1],
        "TERM_STRIDE": term_stride,
        "RATIO": ratio,
        "COUNT": count,
        "TERMS": terms,
        "WIDTH": width,
        "BLOCK": block,
        "HALF": half,
    }
    num_warps = 4 if terms * block <= 4096 else 8 if terms * block < 8192 else 16
    return TritonLaunch(kv_compress_kernel, num_warps, constants)


def row_strides(cache: torch.Tensor) -> Strides:
    """Rows of a block, strides of blocks and rows."""
    strides, _ = cache_constants(cache, None)
    return strides[0], strides[1], strides[2]


def launch_kv_compress(
    inputs: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    stored: tuple[torch.Tensor, torch.Tensor],
    terms: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
    eps: float,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    inputs, stored: kv and gates. bias: of this step's gates, None if they have it. terms: entries,
    fresh and stored of `Terms`, the last two with equal strides.
    """
    num_entries, width = out.shape
    if num_entries == 0:
        return
    fresh = (inputs[0].stride(0), inputs[1].stride(0))
    sizes = (ratio, terms[1].shape[1], width, table.shape[2])
    strides = (row_strides(stored[0]), row_strides(stored[1]))
    launch = _compress(fresh, strides, terms[1].stride(0), sizes)
    tensors = (*inputs, bias, *stored, *terms, weight, table, out)
    launch((num_entries, 1, 1), tensors, (eps,))


@functools.cache
def _write(
    fresh: tuple[int, int], stored: tuple[Strides, Strides], ratio: int, channels: int
) -> TritonLaunch:
    constants = {
        "FRESH": fresh,
        "STORED_KV": stored[0],
        "STORED_GATE": stored[1],
        "RATIO": ratio,
        "CHANNELS": channels,
        "BLOCK": min(STORE_BLOCK, triton.next_power_of_2(channels)),
    }
    return TritonLaunch(input_write_kernel, 4, constants)


def launch_input_write(
    inputs: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Enqueue on the current stream; the op has checked. bias: contiguous."""
    num_tokens, channels = inputs[0].shape
    if num_tokens == 0:
        return
    fresh = (inputs[0].stride(0), inputs[1].stride(0))
    launch = _write(fresh, (row_strides(stored[0]), row_strides(stored[1])), *bias.shape)
    grid = (num_tokens, -(-channels // STORE_BLOCK), 1)
    launch(grid, (*inputs, bias, positions, slots, *stored))
