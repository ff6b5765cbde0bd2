"""Linear layers that read the same x, in one launch where a kernel takes all of them.

Elsewhere (a CPU, more than 8 tokens, formats that the kernel does not read, rounded activations)
they are multiplied one after the other; `group_refusal` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.layers.linear import Linear
from tiercel.layers.norm import RMSNorm
from tiercel.ops import linear_group as op
from tiercel.ops.grouped_linear import grouped_linear
from tiercel.ops.latent_rope import latent_rope
from tiercel.ops.linear import LinearWeight
from tiercel.ops.linear_group import GroupMatrix, GroupWeight, Q8Planes, linear_group
from tiercel.ops.moe_experts import clamped_swiglu
from tiercel.quant import QuantTensor


@dataclass(frozen=True, slots=True)
class GateUp:
    """Gate and up of an expert, and the clamped SwiGLU of the two.

    Attributes:
        linear: the rows of gate, then those of up.
        limit: of the clamp; None for none.
    """

    linear: Linear
    limit: float | None

    def __call__(self, x: Tensor) -> Tensor:
        """(T, hidden) to (T, inter)."""
        gate, up = self.linear(x).chunk(2, dim=1)
        return clamped_swiglu(gate, up, self.limit)


def multiply_group(
    x: Tensor,
    parts: Sequence[Linear | GateUp],
    norm: RMSNorm | None = None,
    *,
    is_wide: bool = False,
) -> list[Tensor]:
    """What each part gives for x (T, in), which may pass a norm first.

    is_wide: whether one launch gives float32; parts one after the other give what they give.
    """
    if group_refusal(x, parts, norm):
        x = x if norm is None else norm(x)
        return [part(x) for part in parts]
    results: list[Tensor] = []
    matrices: list[GroupMatrix] = []
    linears = [part.linear if isinstance(part, GateUp) else part for part in parts]
    limit = None
    for part, linear in zip(parts, linears, strict=True):
        is_pair = isinstance(part, GateUp)
        limit = part.limit if isinstance(part, GateUp) else limit
        dtype = torch.float32 if is_wide else linear.out_dtype or x.dtype
        results.append(_empty(x, linear, dtype, is_pair=is_pair))
        matrices += _matrices(linear.weight, results[-1], is_pair=is_pair)
    given = None if norm is None else (norm.weight, norm.eps)
    linear_group(x, matrices, norm=given, limit=limit)
    return [linear.group.all_reduce(y) for linear, y in zip(linears, results, strict=True)]


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Groups of rotated heads, each multiplied by weights of its own; see ops/grouped_linear.py.

    Attributes:
        weight: (groups * out, heads * d / groups).
        num_groups: of heads.
        dense: the same weights for many tokens, in the dtype of x; None to take `weight`.
    """

    weight: GroupWeight
    num_groups: int
    dense: Tensor | None = None

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Undo the rotation of heads (T, heads, d), and multiply: (T, groups * out), dtype of x.

        rotation: positions (T,) and table of `latent_rope`.
        """
        flat = x.flatten(1)
        matrix = GroupMatrix(self.weight, self.num_groups, out_dtype=x.dtype)
        reason = op.device_refusal(x.device) or op.input_refusal(flat) or op.matrix_refusal(matrix)
        if reason or op.rotation_refusal(x.shape[2], rotation[1]):
            x = latent_rope(x, *rotation, inverse=True)
            return grouped_linear(x, self._decoded(x.dtype), self.num_groups)
        return linear_group(flat, [matrix], rotation=(*rotation, x.shape[2]))[0]

    def _decoded(self, dtype: torch.dtype) -> Tensor | QuantTensor:
        """What `grouped_linear` takes."""
        if self.dense is not None:
            return self.dense
        weight = self.weight
        return weight.dense(dtype) if isinstance(weight, Q8Planes) else weight


def group_refusal(x: Tensor, parts: Sequence[Linear | GateUp], norm: RMSNorm | None) -> str:
    """Why some parts are not multiplied in one launch; "" if they are."""
    reason = op.device_refusal(x.device) or op.input_refusal(x)
    if reason:
        return reason
    if norm is not None and norm.out_dtype != x.dtype:
        return f"the norm gives {norm.out_dtype}"
    reason = next((text for text in map(_form_refusal, parts) if text), "")
    if reason:
        return reason
    matrices: list[GroupMatrix] = []
    for part in parts:
        is_pair = isinstance(part, GateUp)
        linear = part.linear if isinstance(part, GateUp) else part
        matrices += _matrices(linear.weight, is_pair=is_pair)
    if len(matrices) > op.MAX_MATRICES:
        return f"{len(matrices)} matrices are more than {op.MAX_MATRICES}"
    return next((text for text in map(op.matrix_refusal, matrices) if text), "")


def _form_refusal(part: Linear | GateUp) -> str:
    """Why a layer is no matrices of a group."""
    linear = part.linear if isinstance(part, GateUp) else part
    segments = linear.weight.segments
    if linear.rounds_input or linear.bias is not None:
        return "a layer rounds its input or has a bias"
    if isinstance(part, GateUp) and len(segments) > 1:
        return "gate and up have different formats"
    is_known = all(isinstance(segment, GroupWeight) for segment in segments)
    return "" if is_known else "a matrix rests in a form of its own"


def _empty(x: Tensor, linear: Linear, dtype: torch.dtype, *, is_pair: bool) -> Tensor:
    rows = linear.weight.shape[0] // (2 if is_pair else 1)
    return torch.empty((x.shape[0], rows), dtype=dtype, device=x.device)


def _matrices(
    weight: LinearWeight,
    out: Tensor | None = None,
    *,
    is_pair: bool = False,
    addend: Tensor | None = None,
) -> list[GroupMatrix]:
    """The segments of a weight that the kernel knows, each with its columns of the result."""
    matrices, row = [], 0
    for segment in weight.segments:
        if isinstance(segment, GroupWeight):
            count = segment.shape[0] // (2 if is_pair else 1)
            columns = slice(row, row + count)
            own, part = (None if t is None else t[:, columns] for t in (out, addend))
            matrices.append(GroupMatrix(segment, is_pair=is_pair, addend=part, out=own))
            row += count
    return matrices
