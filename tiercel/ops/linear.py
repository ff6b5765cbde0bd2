"""Linear projection, x @ W^T, with W prepared once for its device: its form, and the kernel for it.

On a CPU the native library multiplies matrices of any type (`kernels/native/`); without it a
quantised matrix stays packed in bfloat16 (`ops/linear_torch.py`). On a GPU in float16
quantised ones stay packed: for up to 16 rows (`ops/packed_matvec.py`), most types for some more
on Hopper (`ops/packed_gemm.py`) or with x of 8 bits (`ops/packed_mmq.py`), and beside a dense copy
for many rows where there is memory for one. Block formats stay as stored: a GPU reads them so for
some rows (`ops/block_matvec.py`); otherwise they are decoded in each product. Everything else rests
dense in the dtype of the activations. Matrices that share an input are prepared together and
multiplied in one call where their forms agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from tiercel.env import (
    has_fused_gemm,
    has_int8_activations,
    has_prefill_gemm,
    has_prefill_mmq,
    has_q4k_soa,
    is_exact,
)
from tiercel.errors import ArgumentError
from tiercel.kernels.block.q8_planes import Q8Planes
from tiercel.kernels.native.abi import GROUP
from tiercel.kernels.native.matrices import NativeMatrix, launch_linear, lay_out
from tiercel.kernels.runtime.rtc import has_dependent_launch
from tiercel.ops import block_matvec as block_op
from tiercel.ops import linear_group as group_op
from tiercel.ops import linear_torch
from tiercel.ops.block_matvec import block_matvec
from tiercel.ops.dequantize import dequantize
from tiercel.ops.linear_torch import Int4Planes
from tiercel.ops.packed_gemm import (
    TokenImage,
    column_order,
    has_packed_gemm,
    is_read,
    load_packed_gemm,
    packed_gemm,
)
from tiercel.ops.packed_matvec import (
    MAX_TOKENS,
    PackedWeight,
    packed_matvec,
    prepare_packed,
    weight_exponent,
)
from tiercel.ops.packed_mmq import has_packed_mmq, load_packed_mmq, packed_mmq
from tiercel.ops.packed_repack import join_step
from tiercel.quant import QuantTensor
from tiercel.quant_types import PLANES, Layout, QuantType
from tiercel.resting import NATIVE_FORMS, STORED, head_dtype, keeps_q8_planes, select_form

Segment = Tensor | Int4Planes | PackedWeight | QuantTensor | NativeMatrix | Q8Planes

# From here on a product of 16-bit weights that the processor does not multiply natively is faster
# widened in slices than as rows of dot products: float16 42 against 143 GFLOP/s (2 cores, torch
# 2.13), equal at 3 rows; bfloat16 with AVX2 docs/notes/cpu_decode.md.
WIDE_ROWS = 4
MAX_ROWS = 2**31 - 1
EXACT_ROWS = 4  # rows of a product from which on a CPU treats each alike (float32)
# Rows up to which packed weights go 16 at a time where there is no dense copy. Qwen3-8B's gate and
# up at 64 rows: 97 us, 125 for decoding and cuBLAS (H200, docs/notes/packed_products.md).
MOST_PACKED_ROWS = 64
# Rows up to which the fused product beats cuBLAS on a dense copy (64 rows of Qwen3-8B's gate and up
# 36 against 52 us, o 11 and 11; 128 rows 56 and 55, 15 and 14), and decoding for the call.
FUSED_ROWS = {True: 96, False: 256}  # H200, docs/notes/packed_products.md
# Types whose decoding is longer, beside a copy: 96 rows of 24,576 x 4,096 60 and 57 us, cuBLAS 54.
FUSED_ROWS_OF = {QuantType.Q5_K: 64, QuantType.Q8_0: 64}
# Weights widened together: 4 MB of float32 stay in the cache. 64 rows through 40,000 x 2,048 take
# 400 to 500 ms, 620 to 770 with 8,192 output rows together (AVX2 and AVX512, torch 2.13).
WIDE_WEIGHTS = 1 << 20


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix (out_features, in_features), ready to multiply.

    Attributes:
        segments: consecutive output rows, each dense (out, in), the native library's, planes of a
            CPU, packed, or as stored.
        shape: (out_features, in_features) of all segments.
        dense: (out_features, in_features) of all segments beside packed weights; None without.
        reader_rows: rows up to which packed weights are read 16 rows at a time.
        fused_rows: rows up to which beyond that they are decoded within the product.
        mmq_rows: rows up to which beyond both x is rounded to 8 bits.
        reads_blocks: whether block formats are read as stored for some rows.
        parts: of x, each rounded to 8 bits in groups of 32, for native matrices of blocks: 0 for
            floats, 1, or 2 where the weight is `wide`.
    """

    segments: tuple[Segment, ...]
    shape: tuple[int, int]
    dense: Tensor | None = None
    reader_rows: int = MAX_TOKENS
    fused_rows: int = 0
    mmq_rows: int = 0
    reads_blocks: bool = False
    parts: int = 0


