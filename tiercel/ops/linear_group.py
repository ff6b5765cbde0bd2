"""Products of up to 8 tokens with matrices that read the same x, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel import env
from tiercel.errors import ArgumentError
from tiercel.kernels.block import linear_group as kernel
from tiercel.kernels.block.linear_group import GroupInput, GroupPlanes
from tiercel.kernels.block.q8_planes import Q8Planes
from tiercel.kernels.packed.packed_matvec import device_limits
from tiercel.ops import linear_group_torch as torch_ops
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

__all__ = [
    "MAX_MATRICES",
    "MAX_TOKENS",
    "GroupMatrix",
    "GroupWeight",
    "Q8Planes",
    "device_refusal",
    "input_refusal",
    "linear_group",
    "matrix_refusal",
    "rotation_refusal",
]

MAX_TOKENS, MAX_MATRICES = kernel.MAX_TOKENS, kernel.MAX_MATRICES
_OUT_DTYPES = (torch.bfloat16, torch.float32)

GroupWeight = Tensor | QuantTensor | Q8Planes


@dataclass(frozen=True, slots=True)
class GroupMatrix:
    """One matrix of a group.

    Attributes:
        weight: (rows, in) bfloat16, FP8_BLOCK in layout BLOCKS, or planes of Q8_0.
        num_groups: groups of rows, each with inputs of its own.
        is_pair: the rows of gate, then those of up; the result is their clamped SwiGLU.
        out_dtype: bfloat16 or float32.
        addend: (tokens, rows) float32 that the product is added to before it is rounded; None
            for none.
        out: (tokens, rows) for the result, whose rows may be strided; None for a new tensor.
    """

    weight: GroupWeight
    num_groups: int = 1
    is_pair: bool = False
    out_dtype: torch.dtype = torch.bfloat16
    addend: Tensor | None = None
    out: Tensor | None = None

    @property
    def out_rows(self) -> int:
        """Columns of the result."""
        return self.weight.shape[0] // (2 if self.is_pair else 1)


def device_refusal(device: torch.device) -> str:
    """Why no group is multiplied in one launch on a device; "" where it may be."""
    if device.type != "cuda":
        return f"there is no kernel on {device.type}"
    if not env.has_linear_group():
        return "TIERCEL_LINEAR_GROUP=0"
    if torch.cuda.get_device_capability(device) < kernel.CAPABILITY:
        return "the device has no products of bfloat16"
    return ""


def input_refusal(x: Tensor) -> str:
    """Why the kernel does not take an x on any device; "" if it does."""
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        return f"x is {x.dtype} in {x.dim()} dimensions"
    if x.shape[0] > MAX_TOKENS:
        return f"{x.shape[0]} tokens are more than {MAX_TOKENS}"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "the rows of x do not begin at multiples of 16 bytes"
    return ""


def matrix_refusal(matrix: GroupMatrix) -> str:
    """Why the kernel does not take a matrix on any device; "" if it does."""
    weight, rows, groups = matrix.weight, matrix.out_rows, matrix.num_groups
    reason = _format_refusal(weight)
    if reason:
        return reason
    values, scale = _values(weight), _scales(weight)
    columns, unit = weight.shape[1], kernel.unit_columns(values.dtype)
    whole = (
        groups >= 1
        and rows % groups == 0
        and (groups == 1 or rows // groups % kernel.GROUP_ROWS == 0)
    )
    reasons = (
        (columns % unit != 0 or not columns, f"{columns} columns are no multiple of {unit}"),
        (not rows, "there are no rows"),
        (
            not kernel.fits(columns, MAX_TOKENS),
            f"{columns} columns of 8 tokens do not fit in shared memory",
        ),
        (not whole, f"{rows} rows are not {groups} groups of whole tiles"),
        (
            matrix.is_pair and (groups > 1 or weight.shape[0] % 2 != 0),
            f"{weight.shape[0]} rows in {groups} groups are no gate and up",
        ),
        (not _has_rows_at(values, 16), "the rows of the weights do not begin at 16 bytes each"),
        (scale is not None and scale.stride(1) != 1, "gaps between scales"),
        (
            isinstance(weight, Q8Planes) and not _has_rows_at(weight.scale, 8),
            "the rows of the scales do not begin at 8 bytes each",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def rotation_refusal(head_dim: int, table: Tensor) -> str:
    """Why the kernel does not rotate some heads; "" if it does."""
    width = 2 * table.shape[2]
    if head_dim % 8 or width % 8:  # a lane rotates 8 channels of one head, all or none
        return f"{width} rotated channels of {head_dim} are no multiples of 8"
    return ""


def _format_refusal(weight: GroupWeight) -> str:
    if isinstance(weight, Q8Planes):
        return ""
    if isinstance(weight, Tensor):
        return "" if weight.dtype == torch.bfloat16 else f"the weights are {weight.dtype}"
    is_fp8 = weight.qtype is QuantType.FP8_BLOCK and weight.layout is Layout.BLOCKS
    if not is_fp8 or len(weight.shape) != 2:
        return f"{weight.qtype.name} {weight.shape} is no matrix in FP8_BLOCK or Q8_0"
    if weight.block[1] % kernel.UNIT_BYTES:
        return f"blocks of {weight.block[1]} columns are no multiple of {kernel.UNIT_BYTES}"
    return ""


def _values(weight: GroupWeight) -> Tensor:
    if isinstance(weight, QuantTensor):
        return weight.planes["q"]
    return weight.q if isinstance(weight, Q8Planes) else weight


def _scales(weight: GroupWeight) -> Tensor | None:
    if isinstance(weight, QuantTensor):
        return weight.planes["scale"]
    return weight.scale if isinstance(weight, Q8Planes) else None


def _has_rows_at(plane: Tensor, num_bytes: int) -> bool:
    """Whether the rows of a plane begin at multiples of some bytes, without gaps in them."""
    row_bytes = plane.stride(0) * plane.element_size()
    return plane.stride(1) == 1 and row_bytes % num_bytes == 0 == plane.data_ptr() % num_bytes


def linear_group(
    x: Tensor,
    matrices: Sequence[GroupMatrix],
    *,
    norm: tuple[Tensor, float] | None = None,
    rotation: tuple[Tensor, Tensor, int] | None = None,
    limit: float | None = None,
) -> list[Tensor]:
    """Multiply x by several matrices, in one launch on a GPU.

    Args:
        x: (tokens, groups * in) bfloat16, at most 8 tokens; rows may be strided.
        matrices: 1 to 8, of which `matrix_refusal` refuses none, with equal numbers of columns.
        norm: weight (in,) float32 and eps of an RMSNorm that x passes first; it is rounded to
            bfloat16. None for none.
        rotation: positions (tokens,) int32 or int64, table (max_positions, 2, half) float32 and
            channels of a head: the inverse rotation of `latent_rope` that x passes first, likewise.
            Not together with a norm.
        limit: of the clamped SwiGLU of pairs, > 0; None for no clamp.

    Returns:
        (tokens, rows) of each matrix. Sums are float32, rounded once; gate and up are not rounded
        in between. A token's bits depend on no other token. NaN among E4M3 counts as 480 on a GPU.

    Raises:
        ArgumentError: x or a matrix is not one that the kernel takes, or sizes disagree.
    """
    _check(x, matrices, norm, rotation, limit)
    given = _given(norm, rotation, limit)
    outs = [_make_out(x, matrix) for matrix in matrices]
    if not x.is_cuda:
        torch_ops.multiply(x, matrices, outs, given)
        return outs
    planes = [_planes(matrix, out) for matrix, out in zip(matrices, outs, strict=True)]
    num_sms = device_limits(x.device).num_sms
    config = kernel.select_linear_group(
        matrices[0].weight.shape[1],
        [one.num_tiles for one in planes],
        x.shape[0],
        kind_of_input=given.kind_for(planes),
        has_q8=any(isinstance(matrix.weight, Q8Planes) for matrix in matrices),
        num_sms=num_sms,
    )
    kernel.launch_linear_group(x, planes, given, config, num_sms)
    return outs


def _given(
    norm: tuple[Tensor, float] | None,
    rotation: tuple[Tensor, Tensor, int] | None,
    limit: float | None,
) -> GroupInput:
    positions, table, head_dim = rotation or (None, None, 1)
    turned = None if positions is None or table is None else (positions, table.contiguous())
    return GroupInput(norm, turned, head_dim, limit)


def _make_out(x: Tensor, matrix: GroupMatrix) -> Tensor:
    if matrix.out is not None:
        return matrix.out
    shape = (x.shape[0], matrix.out_rows)
    return torch.empty(shape, dtype=matrix.out_dtype, device=x.device)


def _planes(matrix: GroupMatrix, out: Tensor) -> GroupPlanes:
    weight = matrix.weight
    block = weight.block if isinstance(weight, QuantTensor) else (1, 1)
    return GroupPlanes(
        _values(weight),
        out,
        _scales(weight),
        block,
        matrix.num_groups,
        matrix.is_pair,
        matrix.addend,
    )


def _check(
    x: Tensor,
    matrices: Sequence[GroupMatrix],
    norm: tuple[Tensor, float] | None,
    rotation: tuple[Tensor, Tensor, int] | None,
    limit: float | None,
) -> None:
    if not 1 <= len(matrices) <= MAX_MATRICES:
        raise ArgumentError(
            f"linear_group: {len(matrices)} matrices.", hint=f"Pass 1 to {MAX_MATRICES}."
        )
    reasons = (input_refusal(x), *(matrix_refusal(matrix) for matrix in matrices))
    reason = next((reason for reason in reasons if reason), "")
    if reason:
        raise ArgumentError(f"linear_group: {reason}.", hint="Multiply by each matrix with linear.")
    if limit is not None and not limit > 0:
        raise ArgumentError(f"linear_group: limit={limit}.", hint="Pass a positive one, or None.")
    columns = matrices[0].weight.shape[-1]
    for matrix in matrices:
        shape = (x.shape[0], matrix.out_rows)
        out, addend = matrix.out, matrix.addend
        dtype = matrix.out_dtype if out is None else out.dtype
        sound = (
            matrix.weight.shape[-1] == columns
            and x.shape[1] == matrix.num_groups * columns
            and dtype in _OUT_DTYPES
            and (out is None or (tuple(out.shape) == shape and out.stride(1) == 1))
            and (addend is None or _is_addend(addend, shape))
        )
        if not sound:
            raise ArgumentError(
                f"linear_group: x is {tuple(x.shape)}, a matrix {tuple(matrix.weight.shape)} in "
                f"{matrix.num_groups} groups, the first has {columns} columns, the result is "
                f"{shape} {dtype}.",
                hint="Pass equal columns, and out and addend of the result's shape.",
            )
    if norm is not None and (
        rotation is not None
        or norm[0].shape != (columns,)
        or norm[0].dtype != torch.float32
        or x.shape[1] != columns
    ):
        raise ArgumentError(
            f"linear_group: the norm's weight is {tuple(norm[0].shape)} {norm[0].dtype}, x "
            f"{tuple(x.shape)}.",
            hint=f"Pass ({columns},) torch.float32, no groups and no rotation.",
        )
    if rotation is not None:
        _check_rotation(x, *rotation)


def _is_addend(addend: Tensor, shape: tuple[int, int]) -> bool:
    is_plain = addend.dtype == torch.float32 and addend.stride(1) == 1
    return is_plain and tuple(addend.shape) == shape


def _check_rotation(x: Tensor, positions: Tensor, table: Tensor, head_dim: int) -> None:
    width = 2 * table.shape[2] if table.dim() == 3 else 0
    sound = (
        positions.shape == x.shape[:1]
        and positions.dtype in (torch.int32, torch.int64)
        and positions.is_contiguous()
        and table.dtype == torch.float32
        and head_dim > 0
        and x.shape[1] % head_dim == 0
        and 0 < width <= head_dim
        and not rotation_refusal(head_dim, table)
    )
    if not sound:
        raise ArgumentError(
            f"linear_group: positions are {tuple(positions.shape)} {positions.dtype}, the table "
            f"{tuple(table.shape)} {table.dtype}, heads of {head_dim} in x {tuple(x.shape)}.",
            hint="Pass (tokens,) of integers, (positions, 2, half) torch.float32 and whole heads, "
            "of which and of whose rotated channels 8 is a factor.",
        )
