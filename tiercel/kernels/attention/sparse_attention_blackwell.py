"""Attention of DeepSeek-V4 on Blackwell: cuda/attention/sparse_attention_blackwell.cu.

Compiled for sm_100a, never run, and no op launches it: it shows that the kernel's parts (keys
decoded once for both products, probabilities in tensor memory, half of the result's channels a
CTA) fit a processor's registers, shared and tensor memory.
"""

from __future__ import annotations

from typing import Final

from tiercel.kernels.runtime import rtc

HEADS, HEAD_DIM, TILE_KEYS = 128, 512, 64
STATIC_BYTES: Final = 8 * 3 + 4  # two barriers, a mask of keys, an address


def attention_source() -> rtc.KernelSource:
    """The kernel; it has one form."""
    return rtc.KernelSource("sparse_attention_blackwell")


def smem_bytes() -> int:
    """Dynamic shared memory of a CTA: queries of all heads, and a tile of keys, in bfloat16."""
    return 2 * HEAD_DIM * (HEADS + TILE_KEYS)