class PathRows(NamedTuple):
    """The limits of `LinearWeight`: rows up to which packed weights take each path."""

    reader: int
    fused: int
    mmq: int


def select_rows(*, has_copy: bool, has_fused: bool, has_mmq: bool, uses_gemm: bool) -> PathRows:
    """Which path packed weights take; beyond all limits, the copy or decoded weights.

    From results/prefill_paths_h200.json. Decoding slice by slice, so that a product finds them in
    the cache, was slower or equal at every size; products with x of 8 bits are on request alone.

    Args:
        has_copy: whether there is a dense copy.
        has_fused: whether the fused product may be used and the device has it.
        has_mmq: whether products with x of 8 bits are requested and the device has them.
        uses_gemm: ``TIERCEL_PREFILL_GEMM``; without, everything goes 16 rows at a time.
    """
    if not uses_gemm:
        return PathRows(MAX_ROWS, 0, 0)
    if has_mmq:
        return PathRows(MAX_TOKENS, 0, MAX_ROWS)
    if has_fused:
        return PathRows(MAX_TOKENS, FUSED_ROWS[has_copy], 0)
    return PathRows(MAX_TOKENS if has_copy else MOST_PACKED_ROWS, 0, 0)


def prepare_linear(
    parts: Sequence[QuantTensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    wide: bool = False,
    dense_copies: bool = True,
    reads_q8: bool = False,
    resting: Sequence[QuantTensor] | None = None,
) -> LinearWeight:
    """Bring matrices with a common input to the device and into the form that `linear` reads.

    Args:
        parts: at least one, equal in_features; their output rows are end to end in the result.
        dtype: of the activations. Block formats are decoded to the dtype of x in each product.
        device: where the weights rest.
        wide: for float32 results (`linear(..., out_dtype=torch.float32)`): the weights stay dense,
            in float16 where the activations are 16 bits wide, or are packed weights.
        dense_copies: whether packed weights keep a dense copy for products of many rows; they have
            none beside block formats.
        reads_q8: whether Q8_0 on a GPU in bfloat16 rests in planes that a few tokens read, and
            dense copies beside them like packed weights.
        resting: the parts in layout STEP, where packed weights rest; None for planes of their own.

    Raises:
        ArgumentError: in_features differ, or a part is a stack.
    """
    in_features = _check_parts(parts)
    if wide:
        dtype = getattr(torch, head_dtype(_name(dtype), device.type))

    def form(part: QuantTensor) -> str:
        rows, columns = part.shape
        return select_form(part.qtype, (rows, columns), _name(dtype), device.type)

    shape = (sum(part.shape[0] for part in parts), in_features)
    if any(form(part) == "packed" for part in parts):
        out_dtype = torch.float32 if wide else dtype
        return _prepare_packed(
            parts, dtype, out_dtype, device, dense_copies=dense_copies, resting=resting
        )
    if reads_q8 and any(_is_q8(part, dtype, device) for part in parts):
        return _prepare_q8(parts, dtype, device, dense_copies=dense_copies)
    segments: list[Segment] = []
    for kind, members in groupby(parts, key=form):
        if kind == "dense":
            dense = [dequantize(part.to(device), dtype) for part in members]
            segments.append(dense[0] if len(dense) == 1 else torch.cat(dense))
        elif kind == "stored":
            segments.extend(join_rows([part.to(device) for part in members]))
        elif kind in NATIVE_FORMS:
            segments.extend(_native_matrix(part, keeps_rows=wide) for part in members)
        else:
            matrices = [(part.qtype.name, part.planes["data"]) for part in members]
            segments.append(linear_torch.pack_planes(matrices))
    reads_blocks = not block_op.device_refusal(device)
    parts_of_x = _parts_of_x(dtype, in_features, wide=wide)
    return LinearWeight(tuple(segments), shape, reads_blocks=reads_blocks, parts=parts_of_x)


def _check_parts(parts: Sequence[QuantTensor]) -> int:
    """The in_features of matrices with a common input."""
    if any(len(part.shape) != 2 for part in parts):
        raise ArgumentError(
            f"linear: parts have the shapes {[part.shape for part in parts]}.",
            hint="Pass matrices.",
        )
    in_features = parts[0].shape[1]
    if any(part.shape[1] != in_features for part in parts):
        raise ArgumentError(
            f"linear: parts have {[part.shape[1] for part in parts]} columns.",
            hint="Pass equal ones.",
        )
    return in_features


def rounds_activations(dtype: torch.dtype) -> bool:
    """Whether native products round activations to 8 bits: for 16-bit dtypes, unless forbidden."""
    return dtype != torch.float32 and has_int8_activations() and not is_exact()


def _parts_of_x(dtype: torch.dtype, in_features: int, *, wide: bool) -> int:
    """`LinearWeight.parts`: two for the head, whose logits show each error."""
    if not rounds_activations(dtype) or in_features % GROUP:
        return 0
    return 2 if wide else 1


def _native_matrix(part: QuantTensor, *, keeps_rows: bool) -> NativeMatrix:
    shape, data = (part.shape[0], part.shape[1]), part.planes["data"].contiguous()
    return lay_out(part.qtype.ggml_id, shape, data, keeps_rows=keeps_rows)


def join_rows(parts: Sequence[QuantTensor]) -> list[QuantTensor]:
    """Matrices of block formats, neighbours end to end in one where that changes no value.

    Those in FP8 with equal blocks and kinds of scales, if a border is that of a block, and those in
    MXFP4. NVFP4 has a scale for each matrix.
    """
    joined: list[QuantTensor] = []
    for _, members in groupby(parts, key=lambda part: (part.qtype, part.layout, part.block)):
        run: list[QuantTensor] = []
        for part in members:
            if run and not _continues(run[-1], part):
                joined.append(_cat(run))
                run = []
            run.append(part)
        joined.append(_cat(run))
    return joined


def _continues(part: QuantTensor, following: QuantTensor) -> bool:
    """Whether two matrices of one format and block can be one."""
    if part.layout is not Layout.BLOCKS:
        return False
    same = part.planes["scale"].dtype == following.planes["scale"].dtype
    is_whole = part.shape[0] % part.block[0] == 0
    return same and is_whole and part.qtype is not QuantType.NVFP4


def _cat(parts: Sequence[QuantTensor]) -> QuantTensor:
    if len(parts) == 1:
        return parts[0]
    planes = {}
    for name, plane in parts[0].planes.items():
        dtype = torch.uint8 if plane.dtype == torch.float8_e4m3fn else plane.dtype
        pieces = [part.planes[name].view(dtype) for part in parts]
        planes[name] = torch.cat(pieces).view(plane.dtype)
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    return replace(parts[0], shape=shape, planes=planes)


def _prepare_packed(
    parts: Sequence[QuantTensor],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    device: torch.device,
    *,
    dense_copies: bool,
    resting: Sequence[QuantTensor] | None = None,
) -> LinearWeight:
    """Parts on a GPU of which some stay packed; dense parts are views of the dense copy, if any."""
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    layout = _packed_layout(resting)
    is_dependent = has_dependent_launch(device)
    moved = [part.to(device) for part in parts]
    dense_copies = dense_copies and not any(part.qtype in STORED for part in parts)
    dense = torch.empty(shape, dtype=dtype, device=device) if dense_copies else None
    segments: list[Segment] = []
    row = 0
    pairs = zip(moved, resting or moved, strict=True)
    for qtype, members in groupby(pairs, key=lambda pair: pair[0].qtype):
        run, rests = zip(*members, strict=True)
        if qtype in STORED:
            segments.extend(join_rows(run))
            continue
        data = [part.planes["data"] for part in run]
        joined = data[0] if len(data) == 1 else torch.cat(data)
        whole = QuantTensor(qtype, Layout.FILE, (joined.shape[0], shape[1]), {"data": joined})
        rows = slice(row, row + joined.shape[0])
        row += joined.shape[0]
        if qtype in PLANES:
            rest = whole if resting is None else join_step(rests)
            exponent = weight_exponent(whole)
            segments.append(
                prepare_packed(
                    rest, layout, out_dtype, is_dependent=is_dependent, exponent=exponent
                )
            )
            if dense is not None:
                dense[rows] = dequantize(whole, dtype)
        elif dense is not None:
            dense[rows] = dequantize(whole, dtype)
            segments.append(dense[rows])
        else:
            segments.append(dequantize(whole, dtype))
    limits = _load_paths(segments, out_dtype, device, has_copy=dense is not None)
    reads_blocks = not block_op.device_refusal(device)
    return LinearWeight(tuple(segments), shape, dense, *limits, reads_blocks)


def _packed_layout(resting: Sequence[QuantTensor] | None) -> Layout:
    if resting is not None:
        return Layout.STEP
    return Layout.SOA if has_q4k_soa() else Layout.FILE


def _load_paths(
    segments: Sequence[Segment], out_dtype: torch.dtype, device: torch.device, *, has_copy: bool
) -> PathRows:
    """Load the kernels of packed segments, and say which serves how many rows."""
    packed = [segment for segment in segments if isinstance(segment, PackedWeight)]
    can_fuse = has_packed_gemm(device) and all(is_read(segment) for segment in packed)
    can_mmq = all(
        segment.tensor.layout is not Layout.STEP and has_packed_mmq(segment.tensor.qtype, device)
        for segment in packed
    )
    limits = select_rows(
        has_copy=has_copy,
        has_fused=has_fused_gemm() and can_fuse,
        has_mmq=has_prefill_mmq() and can_mmq,
        uses_gemm=has_prefill_gemm(),
    )
    if has_copy:
        most = [FUSED_ROWS_OF.get(segment.tensor.qtype, limits.fused) for segment in packed]
        limits = limits._replace(fused=min([limits.fused, *most]))
    for segment in packed:
        if limits.fused:
            load_packed_gemm(segment, out_dtype)
        if limits.mmq:
            load_packed_mmq(segment, out_dtype)
    return limits


def _is_q8(part: QuantTensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a matrix rests in planes of Q8_0."""
    is_read = keeps_q8_planes(part.qtype, part.shape, _name(dtype), device.type)
    return is_read and not group_op.device_refusal(device)


def _prepare_q8(
    parts: Sequence[QuantTensor], dtype: torch.dtype, device: torch.device, *, dense_copies: bool
) -> LinearWeight:
    """Parts on a GPU of which some rest in planes of Q8_0, beside a dense copy of all if any."""
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    has_copy = dense_copies and not any(part.qtype in STORED for part in parts)
    segments: list[Segment] = []
    copies: list[Tensor] = []
    for kind, members in groupby(
        parts, key=lambda p: (_is_q8(p, dtype, device), p.qtype in STORED)
    ):
        moved = [part.to(device) for part in members]
        if kind[0]:
            segments.append(Q8Planes.of_file(torch.cat([part.planes["data"] for part in moved])))
            copies += [dequantize(part, dtype) for part in moved] if has_copy else []
        elif kind[1]:
            segments.extend(join_rows(moved))
        else:
            copies.append(torch.cat([dequantize(part, dtype) for part in moved]))
            segments.append(copies[-1])
    dense = torch.cat(copies) if has_copy else None
    reads_blocks = not block_op.device_refusal(device)
    most = group_op.MAX_TOKENS
    return LinearWeight(tuple(segments), shape, dense, most, reads_blocks=reads_blocks)


def pick_rows(weight: LinearWeight, rows: Tensor) -> LinearWeight | None:
    """The matrix of some output rows, in their order; None where they rest packed alone.

    Args:
        weight: of any form.
        rows: (K,) int64, on its device.
    """
    dense = weight.segments[0] if len(weight.segments) == 1 else None
    if isinstance(dense, QuantTensor):
        shape = (rows.shape[0], weight.shape[1])
        return LinearWeight((dense.take(rows),), shape, reads_blocks=weight.reads_blocks)
    if isinstance(dense, NativeMatrix):
        picked = dense.take(rows)
        shape = (rows.shape[0], weight.shape[1])
        return None if picked is None else replace(weight, segments=(picked,), shape=shape)
    dense = dense if weight.dense is None else weight.dense
    if not isinstance(dense, Tensor):
        return None
    return LinearWeight((dense.index_select(0, rows),), (rows.shape[0], weight.shape[1]))


def image_orders(weight: LinearWeight, rows: int | None = None) -> tuple[int, ...]:
    """The orders of the images of x that `linear` reads, without a copy of x; () if it reads none.

    Args:
        weight: from `prepare_linear`.
        rows: of x; None for whether it reads them for any.
    """
    packed = [segment for segment in weight.segments if isinstance(segment, PackedWeight)]
    is_range = rows is None or weight.reader_rows < rows <= weight.fused_rows
    if not weight.fused_rows or not is_range or len(packed) < len(weight.segments):
        return ()
    return tuple(dict.fromkeys(map(column_order, packed)))


def linear(
    x: Tensor | TokenImage,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """X @ W^T + bias.

    Args:
        x: (rows, in_features) contiguous, the dtype the weight was prepared for; or images of it in
            `image_orders`.
        weight: from `prepare_linear`.
        bias: (out_features,), dtype of the result; None for none.
        out_dtype: float32 for the result of a weight prepared `wide`, unrounded but for fewer than
            `WIDE_ROWS` rows on a CPU, which pass through float16; None for the dtype of x.
        out: (rows, out_features) contiguous of that dtype, for the result; None for a new tensor.

    Returns:
        (rows, out_features). Sums are float32; the product is rounded once, a bias added after it.

    Raises:
        ArgumentError: the shapes disagree.
    """
    if len(x.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ArgumentError(
            f"linear: x is {tuple(x.shape)} but the weight has {weight.shape[1]} columns.",
            hint=f"Pass (rows, {weight.shape[1]}).",
        )
    out_dtype = out_dtype or (x.dtype if isinstance(x, Tensor) else torch.float16)
    if isinstance(x, TokenImage):
        result = _multiply_image(x, weight, out_dtype, out)
    elif all(isinstance(segment, NativeMatrix) for segment in weight.segments):
        result = _multiply_native(x, weight.segments, out_dtype, weight, out)
    elif weight.dense is not None and x.shape[0] > _most_packed(weight):
        result = _multiply_dense(x, weight.dense, out_dtype, out)
    elif len(weight.segments) == 1:
        result = _multiply(x, weight.segments[0], out_dtype, weight, out)
    else:
        result = _empty(x, weight.shape[0], out_dtype) if out is None else out
        row = 0
        for segment in weight.segments:
            rows = _num_rows(segment)
            columns = result[:, row : row + rows]
            if isinstance(segment, PackedWeight):
                _multiply_packed(x, segment, columns, weight)
            elif isinstance(segment, QuantTensor) and _reads_blocks(x, segment, weight):
                block_matvec(x, segment, out=columns, out_dtype=out_dtype)
            else:
                columns.copy_(_multiply(x, segment, out_dtype, weight))
            row += rows
    if out is not None and result is not out:
        result = out.copy_(result)
    return result if bias is None else result.add_(bias)


def _empty(x: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.empty((x.shape[0], columns), dtype=dtype, device=x.device)


def _most_packed(weight: LinearWeight) -> int:
    """Rows up to which packed segments are read."""
    return max(weight.reader_rows, weight.fused_rows, weight.mmq_rows)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _num_rows(segment: Segment) -> int:
    return segment.tensor.shape[0] if isinstance(segment, PackedWeight) else segment.shape[0]


def _multiply(
    x: Tensor,
    segment: Segment,
    out_dtype: torch.dtype,
    weight: LinearWeight,
    out: Tensor | None = None,
) -> Tensor:
    """X @ segment^T, in `out` where that is given and costs no copy."""
    if isinstance(segment, NativeMatrix):
        return _multiply_native(x, (segment,), out_dtype, weight)
    if isinstance(segment, Int4Planes | Q8Planes):
        return _multiply_planes(x, segment, out_dtype, out)
    if isinstance(segment, PackedWeight):
        out = _empty(x, segment.tensor.shape[0], out_dtype) if out is None else out
        _multiply_packed(x, segment, out, weight)
        return out
    if isinstance(segment, QuantTensor):
        if _reads_blocks(x, segment, weight):
            return block_matvec(x, segment, out=out, out_dtype=out_dtype)
        x, segment = _decoded(x, segment, out_dtype)
    if x.is_cuda:
        return _multiply_dense(x, segment, out_dtype, out)
    return _multiply_on_cpu(x, segment, out_dtype)


def _multiply_native(
    x: Tensor,
    segments: Sequence[Segment],
    out_dtype: torch.dtype,
    weight: LinearWeight,
    out: Tensor | None = None,
) -> Tensor:
    """X @ segments^T by the native library, in `out` where that is float32."""
    matrices = [segment for segment in segments if isinstance(segment, NativeMatrix)]
    columns = sum(matrix.shape[0] for matrix in matrices)
    result = out
    if result is None or result.dtype != torch.float32 or not result.is_contiguous():
        result = _empty(x, columns, torch.float32)
    launch_linear(x.float().contiguous(), matrices, result, weight.parts)
    return result.to(out_dtype)


def _multiply_planes(
    x: Tensor, planes: Int4Planes | Q8Planes, out_dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """X @ planes^T; by Q8_0 some rows 8 at a time as it rests, more by decoded weights."""
    if isinstance(planes, Int4Planes):
        return linear_torch.int4_matmul(x, planes)
    out = _empty(x, planes.shape[0], out_dtype) if out is None else out
    most = group_op.MAX_TOKENS
    pieces = list(zip(x.split(most), out.split(most), strict=True))
    is_read = x.shape[0] <= MOST_PACKED_ROWS and not group_op.device_refusal(x.device)
    if is_read and not any(group_op.input_refusal(few) for few, _ in pieces):
        for few, result in pieces:
            group_op.linear_group(few, [group_op.GroupMatrix(planes, out=result)])
        return out
    if x.is_cuda:
        return _multiply_dense(x, planes.dense(x.dtype), out_dtype, out)
    return out.copy_(_multiply_on_cpu(x, planes.dense(out_dtype), out_dtype))


def _multiply_on_cpu(x: Tensor, segment: Tensor, out_dtype: torch.dtype) -> Tensor:
    """X @ segment^T of dense weights."""
    if x.shape[0] >= WIDE_ROWS and _is_widened(segment.dtype):
        return _multiply_widened(x, segment).to(out_dtype)
    if out_dtype == segment.dtype:
        return _multiply_rows(x, segment)
    return torch.nn.functional.linear(x.to(segment.dtype), segment).to(out_dtype)


def _reads_blocks(x: Tensor, segment: QuantTensor, weight: LinearWeight) -> bool:
    """Whether a segment is multiplied as stored."""
    return (
        weight.reads_blocks
        and not block_op.shape_refusal(segment, x.dtype)
        and block_op.takes_tokens(segment, x.shape[0])
    )


def _decoded(x: Tensor, segment: QuantTensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """X, and weights that rest as stored decoded to its dtype.

    On a CPU both in the dtype of the result: a float32 result is not rounded to bfloat16.
    """
    x = x if x.is_cuda else x.to(out_dtype)
    return x, dequantize(segment, x.dtype)


def _is_widened(dtype: torch.dtype) -> bool:
    """Whether products of many rows by weights of a type are faster in float32 on this CPU."""
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not has_native_bfloat16())


def has_native_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16 that PyTorch uses."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _multiply_widened(x: Tensor, weight: Tensor) -> Tensor:
    """X @ weight^T in float32, a slice of output rows at a time."""
    wide_x = _pad_rows(x.float())
    slices = weight.split(max(1, WIDE_WEIGHTS // weight.shape[1]))
    products = [torch.nn.functional.linear(wide_x, rows.float()) for rows in slices]
    return torch.cat(products, dim=1)[: x.shape[0]]


def _multiply_dense(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """X @ weight^T of dense weights on a GPU, in `out` if that is given."""
    out = _empty(x, weight.shape[0], out_dtype) if out is None else out
    linear_torch.dense_matmul(x, weight, out)
    return out


def _multiply_image(
    x: TokenImage, weight: LinearWeight, out_dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    """The product with packed segments, whose results are end to end."""
    if out is None:
        device = next(iter(x.tensors.values())).device
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=device)
    first = 0
    for segment in weight.segments:
        assert isinstance(segment, PackedWeight)
        rows = segment.tensor.shape[0]
        packed_gemm(x, segment, out=out[:, first : first + rows])
        first += rows
    return out


def _multiply_packed(x: Tensor, segment: PackedWeight, out: Tensor, weight: LinearWeight) -> None:
    """Write X @ segment^T to columns of the result."""
    rows = x.shape[0]
    if rows <= weight.reader_rows:
        for first in range(0, rows, MAX_TOKENS):
            few = slice(first, first + MAX_TOKENS)
            packed_matvec(x[few], segment, out=out[few])
    elif rows <= weight.fused_rows:
        packed_gemm(x, segment, out=out)
    elif rows <= weight.mmq_rows:
        packed_mmq(x, segment, out=out)
    else:
        out.copy_(_multiply_dense(x, dequantize(segment.tensor, x.dtype), out.dtype))


def _multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """X @ weight^T on a CPU; of fewer than 4 rows each is a product of its own.

    Decoding is faster so.
    """
    if x.shape[0] < EXACT_ROWS:
        return torch.nn.functional.linear(x, weight)
    return torch.nn.functional.linear(_pad_rows(x), weight)[: x.shape[0]]


def _pad_rows(x: Tensor) -> Tensor:
    """Rows filled up to a multiple of 4, so that a row's bits do not depend on their number.

    PyTorch's product (MKL) takes rows in fours, and remaining rows in other orders of sums.
    """
    missing = -x.shape[0] % EXACT_ROWS
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
