"""Packed matvec: up to 16 tokens times a quantised matrix that stays as small as its file."""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_matvec as kernel
from tiercel.kernels.packed.packed_gemm import CONVERTED_EXPONENT, select_exponent
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant import QuantTensor
from tiercel.quant_types import PLANES, TILE_ROWS, Layout, QuantType

MAX_TOKENS = kernel.MAX_TOKENS


class PackedWeight(Struct, frozen=True):
    """A quantised matrix (rows, in) at rest.

    Attributes:
        tensor: in layout SOA, FILE or STEP, planes contiguous.
        tickets: (tiles,) int32 zeros between launches, by which the CTAs of a tile find the last
        one. is_dependent: on a GPU, whether launches may overlap the kernel before them.
        exponent: of two, by which `packed_gemm` multiplies weights on their way.
    """

    tensor: QuantTensor
    tickets: Tensor
    is_dependent: bool
    exponent: int


# Of a block: places of fp16 factors d and dmin, the largest scale by which d is multiplied.
_FACTORS = {QuantType.Q4_K: ((0, 2), 63), QuantType.Q6_K: ((208,), 128)}


def weight_exponent(weight: QuantTensor) -> int:
    """`PackedWeight.exponent` of a matrix in any layout."""
    if weight.qtype not in _FACTORS:
        return CONVERTED_EXPONENT
    places, most = _FACTORS[weight.qtype]
    data = packed_repack(weight, Layout.FILE).planes["data"]
    blocks = data.unflatten(1, (-1, weight.qtype.block_bytes))
    factors = [blocks[:, :, at : at + 2].contiguous().view(torch.float16) for at in places]
    largest = torch.stack([factor.abs().amax() for factor in factors]).tolist()
    return select_exponent(most * largest[0], largest[1] if len(largest) > 1 else 0.0)


def prepare_packed(
    weight: QuantTensor,
    layout: Layout,
    out_dtype: torch.dtype = torch.float16,
    *,
    is_dependent: bool = False,
    exponent: int | None = None,
) -> PackedWeight:
    """Lay a matrix out and, on a GPU, load every kernel that `packed_matvec` may launch.

    Args:
        weight: of a type in `quant.PLANES`, at least one row and one block, on any device.
        layout: to read from: SOA or FILE, or STEP, which the weight has then.
        out_dtype: of the results; kernels of another are loaded by its first product.
        is_dependent: see `PackedWeight`; needs Hopper or later.
        exponent: from `weight_exponent`; None to find it.

    Raises:
        ArgumentError: the type has no planes, a plane does not fit, or there is no weight.
    """
    if weight.qtype not in PLANES or 0 in weight.shape:
        raise ArgumentError(
            f"packed_matvec: {weight.qtype.name} of shape {weight.shape} is not read here.",
            hint=f"Types: {', '.join(qtype.name for qtype in PLANES)}, at least one row.",
        )
    packed = packed_repack(weight, layout)
    planes = {name: plane.contiguous() for name, plane in packed.planes.items()}
    tensor = QuantTensor(packed.qtype, layout, packed.shape, planes)
    device = next(iter(planes.values())).device
    tiles = -(-tensor.shape[0] // TILE_ROWS)
    tickets = torch.zeros(tiles, dtype=torch.int32, device=device)
    if device.type == "cuda":
        in_file = layout is Layout.FILE
        name = tensor.kernel_type
        kernel.load_packed_matvec(name, tensor.shape, out_dtype, device, in_file=in_file)
        # A dependent launch reads weights before the kernel ahead of it has ended.
        torch.cuda.current_stream(device).synchronize()
    exponent = weight_exponent(weight) if exponent is None else exponent
    return PackedWeight(tensor, tickets, is_dependent, exponent)


def prepare_result(
    op: str,
    shape: tuple[int, int],
    device: torch.device,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """The tensor for a product: `out`, checked, or a new one.

    Args:
        op: named in the message.
        shape: tokens, and rows of the weight.
        device: of the result.
        out_dtype: float16, bfloat16 or float32; None for float16. That of `out` wins.
        out: (tokens, rows), unit inner stride, or None.

    Raises:
        ArgumentError: `out` is of another shape or dtype.
    """
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or torch.float16, device=device)
    if tuple(out.shape) != shape or out.stride(1) != 1 or out.dtype not in kernel.OUT_CODES:
        raise ArgumentError(
            f"{op}: out is {tuple(out.shape)} {out.dtype} but the result is {shape}.",
            hint="Pass float16, bfloat16 or float32 with unit inner stride.",
        )
    return out


def packed_matvec(
    x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """X @ W^T for up to 16 tokens; a token's bits depend on neither other tokens nor the layout.

    Args:
        x: (tokens, in) float16, contiguous, on the weight's device; at most 16 tokens.
        weight: from `prepare_packed`.
        out_dtype: float16, bfloat16 or float32; None for that of `out`, or float16.
        out: (tokens, rows) to write to, unit inner stride; None for a new one.

    Returns:
        (tokens, rows). The weights as decoded (of Q6_K, before d, to 11 bits); sums in float32,
        rounded once.

    Raises:
        ArgumentError: the shapes or dtypes disagree.
    """
    rows, in_features = weight.tensor.shape
    is_input = x.dim() == 2 and x.shape[1] == in_features and x.is_contiguous()
    if not is_input or x.dtype != torch.float16 or x.shape[0] > MAX_TOKENS:
        raise ArgumentError(
            f"packed_matvec: x is {tuple(x.shape)} {x.dtype} but the weight takes up to "
            f"{MAX_TOKENS} rows of {in_features}.",
            hint=f"Pass contiguous (tokens, {in_features}) float16.",
        )
    out = prepare_result("packed_matvec", (x.shape[0], rows), x.device, out_dtype, out)
    if not x.is_cuda:
        return _packed_matvec_torch(x, weight.tensor, out)
    limits = kernel.device_limits(x.device)
    largest = kernel.token_class(MAX_TOKENS, weight.tensor.kernel_type, limits)
    for first in range(0, x.shape[0], largest):
        _launch(x[first : first + largest], weight, out[first : first + largest], limits)
    return out


def _launch(x: Tensor, weight: PackedWeight, out: Tensor, limits: kernel.DeviceLimits) -> None:
    """One launch for as many tokens as it can take."""
    tensor, name = weight.tensor, weight.tensor.kernel_type
    config = kernel.select_packed_matvec(name, tensor.shape, x.shape[0], limits)
    partial = None
    if config.is_split:
        slices = kernel.num_slices(tensor.shape[1])
        shape = (slices, x.shape[0], weight.tickets.shape[0] * TILE_ROWS)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    kernel.launch_packed_matvec(
        x,
        tensor.ordered_planes(),
        name,
        out,
        partial,
        weight.tickets,
        config,
        is_dependent=weight.is_dependent,
    )


def _packed_matvec_torch(x: Tensor, weight: QuantTensor, out: Tensor) -> Tensor:
    """Each token on its own, so that its bits do not depend on other tokens."""
    dense = dequantize(packed_repack(weight, Layout.FILE), torch.float32)
    for token, row in enumerate(x.float()):
        out[token] = dense @ row
    return out
