"""Numbers of the block formats as device functions, exact: E4M3, E2M1, E8M0.

They use bits and products by powers of two alone, the same on a GPU and in the interpreter. A
float16 holds each E4M3 and E2M1 divided by a power of two, subnormal ones too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def e4m3_values(byte):
    """uint8 E4M3 to float32; 0x7F and 0xFF are NaN."""
    bits = byte.to(tl.int16)
    half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e2m1_values(code):
    """E2M1 codes, uint8 0 to 15, to float32."""
    bits = code.to(tl.int16)
    half = ((bits & 7) << 9) | ((bits & 8) << 12)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0_values(byte):
    """uint8 E8M0 to float32; 255 is NaN."""
    bits = byte.to(tl.int32)
    power = tl.where(bits == 0, 1 << 22, bits << 23)  # 2^-127 is subnormal
    return tl.where(bits == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)


@triton.jit
def load_scales(ptr, mask, IS_E4M3: tl.constexpr):
    """Scales as float32: uint8 is E4M3 or E8M0, float32 is taken as it is; masked ones are 0."""
    if ptr.dtype.element_ty == tl.float32:
        return tl.load(ptr, mask=mask, other=0.0)
    if IS_E4M3:
        return e4m3_values(tl.load(ptr, mask=mask, other=0))
    return tl.where(mask, e8m0_values(tl.load(ptr, mask=mask, other=0)), 0.0)


def raw_bytes(plane: Tensor) -> Tensor:
    """A plane as kernels take it: floats of 8 bits as bytes."""
    return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane
