"""Norm, rotary embedding and cache write of the heads of a fused projection, in one pass.

A program takes a few heads of one token. Query and key heads are normed (if the model does) and
rotated in place, pairs (i, i + half); key and value heads go to the token's slot. A slot of -1 is
skipped on the device, so that padding and unused drafts need no host decision.

Heads of 16 bits that rotate whole go through cuda/rotary_kv_write.cu, all other heads through
Triton (both measured in whole steps: docs/notes/decode_stages.md). The two kernels differ in their
last bits, so the choice depends on the model alone, never on a step.

Floor: each head is read once, queries and keys are written once, keys and values once more.
"""

from __future__ import annotations

import ctypes
import functools

import torch
import triton
import triton.language as tl

from tiercel.kernels.runtime import rtc
from tiercel.kernels.runtime.triton_launch import ALIGNMENT, TritonLaunch, wait_for_inputs

THREADS = 128  # of a program
_ELEMENTS = 8 * THREADS  # of a program
# Of the CUDA kernel.
CAPABILITY = (8, 0)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
_MOST_ELEMENTS = 1 << 34  # of a layer's keys: 32-bit places of 4 elements


@triton.jit
def _weights(q_weight_ptr, k_weight_ptr, is_q, dim, is_dim):
    """Norm weights of some dimensions of each head, (HEADS, dims)."""
    q_weight = tl.load(q_weight_ptr + dim, mask=is_dim, other=0.0)
    return tl.where(is_q, q_weight, tl.load(k_weight_ptr + dim, mask=is_dim, other=0.0))


@triton.jit
def _store(x, heads_ptr, k_ptr, v_ptr, is_rotated, is_k, is_v, dim, is_dim):
    """Store some dimensions of each head, in place and in the cache."""
    x = x.to(heads_ptr.dtype.element_ty)
    tl.store(heads_ptr + dim, x, mask=is_rotated & is_dim)
    tl.store(k_ptr + dim, x, mask=is_k & is_dim)
    tl.store(v_ptr + dim, x, mask=is_v & is_dim)


