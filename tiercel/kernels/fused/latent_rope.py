"""Head norm, interleaved partial RoPE and Hadamard rotation of DeepSeek-V4, and the cache write.

Floor: the heads are read and written once; a cache write reads a vector and writes its entry. A
program takes as many rows of a token as fill its registers, by a number that depends on their
shape alone. Codes are formed by integer arithmetic on the bits of float32 values, so the bytes of
an entry are those of ops/block_quantize.py for the same values.
"""

import functools

import torch
import triton
import triton.language as tl

from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

ELEMENTS = 2048  # of a program: 4 warps x 16 a thread
PLAIN, FP8, FP4 = 0, 1, 2  # how a row rests: in the cache's dtype, as a vector, as an index key
MAX_WIDTH = 2048


@triton.jit
def normed(x, weight_ptr, channel, eps, WIDTH: tl.constexpr):
    """Rows (rows, channels) over their root mean square, times a weight if there is one."""
    mean = tl.sum(x * x, axis=1, keep_dims=True) / WIDTH
    x = x * (1.0 / tl.sqrt(mean + eps))
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + channel, mask=channel < WIDTH, other=0.0)[None, :]
    return x


@triton.jit
def rotated(
    x,
    table_ptr,
    position,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    IS_INVERSE: tl.constexpr,
):
    """Rows (rows, BLOCK) with the last HALF pairs of the WIDTH channels rotated."""
    pair = tl.arange(0, BLOCK // 2)
    angle = pair - (WIDTH // 2 - HALF)
    is_turned = (angle >= 0) & (angle < HALF)
    angles = table_ptr + position.to(tl.int64) * (2 * HALF) + angle
    cos = tl.load(angles, mask=is_turned, other=1.0)[None, :]
    sin = tl.load(angles + HALF, mask=is_turned, other=0.0)[None, :]
    if IS_INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, (x.shape[0], BLOCK // 2, 2)))
    first = tl.where(is_turned[None, :], even * cos - odd * sin, even)
    second = tl.where(is_turned[None, :], even * sin + odd * cos, odd)
    return tl.reshape(tl.join(first, second), (x.shape[0], BLOCK))


@triton.jit
def hadamard_stage(x, SPAN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums and differences of the elements of rows that are SPAN apart."""
    pairs = tl.reshape(x, (ROWS * BLOCK // (2 * SPAN), 2, SPAN))
    is_low = (tl.arange(0, 2) == 0)[None, :, None]
    total = tl.sum(pairs, axis=1, keep_dims=True)
    difference = tl.sum(tl.where(is_low, pairs, -pairs), axis=1, keep_dims=True)
    return tl.reshape(tl.where(is_low, total, difference), (ROWS, BLOCK))


@triton.jit
def hadamard(x, FACTOR: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Walsh-Hadamard transform of rows of BLOCK = 2^LOG elements, times FACTOR."""
    for stage in tl.static_range(LOG):
        x = hadamard_stage(x, 1 << stage, ROWS, BLOCK)
    return x * FACTOR


@triton.jit
def e8m0(x):
    """Bytes, as int32, of the least powers of two >= x > 0; not finite gives 255."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) >> 23, 255)


@triton.jit
def inverse_e8m0(scale):
    """1 / 2^(scale - 127), exact for scales of 1 to 253; NaN for 255."""
    bits = tl.where(scale == 255, 0x7FC00000, (254 - scale) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3(x):
    """Nearest E4M3 codes of values up to 448, ties to the even code; NaN gives NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Multiples of 2^-9 below 2^-6: those have the spacing of 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, tl.minimum(code, 0x7F))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e2m1(x):
    """Nearest E2M1 codes, ties to the even code; beyond 6 saturates, NaN gives 0 or 8."""
    bits = x.to(tl.int32, bitcast=True)
    y = tl.abs(x)
    code = (y > 0.25).to(tl.int32) + (y >= 0.75).to(tl.int32) + (y > 1.25).to(tl.int32)
    code += (y >= 1.75).to(tl.int32) + (y > 2.5).to(tl.int32) + (y >= 3.5).to(tl.int32)
    code += (y > 5.0).to(tl.int32)
    return code | ((bits >> 28) & 8)


@triton.jit
def bfloat16_bits(x):
    """Bits, as int32, of float32 values rounded to bfloat16, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, ((bits >> 16) & 0xFFFF) | 0x40, rounded)


@triton.jit
def store_fp8(
    x,
    entry_ptr,
    scales_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write one vector (1, BLOCK): E4M3, then bfloat16 of the rotated channels; scale bytes."""
    NOPE: tl.constexpr = WIDTH - 2 * HALF
    GROUPS: tl.constexpr = BLOCK // GROUP
    parts = tl.reshape(x, (GROUPS, GROUP))
    amax = tl.maximum(tl.max(tl.abs(parts), axis=1), 1e-4)
    is_nan = tl.max((parts != parts).to(tl.int32), axis=1) > 0
    scale = tl.where(is_nan, 255, e8m0(tl.math.div_rn(amax, 448.0)))
    group, place = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    channel = group[:, None] * GROUP + place[None, :]
    codes = e4m3(parts * inverse_e8m0(scale)[:, None])
    tl.store(entry_ptr + channel, codes, mask=channel < NOPE)
    rest = bfloat16_bits(parts)
    last = entry_ptr + NOPE + 2 * (channel - NOPE)
    is_last = (channel >= NOPE) & (channel < WIDTH)
    tl.store(last, (rest & 0xFF).to(tl.uint8), mask=is_last)
    tl.store(last + 1, (rest >> 8).to(tl.uint8), mask=is_last)
    padded = tl.where(group * GROUP < NOPE, scale, 0).to(tl.uint8)
    tl.store(scales_ptr + group, padded, mask=group < SCALES)
    if SCALES > GROUPS:
        more = GROUPS + tl.arange(0, 8)
        tl.store(scales_ptr + more, tl.zeros((8,), tl.uint8), mask=more < SCALES)


@triton.jit
def store_fp4(x, entry_ptr, scales_ptr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Write one index key (1, BLOCK): packed E2M1, the even channel in bits 0 to 3; scale bytes."""
    GROUPS: tl.constexpr = BLOCK // GROUP
    parts = tl.reshape(x, (GROUPS, GROUP))
    amax = tl.maximum(tl.max(tl.abs(parts), axis=1), 7.052966104933725e-38)  # 6 * 2^-126
    is_nan = tl.max((parts != parts).to(tl.int32), axis=1) > 0
    scale = tl.where(is_nan, 255, e8m0(tl.math.div_rn(amax, 6.0)))
    codes = e2m1(parts * inverse_e8m0(scale)[:, None])
    low, high = tl.split(tl.reshape(codes, (GROUPS, GROUP // 2, 2)))
    group, place = tl.arange(0, GROUPS), tl.arange(0, GROUP // 2)
    byte = group[:, None] * (GROUP // 2) + place[None, :]
    tl.store(entry_ptr + byte, (low | (high << 4)).to(tl.uint8))
    tl.store(scales_ptr + group, scale.to(tl.uint8))


@triton.jit
def store_entry(
    x,
    cache_ptr,
    scales_ptr,
    slot,
    STRIDES: tl.constexpr,  # of blocks and entries: of the cache, then of the scales
    PER_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Write one row (1, BLOCK) to a slot >= 0."""
    block, entry = slot // PER_BLOCK, slot % PER_BLOCK
    cache = cache_ptr + block * STRIDES[0] + entry * STRIDES[1]
    if FORMAT == 0:
        channel = tl.arange(0, BLOCK)
        row = tl.reshape(x, (BLOCK,))
        tl.store(cache + channel, row.to(cache_ptr.dtype.element_ty), mask=channel < WIDTH)
    else:
        scales = scales_ptr + block * STRIDES[2] + entry * STRIDES[3]
        if FORMAT == 1:
            store_fp8(x, cache, scales, WIDTH, BLOCK, HALF, SCALES, 64)
        else:
            store_fp4(x, cache, scales, BLOCK, 32)


@triton.jit
def turn_heads(
    token,
    first,  # head
    x_ptr,  # the others as in `latent_rope_kernel`
    positions_ptr,
    table_ptr,
    weight_ptr,
    out_ptr,
    eps,
    STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    HADAMARD: tl.constexpr,
    LOG: tl.constexpr,
):
    """ROWS heads of a token, normed and rotated."""
    head = first + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    mask = (head[:, None] < HEADS) & (channel[None, :] < WIDTH)
    place = token * STRIDES[0] + head[:, None] * STRIDES[1] + channel[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        x = normed(x, weight_ptr, channel, eps, WIDTH)
    if table_ptr is not None:
        position = tl.load(positions_ptr + token)
        x = rotated(x, table_ptr, position, WIDTH, BLOCK, HALF, IS_INVERSE)
    if HADAMARD > 0:
        x = hadamard(x, HADAMARD, LOG, ROWS, BLOCK)
    place = (token * HEADS + head[:, None]) * WIDTH + channel[None, :]
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps"])
def latent_rope_kernel(
    x_ptr,  # (tokens, heads, WIDTH), inner stride 1
    positions_ptr,  # (tokens,)
    table_ptr,  # (positions, 2, HALF) float32, or None for no rotation
    weight_ptr,  # (WIDTH,) float32 or None
    out_ptr,  # (tokens, heads, WIDTH), contiguous
    eps,
    STRIDES: tl.constexpr,  # of tokens and heads of x
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= WIDTH
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    HADAMARD: tl.constexpr,  # factor after the transform; 0 for none
    LOG: tl.constexpr,  # of BLOCK
    IS_DEPENDENT: tl.constexpr,
):
    """ROWS heads of a token."""
    wait_for_inputs(IS_DEPENDENT)
    turn_heads(
        *(tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS),
        *(x_ptr, positions_ptr, table_ptr, weight_ptr, out_ptr, eps),
        *(STRIDES, HEADS, ROWS, WIDTH, BLOCK, HALF, HAS_NORM, IS_INVERSE, HADAMARD, LOG),
    )


@triton.jit(do_not_specialize=["eps"])
def latent_write_kernel(
    x_ptr,  # (tokens, WIDTH), inner stride 1
    positions_ptr,  # (tokens,), or None
    table_ptr,  # (positions, 2, HALF) float32, or None for no rotation
    weight_ptr,  # (WIDTH,) float32 or None
    slots_ptr,  # (tokens,) int64
    cache_ptr,  # (blocks, PER_BLOCK, channels or bytes), inner stride 1
    scales_ptr,  # (blocks, PER_BLOCK, SCALES) uint8, inner stride 1, or None
    eps,
    X_STRIDE: tl.constexpr,
    STRIDES: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HADAMARD: tl.constexpr,
    LOG: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One token's row."""
    wait_for_inputs(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        channel = tl.arange(0, BLOCK)
        place = x_ptr + token * X_STRIDE + channel[None, :]
        x = tl.load(place, mask=channel[None, :] < WIDTH, other=0.0).to(tl.float32)
        if HAS_NORM:
            x = normed(x, weight_ptr, channel, eps, WIDTH)
        if table_ptr is not None:
            position = tl.load(positions_ptr + token)
            x = rotated(x, table_ptr, position, WIDTH, BLOCK, HALF, False)
        if HADAMARD > 0:
            x = hadamard(x, HADAMARD, LOG, 1, BLOCK)
        store_entry(
            x, cache_ptr, scales_ptr, slot, STRIDES, PER_BLOCK, FORMAT, WIDTH, BLOCK, HALF, SCALES
        )


def shape_constants(width: int, *, has_hadamard: bool) -> tuple[int, float, int]:
    """BLOCK, HADAMARD and LOG."""
    block = max(16, triton.next_power_of_2(width))
    return block, (1 / width) ** 0.5 if has_hadamard else 0.0, block.bit_length() - 1


@functools.cache
def _rope(
    strides: tuple[int, int], num_heads: int, width: int, half: int, has_norm: bool,
    is_inverse: bool, has_hadamard: bool,
) -> tuple[TritonLaunch, int]:  # fmt: skip
    """A launch, and the rows of its programs."""
    block, factor, log = shape_constants(width, has_hadamard=has_hadamard)
    rows = min(max(1, ELEMENTS // block), triton.next_power_of_2(num_heads))
    constants = {
        "STRIDES": strides,
        "HEADS": num_heads,
        "ROWS": rows,
        "WIDTH": width,
        "BLOCK": block,
        "HALF": half,
        "HAS_NORM": has_norm,
        "IS_INVERSE": is_inverse,
        "HADAMARD": factor,
        "LOG": log,
    }
    return TritonLaunch(latent_rope_kernel, 4 if rows * block >= 1024 else 1, constants), rows


def launch_latent_rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    out: torch.Tensor,
    eps: float | None,
    weight: torch.Tensor | None,
    is_inverse: bool,
    has_hadamard: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated. x: (T, heads, width)."""
    num_tokens, num_heads, width = x.shape
    if x.numel() == 0:
        return
    half = 0 if table is None else table.shape[2]
    strides = (x.stride(0), x.stride(1))
    kind = (eps is not None, is_inverse, has_hadamard)
    launch, rows = _rope(strides, num_heads, width, half, *kind)
    grid = (num_tokens, -(-num_heads // rows), 1)
    launch(grid, (x, positions, table, weight, out), (0.0 if eps is None else eps,))


@functools.cache
def _write(
    x_stride: int, cache: tuple[int, ...], form: tuple[int, int], width: int, half: int,
    has_norm: bool, has_hadamard: bool,
) -> TritonLaunch:  # fmt: skip
    """cache: entries of a block, then STRIDES. form: FORMAT and SCALES."""
    block, factor, log = shape_constants(width, has_hadamard=has_hadamard)
    constants = {
        "X_STRIDE": x_stride,
        "STRIDES": cache[1:],
        "PER_BLOCK": cache[0],
        "FORMAT": form[0],
        "WIDTH": width,
        "BLOCK": block,
        "HALF": half,
        "SCALES": form[1],
        "HAS_NORM": has_norm,
        "HADAMARD": factor,
        "LOG": log,
    }
    # As many warps as `_rope` takes for one row: the same sums, so the same bytes.
    return TritonLaunch(latent_write_kernel, 4 if block >= 1024 else 1, constants)


def cache_constants(
    cache: torch.Tensor, scales: torch.Tensor | None
) -> tuple[tuple[int, ...], int]:
    """Entries of a block and STRIDES of `store_entry`; SCALES."""
    others = (0, 0) if scales is None else (scales.stride(0), scales.stride(1))
    strides = (cache.shape[1], cache.stride(0), cache.stride(1), *others)
    return strides, 0 if scales is None else scales.shape[2]


def launch_latent_write(
    x: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norm: tuple[float, torch.Tensor | None] | None,
    planes: tuple[torch.Tensor, torch.Tensor | None],
    slots: torch.Tensor,
    rotary_dim: int,
    has_hadamard: bool,
) -> None:
    """Enqueue on the current stream; the op has checked. x: (T, width).

    rope: positions and table, None where x is rotated. norm: eps and weight, None for no norm.
    planes: cache and scales; FP4 if there is a Hadamard rotation, else FP8 if there are scales.
    """
    num_tokens, width = x.shape
    if num_tokens == 0:
        return
    cache, scales = planes
    form = PLAIN if scales is None else FP4 if has_hadamard else FP8
    constants, num_scales = cache_constants(cache, scales)
    eps, weight = norm or (None, None)
    kind = (eps is not None, has_hadamard)
    launch = _write(x.stride(0), constants, (form, num_scales), width, rotary_dim // 2, *kind)
    positions, table = rope or (None, None)
    tensors = (x, positions, table, weight, slots, cache, scales)
    launch((num_tokens, 1, 1), tensors, (0.0 if eps is None else eps,))
