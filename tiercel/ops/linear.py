"""x @ W^T with W prepared once for its device: which form it rests in, which kernel reads it.

On a CPU in bfloat16 a quantised matrix stays packed (`kernels/int4_planes.py`); everything else
rests dense in the dtype of the activations. Matrices that share an input are prepared together and
multiplied in one call where their forms agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels import int4_planes
from tiercel.kernels.int4_planes import Int4Planes
from tiercel.ops.dequantize import dequantize
from tiercel.quant import QuantTensor

# From here on a float32 product of float16 weights is faster widened in slices than as rows of dot
# products: 42 against 143 GFLOP/s (2 cores, torch 2.13), equal at 3 rows.
WIDE_ROWS = 4
EXACT_ROWS = 4  # rows of a product from which on a CPU treats each alike (float32)
WIDE_SLICE = 8192  # output rows widened at once: 19 MB of float32 at 576 columns


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A matrix (out_features, in_features), ready to multiply.

    Attributes:
        segments: consecutive output rows, each dense (out, in) or packed planes.
        shape: (out_features, in_features) of all segments.
    """

    segments: tuple[Tensor | Int4Planes, ...]
    shape: tuple[int, int]


def select_form(qtype_name: str, out_features: int, dtype: torch.dtype, device_type: str) -> str:
    """How a matrix rests: ``dense``, or ``planes1`` / ``planes2`` (4-bit planes of a CPU).

    Measured by benchmarks/linear.py against dense bfloat16: one row is 4 times as fast in one plane
    and twice in two, at a quarter to a half of the memory; 32 rows take 1.3 and 2.5 times as long
    (2 cores with AVX512, torch 2.13). Other activations than bfloat16 have no fast operator.
    """
    packs = device_type == "cpu" and dtype == torch.bfloat16 and qtype_name in int4_planes.PLANES
    if not packs or out_features % int4_planes.ROW_MULTIPLE:
        return "dense"
    return f"planes{int4_planes.PLANES[qtype_name]}"


def prepare_linear(
    parts: Sequence[QuantTensor], dtype: torch.dtype, device: torch.device, *, wide: bool = False
) -> LinearWeight:
    """Bring matrices with a common input to the device and into the form that `linear` reads.

    Args:
        parts: at least one, equal in_features; their output rows lie end to end in the result.
        dtype: of the activations.
        device: where the weights rest.
        wide: for float32 results (`linear(..., out_dtype=torch.float32)`): the weights stay dense,
            in float16 where the activations are 16 bits wide.

    Raises:
        ArgumentError: in_features differ.
    """
    in_features = parts[0].shape[1]
    if any(part.shape[1] != in_features for part in parts):
        raise ArgumentError(
            f"linear: parts have {[part.shape[1] for part in parts]} columns.",
            hint="Pass equal ones.",
        )
    if wide and device.type == "cpu" and dtype != torch.float32:
        dtype = torch.float16  # 11 significant bits; bfloat16's 8 would tie logits

    def form(part: QuantTensor) -> str:
        return select_form(part.qtype.name, part.shape[0], dtype, device.type)

    segments: list[Tensor | Int4Planes] = []
    for kind, members in groupby(parts, key=form):
        if kind == "dense":
            dense = [dequantize(part.to(device), dtype) for part in members]
            segments.append(dense[0] if len(dense) == 1 else torch.cat(dense))
        else:
            pieces = [(part.qtype.name, part.planes["data"]) for part in members]
            segments.append(int4_planes.pack_planes(pieces))
    return LinearWeight(tuple(segments), (sum(part.shape[0] for part in parts), in_features))


def linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """X @ W^T + bias.

    Args:
        x: (rows, in_features) contiguous, the dtype the weight was prepared for.
        weight: from `prepare_linear`.
        bias: (out_features,), dtype of the result; None for none.
        out_dtype: float32 for the result of a weight prepared `wide`, unrounded but for fewer than
            `WIDE_ROWS` rows on a CPU, which pass through float16; None for the dtype of x.

    Returns:
        (rows, out_features). Sums are float32; the product is rounded once, a bias added after it.

    Raises:
        ArgumentError: the shapes disagree.
    """
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ArgumentError(
            f"linear: x is {tuple(x.shape)} but the weight has {weight.shape[1]} columns.",
            hint=f"Pass (rows, {weight.shape[1]}).",
        )
    pieces = [_multiply(x, segment, out_dtype or x.dtype) for segment in weight.segments]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return out if bias is None else out.add_(bias)


def _multiply(x: Tensor, segment: Tensor | Int4Planes, out_dtype: torch.dtype) -> Tensor:
    if isinstance(segment, Int4Planes):
        return int4_planes.int4_matmul(x, segment)
    if x.is_cuda:
        from tiercel.kernels.linear import launch_linear

        out = torch.empty((x.shape[0], segment.shape[0]), dtype=out_dtype, device=x.device)
        launch_linear(x, segment, out)
        return out
    if out_dtype == segment.dtype:
        return _multiply_rows(x, segment)
    if x.shape[0] < WIDE_ROWS:
        return torch.nn.functional.linear(x.to(segment.dtype), segment).to(out_dtype)
    wide_x = x.to(out_dtype)
    slices = segment.split(WIDE_SLICE)
    return torch.cat([wide_x @ piece.to(out_dtype).t() for piece in slices], dim=1)


def _multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """X @ weight^T on a CPU, where from 4 rows on a row's bits do not depend on their number.

    PyTorch's product (MKL) takes rows in fours, and what is left in other orders of sums: so that
    gets company. Of fewer than 4 rows each is a product of its own, which decoding is faster with.
    """
    rows = x.shape[0]
    if rows < EXACT_ROWS or rows % EXACT_ROWS == 0:
        return torch.nn.functional.linear(x, weight)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % EXACT_ROWS))
    return torch.nn.functional.linear(padded, weight)[:rows]