@triton.jit(do_not_specialize=["eps"])
def rotary_kv_write_kernel(
    heads_ptr,  # (tokens, NUM_HEADS + 2 * KV_HEADS, HEAD_DIM) contiguous
    positions_ptr,  # (tokens,) int32
    table_ptr,  # (positions, 2, HALF) float32: cos, then sin
    slots_ptr,  # (tokens,) int64
    k_cache_ptr,  # (slots, KV_HEADS, HEAD_DIM) contiguous
    v_cache_ptr,  # like k_cache
    q_weight_ptr,  # (HEAD_DIM,) float32, or None without norms
    k_weight_ptr,  # like q_weight
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # pairs that rotate
    HEADS: tl.constexpr,  # of a program, power of two
    PAIRS: tl.constexpr,  # power of two, >= HALF
    REST: tl.constexpr,  # power of two, >= HEAD_DIM - 2 * HALF; 0 where all rotates
    IS_DEPENDENT: tl.constexpr,
):
    """Some heads of one token."""
    # 64-bit: tokens * columns pass 2**31 at 131072 x 16384, and slots * width do.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    ALL: tl.constexpr = NUM_HEADS + 2 * KV_HEADS
    is_head, is_rotated = (head < ALL)[:, None], (head < NUM_HEADS + KV_HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    is_pair = pair < HALF
    is_q = (head < NUM_HEADS)[:, None]
    if q_weight_ptr is not None:  # from cold memory, so before the wait
        a_weight = _weights(q_weight_ptr, k_weight_ptr, is_q, pair, is_pair)
        b_weight = _weights(q_weight_ptr, k_weight_ptr, is_q, HALF + pair, is_pair)
    wait_for_inputs(IS_DEPENDENT)
    slot = tl.load(slots_ptr + token)
    end = tl.where(slot >= 0, ALL, 0)  # a slot of -1 leaves no head
    is_k = ((head >= NUM_HEADS) & (head < tl.minimum(end, NUM_HEADS + KV_HEADS)))[:, None]
    is_v = ((head >= NUM_HEADS + KV_HEADS) & (head < end))[:, None]
    heads_ptr += (token * ALL + head)[:, None] * HEAD_DIM
    k_cache_ptr += (slot * KV_HEADS + head - NUM_HEADS)[:, None] * HEAD_DIM
    v_cache_ptr += (slot * KV_HEADS + head - (NUM_HEADS + KV_HEADS))[:, None] * HEAD_DIM

    first = tl.load(heads_ptr + pair, mask=is_head & is_pair, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + HALF + pair, mask=is_head & is_pair, other=0.0).to(tl.float32)
    row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(row + pair, mask=is_pair, other=0.0)
    sin = tl.load(row + HALF + pair, mask=is_pair, other=0.0)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if REST > 0:
        dim = tl.arange(0, REST)[None, :] + 2 * HALF
        is_dim = dim < HEAD_DIM
        rest = tl.load(heads_ptr + dim, mask=is_head & is_dim, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    a, b = first, second
    if q_weight_ptr is not None:
        rms = tl.sqrt(squares / HEAD_DIM + eps)[:, None]
        a = first / rms * a_weight
        b = second / rms * b_weight
    a, b = a * cos - b * sin, b * cos + a * sin
    a = tl.where(is_rotated, a, first)
    b = tl.where(is_rotated, b, second)
    _store(a, heads_ptr, k_cache_ptr, v_cache_ptr, is_rotated, is_k, is_v, pair, is_pair)
    _store(b, heads_ptr, k_cache_ptr, v_cache_ptr, is_rotated, is_k, is_v, HALF + pair, is_pair)
    if REST > 0:
        c = rest
        if q_weight_ptr is not None:
            c = rest / rms * _weights(q_weight_ptr, k_weight_ptr, is_q, dim, is_dim)
            c = tl.where(is_rotated, c, rest)
        _store(c, heads_ptr, k_cache_ptr, v_cache_ptr, is_rotated, is_k, is_v, dim, is_dim)


@functools.cache
def _launch(count: int, kv_heads: int, head_dim: int, half: int) -> tuple[TritonLaunch, int]:
    """The launch for so many heads in all, and how many programs a token takes."""
    rest = head_dim - 2 * half
    pairs = triton.next_power_of_2(half)
    heads = min(max(1, _ELEMENTS // (2 * pairs)), triton.next_power_of_2(count))
    constants = {
        "NUM_HEADS": count - 2 * kv_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "HEADS": heads,
        "PAIRS": pairs,
        "REST": triton.next_power_of_2(rest) if rest else 0,
    }
    return TritonLaunch(rotary_kv_write_kernel, THREADS // 32, constants), -(-count // heads)


@functools.cache
def cuda_source(
    count: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, has_norms: bool
) -> rtc.KernelSource:
    """The CUDA kernel for so many heads in all."""
    macros = (
        ("D", head_dim),
        ("NUM_HEADS", count - 2 * kv_heads),
        ("KV_HEADS", kv_heads),
        ("HAS_NORMS", int(has_norms)),
        ("IS_BF16", int(dtype == torch.bfloat16)),
    )
    return rtc.KernelSource("rotary_kv_write", macros)


@functools.cache
def has_cuda_kernel(head_dim: int, half: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether heads like these go through CUDA C++; no part of a step."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    return head_dim in HEAD_DIMS and 2 * half == head_dim and dtype in DTYPES


def launch_rotary_kv_write(
    heads: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> None:
    """Enqueue on the current stream; the op has checked. heads: (tokens, all heads, head_dim).

    The launch may be dependent (`rtc.launch`), and the CUDA kernel reads positions and slots before
    the wait: between their writing and the kernel ahead of this one there must be a kernel that
    lets nothing start early, `prepare_step` or one of PyTorch's.
    """
    tokens, count, head_dim = heads.shape
    if tokens == 0:
        return
    kv_heads, half, device = k_cache.shape[2], table.shape[2], heads.device
    tensors = (heads, positions, table, slots, k_cache, v_cache, q_weight, k_weight)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    # Of tensors that are read and written in vectors. A head is a multiple of them, so no view of
    # heads as the engine makes them fails this.
    vectors = (addresses[place] for place in (0, 2, 4, 5, 6, 7))
    fits = all(not address or address % ALIGNMENT == 0 for address in vectors)
    fits = fits and k_cache.numel() <= _MOST_ELEMENTS
    if not (fits and has_cuda_kernel(head_dim, half, heads.dtype, device)):
        launch, programs = _launch(count, kv_heads, head_dim, half)
        launch((tokens, programs, 1), tensors, (eps,))
        return
    source = cuda_source(count, kv_heads, head_dim, heads.dtype, has_norms=q_weight is not None)
    rtc.launch(
        rtc.load_kernel(source, device),
        tokens,
        THREADS,
        [*map(ctypes.c_void_p, addresses), ctypes.c_float(eps)],
        grid_y=-(-count * head_dim // _ELEMENTS),
        is_dependent=rtc.is_dependent(device),
    )
