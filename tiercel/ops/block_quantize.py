"""Block formats of DeepSeek-V4: weights, activations and cache entries, encoded and decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops import block_quantize_torch as torch_ops
from tiercel.quant import QuantTensor
from tiercel.quant_types import FP4_GROUPS, INDEX_GROUP, KV_GROUP, Layout, QuantType

MAX_EXACT_SPAN = 18  # powers of two that E4M3 holds, 2^-9 to 2^8
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def block_quantize(
    weight: Tensor,
    qtype: QuantType,
    *,
    block: tuple[int, int] = (128, 128),
    has_e8m0: bool = True,
) -> QuantTensor:
    """Encode weights in a block format.

    Scales: FP8 max(amax, 1e-4) / 448, raised to a power of two for E8M0; MXFP4
    2^ceil(log2(amax / 6)); NVFP4 amax of the matrix / 2688, then E4M3 of the group's amax, at
    least 2^-9. Values round to the nearest, ties to the even code, and saturate.

    Args:
        weight: (..., out, in), float32, bfloat16 or float16, on any device, with any strides.
        qtype: FP8_BLOCK, MXFP4 or NVFP4.
        block: FP8: rows and columns of a block.
        has_e8m0: FP8: scales are E8M0 bytes; otherwise float32.

    Returns:
        Layout BLOCKS with contiguous planes on the device of `weight`.

    Raises:
        ArgumentError: another type, fewer than two dimensions, another dtype, FP4 columns that are
            no multiple of the group, or a block below 1.

    Sources: "OCP Microscaling Formats (MX) Specification" 1.0; NVIDIA's description of NVFP4; the
    inference code published with DeepSeek-V4.
    """
    if weight.dim() < 2 or weight.dtype not in _FLOATS:
        raise ArgumentError(
            f"block_quantize: weight is {tuple(weight.shape)} {weight.dtype}.",
            hint="Pass (..., out, in) in float32, bfloat16 or float16.",
        )
    shape = tuple(weight.shape)
    if qtype is QuantType.FP8_BLOCK:
        if min(block) < 1:
            raise ArgumentError(f"block_quantize: block is {block}.", hint="Pass sizes >= 1.")
        q, scale = torch_ops.quantize_fp8(weight, block, has_e8m0)
        return QuantTensor(qtype, Layout.BLOCKS, shape, {"q": q, "scale": scale}, block)
    if qtype not in FP4_GROUPS:
        raise ArgumentError(
            f"block_quantize: {qtype.name} is no block format.",
            hint="Use FP8_BLOCK, MXFP4 or NVFP4.",
        )
    group = FP4_GROUPS[qtype]
    if weight.shape[-1] % group:
        raise ArgumentError(
            f"block_quantize: {weight.shape[-1]} columns are not whole groups of {qtype.name}.",
            hint=f"Pass a multiple of {group}.",
        )
    if weight.numel() == 0:
        raise ArgumentError(
            f"block_quantize: weight is empty, {tuple(weight.shape)}.",
            hint="Pass at least one row and one group of columns.",
        )
    if qtype is QuantType.MXFP4:
        q, scale = torch_ops.quantize_mxfp4(weight)
        return QuantTensor(qtype, Layout.BLOCKS, shape, {"q": q, "scale": scale})
    q, scale, total = torch_ops.quantize_nvfp4(weight)
    planes = {"q": q, "scale": scale, "global_scale": total}
    return QuantTensor(qtype, Layout.BLOCKS, shape, planes)


def mxfp4_span(blocks: QuantTensor) -> Tensor:
    """Powers of two from the least to the largest scale in use of each MXFP4 matrix.

    A scale is in use if its group holds a value other than zero.

    Args:
        blocks: MXFP4 in layout BLOCKS, a matrix or a stack.

    Returns:
        (...) int32, the leading dimensions: 1 for equal scales, 0 for a matrix of zeros.

    Raises:
        ArgumentError: another format.
    """
    _check_mxfp4("mxfp4_span", blocks)
    exponents, is_used = torch_ops.mxfp4_exponents(blocks.planes["q"], blocks.planes["scale"])
    top = torch.where(is_used, exponents, -256).amax(dim=(-2, -1))
    bottom = torch.where(is_used, exponents, 256).amin(dim=(-2, -1))
    return (top - bottom + 1).clamp(min=0)


def mxfp4_to_nvfp4(blocks: QuantTensor) -> QuantTensor:
    """Rewrite MXFP4 weights as NVFP4 with the same nibbles and exactly the same values.

    The largest scale of a matrix in use becomes 2^8, the largest power of two of E4M3; each scale
    is written twice. Groups of zeros alone take any scale. It reads the device once: an op for
    conversion, not for a step.

    Args:
        blocks: MXFP4 in layout BLOCKS, a matrix or a stack.

    Returns:
        NVFP4 with a global scale of 2^-G per matrix; `q` is shared.

    Raises:
        ArgumentError: another format, or scales in use of a matrix that span more than
            `MAX_EXACT_SPAN` powers of two.

    Source: E4M3 holds the powers 2^-9 to 2^8.
    """
    _check_mxfp4("mxfp4_to_nvfp4", blocks)
    q = blocks.planes["q"]
    exponents, is_used = torch_ops.mxfp4_exponents(q, blocks.planes["scale"])
    top = torch.where(is_used, exponents, -126).amax(dim=(-2, -1))
    shifted = exponents - top[..., None, None] + 8
    if bool((is_used & (shifted < -9)).any()):
        raise ArgumentError(
            f"mxfp4_to_nvfp4: the scales in use span more than {MAX_EXACT_SPAN} powers of two.",
            hint="Keep this tensor in MXFP4, or round it by mxfp4_to_nvfp4_rounded.",
        )
    scale = torch.exp2(shifted.clamp(-9, 8).float()).to(torch.float8_e4m3fn)
    doubled = torch_ops.spread(scale.view(torch.uint8), 2, -1, 2 * scale.shape[-1])
    return _nvfp4(blocks.shape, q, doubled, top)


def mxfp4_to_nvfp4_rounded(blocks: QuantTensor) -> QuantTensor:
    """Rewrite MXFP4 weights of any range as NVFP4 with the least squared error.

    Only groups whose scale E4M3 does not hold get other nibbles. The largest groups are never
    rounded, since an error there exceeds all that the small ones can lose: the global scale is
    lowered as far as nibbles of the largest groups can be doubled (6 is the largest value) to
    make up for it. Groups below the range take the least scale, 2^-9, and round.

    Args:
        blocks: MXFP4 in layout BLOCKS, a matrix or a stack.

    Returns:
        NVFP4 with a global scale of 2^-G per matrix.

    Raises:
        ArgumentError: another format.

    Source: E4M3 holds the powers 2^-9 to 2^8; a test tries every scale.
    """
    _check_mxfp4("mxfp4_to_nvfp4_rounded", blocks)
    q = blocks.planes["q"]
    exponents, _ = torch_ops.mxfp4_exponents(q, blocks.planes["scale"])
    codes = torch_ops.groups(torch_ops.unpack_nibbles(q), 16)
    exponents = torch_ops.spread(exponents, 2, -1, codes.shape[-2])
    largest = (codes & 7).amax(-1)
    doublings = torch_ops.e2m1_doublings(largest)
    top = torch.where(largest > 0, exponents - doublings, -126).amax(dim=(-2, -1))
    shifted = exponents - top[..., None, None] + 8
    power = shifted.clamp(-9, 8)
    # Of zeros alone `shifted` has no bounds; 6 * 2^-16 rounds to zero as anything below does.
    factor = torch.exp2((shifted - power).clamp(-16, 3).float())
    rounded = torch_ops.e2m1_codes(torch_ops.e2m1_values(codes) * factor.unsqueeze(-1))
    scale = torch.exp2(power.float()).to(torch.float8_e4m3fn).view(torch.uint8)
    return _nvfp4(blocks.shape, torch_ops.pack_nibbles(rounded.flatten(-2)), scale, top)


def _check_mxfp4(name: str, blocks: QuantTensor) -> None:
    if (blocks.qtype, blocks.layout) != (QuantType.MXFP4, Layout.BLOCKS):
        raise ArgumentError(
            f"{name}: the weights are {blocks.qtype.name} in layout {blocks.layout.name}.",
            hint="Pass MXFP4 in layout BLOCKS.",
        )
    blocks.check(name)


def _nvfp4(shape: tuple[int, ...], q: Tensor, scale: Tensor, top: Tensor) -> QuantTensor:
    """NVFP4 of E4M3 scale bytes, whose 2^8 stands for 2^top."""
    planes = {
        "q": q,
        "scale": scale.contiguous().view(torch.float8_e4m3fn),
        "global_scale": torch.exp2((top - 8).float()),
    }
    return QuantTensor(QuantType.NVFP4, Layout.BLOCKS, shape, planes)


def e2m1_encode(x: Tensor) -> Tensor:
    """Round to E2M1: (...) float to (...) uint8 codes 0..15, ties to the even code.

    Values beyond 6 saturate, the sign of zero stays, NaN gives code 0. Source: OCP MX 1.0.
    """
    return torch_ops.e2m1_codes(x.float())


def e2m1_decode(codes: Tensor) -> Tensor:
    """Values of E2M1 codes: (...) uint8 0..15 to (...) float32. Source: OCP MX 1.0."""
    return torch_ops.e2m1_values(codes)


def round_fp8_g128(x: Tensor) -> Tensor:
    """Round activations to E4M3 with a power-of-two scale per 128 channels, and decode.

    Args:
        x: (..., n) float; a last group below 128 channels has its own scale.

    Returns:
        (..., n), dtype of x.

    Source: the inference code published with DeepSeek-V4, scale 2^ceil(log2(max(amax, 1e-4)/448)).
    """
    return torch_ops.round_fp8(x, 128).to(x.dtype)


def round_fp4_g32(x: Tensor) -> Tensor:
    """Round activations to E2M1 with a power-of-two scale per 32 channels, and decode.

    Args:
        x: (..., n) float; a last group below 32 channels has its own scale.

    Returns:
        (..., n), dtype of x.

    Source: the inference code published with DeepSeek-V4, scale 2^ceil(log2(amax / 6)).
    """
    return torch_ops.round_fp4(x, INDEX_GROUP).to(x.dtype)


def round_kv_entries(x: Tensor, rotary_dim: int) -> Tensor:
    """Round key-value vectors as entries round them, where they rest as floats.

    Args:
        x: (..., head_dim) float, the last `rotary_dim` channels rotated: these stay as they are.
        rotary_dim: channels that are not rounded, >= 0.

    Returns:
        (..., head_dim), dtype of x; a last group below 64 channels has its own scale.

    Source: as `encode_kv_entries`; there the rotated channels are in bfloat16 throughout.
    """
    nope = x.shape[-1] - rotary_dim
    rounded = torch_ops.round_fp8(x[..., :nope], KV_GROUP).to(x.dtype)
    return torch.cat((rounded, x[..., nope:]), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last dimension by the normalised Walsh-Hadamard matrix.

    Args:
        x: (..., n) float, n a power of two.

    Returns:
        (..., n) float32; applied twice it gives x back.

    Raises:
        ArgumentError: n is not a power of two.

    Source: the fast transform; natural (Hadamard) order, factor n^-0.5.
    """
    size = x.shape[-1]
    if size < 1 or size & (size - 1):
        raise ArgumentError(f"hadamard: {size} channels.", hint="Pass a power of two.")
    return torch_ops.hadamard_rotate(x)


