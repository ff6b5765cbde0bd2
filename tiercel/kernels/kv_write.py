"""Write new keys and values into their cache slots: one program per token.

Floor: each key and value is read once and written once. A slot of -1 is skipped on the device, so
that padding and unused drafts need no host decision.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def kv_write_kernel(
    k_ptr,  # (tokens, heads * head_dim)
    v_ptr,  # (tokens, heads * head_dim)
    k_cache_ptr,  # (slots, heads * head_dim) contiguous
    v_cache_ptr,  # (slots, heads * head_dim) contiguous
    slots_ptr,  # (tokens,) int64
    k_stride,  # elements from one token of k to the next
    v_stride,  # elements from one token of v to the next
    width,  # heads * head_dim
    BLOCK: tl.constexpr,  # power of two, >= width
):
    """Copy one token's key and value."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)  # int64: slots * width passes 2**31
    cols = tl.arange(0, BLOCK)
    mask = cols < tl.where(slot >= 0, width, 0)  # a slot of -1 leaves no column
    k = tl.load(k_ptr + token * k_stride + cols, mask=mask)
    v = tl.load(v_ptr + token * v_stride + cols, mask=mask)
    tl.store(k_cache_ptr + slot * width + cols, k, mask=mask)
    tl.store(v_cache_ptr + slot * width + cols, v, mask=mask)


def launch_kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Enqueue on the current stream; the op has checked."""
    tokens, heads, head_dim = k.shape
    if tokens == 0:
        return
    width = heads * head_dim
    kv_write_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        v.stride(0),
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width > 256 else 1,
    )