def encode_kv_entries(x: Tensor, rotary_dim: int) -> Tensor:
    """Encode key-value vectors as cache entries, 584 bytes for 512 channels of which 64 rotate.

        0                    head_dim - rotary_dim channels in E4M3
        head_dim - rotary    rotary_dim channels in bfloat16, little-endian
        head_dim + rotary    an E8M0 scale per 64 E4M3 channels, zero padded to a multiple of 8

    Args:
        x: (..., head_dim) float, the last `rotary_dim` channels rotated.
        rotary_dim: channels that stay bfloat16; the others must be whole groups of 64.

    Returns:
        (..., bytes) uint8, contiguous.

    Raises:
        ArgumentError: the channels are not whole groups.

    Source: the cache of the inference code published with DeepSeek-V4; FlashMLA.
    """
    nope = x.shape[-1] - rotary_dim
    if nope < KV_GROUP or nope % KV_GROUP or rotary_dim < 0:
        raise ArgumentError(
            f"encode_kv_entries: {x.shape[-1]} channels, {rotary_dim} of them rotated.",
            hint="The channels that do not rotate must be a multiple of 64.",
        )
    return torch_ops.encode_kv(x, rotary_dim)


def decode_kv_entries(entries: Tensor, rotary_dim: int, scales: Tensor | None = None) -> Tensor:
    """Decode cache entries; see `encode_kv_entries` for the bytes.

    Args:
        entries: (..., bytes) uint8, may be strided; with `scales`, without the scale bytes.
        rotary_dim: channels in bfloat16.
        scales: (..., scale bytes) uint8, where a page keeps them in a part of their own.

    Returns:
        (..., head_dim) float32, exact.

    Raises:
        ArgumentError: a dtype other than uint8, or a number of bytes that no entry has.
    """
    if entries.dtype != torch.uint8:
        raise ArgumentError(f"decode_kv_entries: entries are {entries.dtype}.", hint="Pass uint8.")
    if scales is None:
        # 64 channels and their scale byte, in full scale parts of 8: solve for the channels.
        size = entries.shape[-1] - 2 * rotary_dim
        nope = next((n for n in range(64, size, 64) if n + -(-n // 512) * 8 == size), 0)
        entries, scales = (
            entries[..., : nope + 2 * rotary_dim],
            entries[..., nope + 2 * rotary_dim :],
        )
    nope = entries.shape[-1] - 2 * rotary_dim
    if nope < 64 or nope % 64 or scales.shape[-1] < nope // 64:
        raise ArgumentError(
            f"decode_kv_entries: {tuple(entries.shape)} entries, {tuple(scales.shape)} scales, "
            f"rotary_dim {rotary_dim}.",
            hint="An entry has 64 k + 2 * rotary_dim data bytes and at least k scale bytes.",
        )
    return torch_ops.decode_kv(entries, scales, rotary_dim)


def encode_index_keys(x: Tensor) -> Tensor:
    """Encode rotated index keys, 68 bytes for 128 channels: packed E2M1, then E8M0 per 32.

    Args:
        x: (..., n) float after `hadamard`, n a multiple of 32.

    Returns:
        (..., n / 2 + n / 32) uint8, contiguous.

    Raises:
        ArgumentError: n is no multiple of 32.

    Source: the indexer of the inference code published with DeepSeek-V4.
    """
    if x.shape[-1] < 32 or x.shape[-1] % 32:
        raise ArgumentError(
            f"encode_index_keys: {x.shape[-1]} channels.", hint="Pass a multiple of 32."
        )
    return torch_ops.encode_index(x)


def decode_index_keys(keys: Tensor, scales: Tensor | None = None) -> Tensor:
    """Decode index keys to the rotated vectors; see `encode_index_keys` for the bytes.

    Args:
        keys: (..., 17 k) uint8; with `scales`, (..., 16 k).
        scales: (..., k) uint8, where a page keeps them in a part of their own.

    Returns:
        (..., 32 k) float32, exact.

    Raises:
        ArgumentError: a dtype other than uint8, or sizes that disagree.
    """
    if scales is None and keys.shape[-1] % 17 == 0:
        num_groups = keys.shape[-1] // 17
        keys, scales = keys[..., : 16 * num_groups], keys[..., 16 * num_groups :]
    if keys.dtype != torch.uint8 or scales is None or keys.shape[-1] != 16 * scales.shape[-1]:
        raise ArgumentError(
            f"decode_index_keys: keys are {tuple(keys.shape)} {keys.dtype}.",
            hint="Pass uint8, 16 bytes and one scale byte per 32 channels.",
        )
    return torch_ops.dequantize_fp4(keys, scales)


def swizzle_scales(scale: Tensor) -> Tensor:
    """Scale bytes in the tile order of Blackwell's block-scaled tensor cores.

    Rows pad to 128 and columns to 4; byte (r, c) of a 512-byte tile goes to
    (r % 32) * 16 + (r // 32) * 4 + c, tiles row-major.

    Args:
        scale: (rows, cols) of a one-byte dtype.

    Returns:
        (ceil(rows / 128) * ceil(cols / 4) * 512,) uint8, padding zero.

    Raises:
        ArgumentError: not two dimensions, or elements of more than a byte.

    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    if scale.dim() != 2 or scale.element_size() != 1:
        raise ArgumentError(
            f"swizzle_scales: scale is {tuple(scale.shape)} {scale.dtype}.",
            hint="Pass (rows, cols) of a one-byte dtype.",
        )
    return torch_ops.swizzle(scale.contiguous().view(torch.uint8))
