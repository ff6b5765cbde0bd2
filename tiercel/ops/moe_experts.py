"""The routed experts of DeepSeek-V4, and the clamped SwiGLU of all its experts."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from tiercel import env
from tiercel.errors import ArgumentError
from tiercel.kernels.moe import moe_experts_gemm as gemm
from tiercel.kernels.moe import moe_experts_tiles as tiles
from tiercel.kernels.moe.stack_planes import MAX_SORTED, StackPlanes
from tiercel.kernels.packed.packed_matvec import device_limits
from tiercel.kernels.runtime.rtc import is_dependent
from tiercel.ops import moe_experts_torch as torch_ops
from tiercel.ops.moe_experts_torch import Experts
from tiercel.quant import QuantTensor
from tiercel.quant_tiles import MOST_E8M0, tile_stack
from tiercel.quant_types import Layout, QuantType

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Rows of a tile for the kernels, and the pairs an expert has on average from which they are many.
FEW_ROWS, MANY_ROWS = 16, 64
_MANY_PAIRS = 8
_FP8_COLUMNS = 128  # of a step of the kernels, at most: a scale must hold for whole ones
_TRITON_KINDS = {"MXFP4", "NVFP4", "Q2_K", "FP8_BLOCK", "FLOAT"}  # as they are stored
_STORED_FLOATS = {
    QuantType.F32: torch.float32,
    QuantType.F16: torch.float16,
    QuantType.BF16: torch.bfloat16,
}


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Clamped SwiGLU silu(min(gate, limit)) * clamp(up, -limit, limit).

    Args:
        gate: (...) float; clamped above alone.
        up: the shape of gate.
        limit: > 0; None for no clamp.

    Returns:
        (...) in the dtype of gate; float32 inside, rounded once.

    Raises:
        ArgumentError: the shapes disagree, or the limit is not positive.

    Source: "GLU Variants Improve Transformer", arXiv 2002.05202; the clamp of the inference code
    published with DeepSeek-V4.
    """
    if gate.shape != up.shape:
        raise ArgumentError(
            f"clamped_swiglu: gate is {tuple(gate.shape)} but up is {tuple(up.shape)}.",
            hint="Pass equal shapes.",
        )
    _check_limit("clamped_swiglu", limit)
    if gate.is_cuda and gate.dim() == 2 and gate.stride(1) == up.stride(1) == 1:
        from tiercel.kernels.fused.act_mul import launch_act_mul

        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        launch_act_mul(gate, up, out, "silu", limit)
        return out
    return torch_ops.swiglu(gate, up, limit).to(gate.dtype)


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    *,
    limit: float | None,
    rounds_activations: bool = False,
    out_dtype: torch.dtype | None = None,
    num_ranks: int = 1,
    addend: Tensor | None = None,
) -> Tensor:
    """Sum over a token's experts of weight * w2 swiglu(w1 x, w3 x).

    Choice: the pairs (token, slot) are sorted by expert into padded tiles of one expert each. On a
    GPU, kernels decode weights on their way to the tensor cores for x of 16 bits and the formats of
    `kernels/moe/moe_experts.py`; else products are batched over tiles whose experts were decoded.
    The number of tiles follows from the shapes, so there is no host sync, and the op can be
    captured in a CUDA graph.

    Args:
        x: (T, hidden), float32, bfloat16 or float16, with any strides.
        ids: (T, topk) int64, experts of each token, distinct or not; each within the stack (not
            checked on a device), or -1 where another rank has the expert, but for the first token:
            such a pair adds nothing.
        weights: (T, topk) float32; multiplied into the activations before w2.
        experts: stacks of w1 (gate), w3 (up) and w2 (down), a float Tensor or
            weights of any type in layout FILE or BLOCKS.
        limit: of the clamped SwiGLU, > 0; None for no clamp.
        rounds_activations: the inputs of all products are rounded to FP8 in groups of 128, as in
            the published code (native numerics).
        out_dtype: of the result; None for that of x.
        num_ranks: ranks whose experts the tokens go to; only with several is an id -1.
        addend: (T, hidden) float that is added to a float32 result, such as that of a shared
            expert; None for none.

    Returns:
        (T, hidden), contiguous. Float32 inside, but the kernels round the activations before w2 to
        the dtype of x; the slots are added in their order, and the sum is rounded once. Memory: 4
        * hidden * T * topk bytes, and without kernels about 1 GB of decoded weights (one expert's
        if that is more).

    Raises:
        ArgumentError: shapes or dtypes disagree, or the limit is not positive.

    Source: the inference code published with DeepSeek-V4; tiles of one expert as in MegaBlocks,
    arXiv 2211.15841.
    """
    _check_pairs(x, ids, weights)
    _check_limit("moe_experts", limit)
    _check_experts(experts, x.shape[1])
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    _check_addend(addend, out)
    if x.shape[0] == 0:
        return out
    stacks = None
    if experts.tickets is not None and x.dtype == torch.bfloat16 and not rounds_activations:
        run_tiles(out, x, ids, weights, experts, limit, num_ranks, addend)
        return out
    if x.is_cuda and not rounds_activations and env.has_moe_kernel():
        stacks = kernel_stacks(experts, x.dtype)
    if stacks is not None:
        run_kernels(out, x, ids, weights, stacks, limit, num_ranks)
        return _add(out, addend)
    rows, num_tiles = torch_ops.select_tiles(ids.numel(), experts.num_experts)
    made = torch_ops.make_tiles(ids, experts.num_experts, rows, num_tiles)
    pairs = torch_ops.run_experts(x.float(), made, weights, experts, limit, rounds_activations)
    return _add(out.copy_(torch_ops.sum_slots(pairs, ids.shape[1])), addend)


def _add(out: Tensor, addend: Tensor | None) -> Tensor:
    """A result with what no kernel has added to it."""
    return out if addend is None else out.add_(addend)


def kernel_stacks(
    experts: Experts, dtype: torch.dtype
) -> tuple[StackPlanes, StackPlanes, StackPlanes] | None:
    """The stacks as Triton kernels read them; None for a format, a mix or an x that they do not."""
    gate, up, down = (_planes(stack) for stack in (experts.w1, experts.w3, experts.w2))
    if gate is None or up is None or down is None or dtype == torch.float32:
        return None
    if {gate.kind, down.kind} - _TRITON_KINDS:
        return None
    if dtype == torch.float16 and "NVFP4" in (gate.kind, down.kind):
        return None  # decoded to bfloat16
    same = (gate.kind, gate.strides, gate.is_divisor, gate.block, gate.q.dtype)
    if same != (up.kind, up.strides, up.is_divisor, up.block, up.q.dtype):
        return None
    return gate, up, down


def rest_experts(experts: Experts, dtype: torch.dtype) -> Experts:
    """Bring stacks into layout TILES where a kernel reads it.

    Args:
        experts: of which no stack may be used afterwards: it may be rearranged where it is.
        dtype: of activations.

    Returns:
        The same weights, with `tickets` in that layout.
    """
    if not env.has_moe_tiles() or tiles_refusal(experts, dtype):
        return experts
    w1, w3, w2 = (
        tile_stack(stack)
        for stack in (experts.w1, experts.w3, experts.w2)
        if isinstance(stack, QuantTensor)
    )
    count = tiles.num_tickets(tiles.MOST_FOLDED)
    return Experts(w1, w3, w2, torch.zeros(count, dtype=torch.int32, device=w1.device))


def tiles_refusal(experts: Experts, dtype: torch.dtype) -> str:
    """Why stacks do not rest in layout TILES, without a full stop; "" if they do.

    It looks at the scales of MXFP4, so it waits for the device.

    Args:
        experts: as they are stored.
        dtype: of activations.
    """
    stacks = (experts.w1, experts.w3, experts.w2)
    device = experts.w1.device
    if device.type != "cuda":
        return "they are on a CPU"
    inter, hidden = experts.w1.shape[1:]
    capability = torch.cuda.get_device_capability(device)
    refusal = tiles.tiles_refusal(
        [_planes(stack) for stack in stacks], (hidden, inter), dtype, capability,
        device_limits(device),
    )  # fmt: skip
    if refusal:
        return refusal
    scales = [stack.planes["scale"] for stack in stacks if _is_mxfp4(stack)]
    if any(bool((scale > MOST_E8M0).any()) for scale in scales):
        return f"a scale is above 2^{MOST_E8M0 - 127}"
    return ""


def _is_mxfp4(stack: Tensor | QuantTensor) -> TypeGuard[QuantTensor]:
    return isinstance(stack, QuantTensor) and stack.qtype is QuantType.MXFP4


def run_tiles(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    limit: float | None,
    num_ranks: int = 1,
    addend: Tensor | None = None,
) -> None:
    """Multiply by stacks of layout TILES.

    Args:
        out: (T, hidden) float, written; T > 0.
        x: (T, hidden) bfloat16.
        ids: (T, topk) int64.
        weights: (T, topk) float32.
        experts: of `rest_experts`.
        limit: of the clamped SwiGLU; None for no clamp.
        num_ranks: see `moe_experts`.
        addend: see `moe_experts`.
    """
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    num_pairs, (num_experts, inter, hidden) = ids.numel(), experts.w1.shape
    stacks = [tile_planes(stack) for stack in (experts.w1, experts.w3, experts.w2)]
    shape = tiles.ExpertsShape(
        num_experts, hidden, inter, ids.shape[1], stacks[0].kind, stacks[2].kind
    )
    limits = device_limits(x.device)
    capability = torch.cuda.get_device_capability(x.device)
    if env.has_moe_gemm() and not gemm.gemm_refusal(shape, num_pairs // num_ranks, capability):
        configs = gemm.select_gemm(shape.gate), gemm.select_gemm(shape.down)
        workspace = gemm.GemmWorkspace.make(
            num_pairs, num_experts, (hidden, inter), configs[0].tokens, x.device
        )
        gemm.launch_moe_experts_gemm(
            out, x, ids, weights, stacks, limit, workspace, configs,
            is_dependent=is_dependent(x.device),
        )  # fmt: skip
        _add(out, addend)
        return
    config = tiles.select_tiles(shape, x.shape[0], limits)
    assert config is not None, "rest_experts refuses it"
    assert experts.tickets is not None, "rest_experts made them"
    chunks, tickets = None, experts.tickets
    if num_pairs > tiles.MOST_FOLDED:
        num_chunks = torch_ops.most_tiles(num_pairs, num_experts, config.columns)
        made = torch_ops.make_tiles(ids, num_experts, config.columns, num_chunks)
        chunks = (made.experts, made.pairs)
        count = tiles.num_tickets(num_chunks)
        tickets = torch.zeros(count, dtype=torch.int32, device=x.device)
    h = torch.empty((num_pairs, inter), dtype=x.dtype, device=x.device)
    y = _make_results(num_pairs, hidden, x.device, num_ranks)
    added = addend is not None and addend.dtype == torch.float32 and addend.is_contiguous()
    tiles.launch_moe_experts_tiles(
        out, x, ids, weights, chunks, stacks, limit, (h, y, tickets), config,
        num_sms=limits.num_sms, is_dependent=is_dependent(x.device),
        addend=addend if added else None,
    )  # fmt: skip
    if not added:
        _add(out, addend)


def _make_results(num_pairs: int, hidden: int, device: torch.device, num_ranks: int) -> Tensor:
    """(num_pairs, hidden) float32 for kernels that write those of this rank's experts alone."""
    make = torch.empty if num_ranks == 1 else torch.zeros
    return make((num_pairs, hidden), dtype=torch.float32, device=device)


def tile_planes(weight: Tensor | QuantTensor) -> StackPlanes:
    """A stack of layout TILES as the kernel reads it."""
    assert isinstance(weight, QuantTensor), "of rest_experts"
    planes = weight.planes
    total = planes.get("global_scale", planes.get("divisor"))
    codes = planes["data"] if "data" in planes else planes["q"]
    return StackPlanes(weight.qtype.name, codes, planes.get("scale"), total, "divisor" in planes)


def _planes(weight: Tensor | QuantTensor) -> StackPlanes | None:
    if not isinstance(weight, QuantTensor):
        made: StackPlanes | None = StackPlanes("FLOAT", weight)
    elif weight.layout is Layout.FILE:
        made = _file_planes(weight)
    else:
        made = _block_planes(weight)
    is_plain = made is not None and all(tensor.is_contiguous() for tensor in made.tensors)
    return made if is_plain else None


def _file_planes(weight: QuantTensor) -> StackPlanes | None:
    data = weight.planes["data"]
    if weight.qtype in _STORED_FLOATS:
        return StackPlanes("FLOAT", data.view(_STORED_FLOATS[weight.qtype]))
    return None if weight.qtype is QuantType.MXFP4 else StackPlanes(weight.qtype.name, data)


def _block_planes(weight: QuantTensor) -> StackPlanes | None:
    planes, kind = weight.planes, weight.qtype.name
    has_split_steps = kind == "FP8_BLOCK" and weight.block[1] % _FP8_COLUMNS != 0
    if weight.layout is not Layout.BLOCKS or has_split_steps:
        return None
    total = planes.get("global_scale", planes.get("divisor"))
    return StackPlanes(kind, planes["q"], planes["scale"], total, "divisor" in planes, weight.block)


def run_kernels(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: tuple[StackPlanes, StackPlanes, StackPlanes],
    limit: float | None,
    num_ranks: int = 1,
) -> None:
    """Sort the pairs into tiles, and multiply them by kernels.

    Args:
        out: (T, hidden) float, written; T > 0.
        x: (T, hidden) bfloat16 or float16.
        ids: (T, topk) int64.
        weights: (T, topk) float32.
        stacks: of `kernel_stacks`.
        limit: of the clamped SwiGLU; None for no clamp.
        num_ranks: see `moe_experts`.
    """
    from tiercel.kernels.moe.moe_experts import launch_moe_experts, launch_moe_tiles

    num_pairs, num_experts = ids.numel(), stacks[0].q.shape[0]
    rows = FEW_ROWS if num_pairs <= _MANY_PAIRS * num_experts else MANY_ROWS
    num_tiles = torch_ops.most_tiles(num_pairs, num_experts, rows)
    if num_pairs <= MAX_SORTED:
        experts = torch.empty(num_tiles, dtype=torch.int64, device=x.device)
        pairs = torch.empty((num_tiles, rows), dtype=torch.int64, device=x.device)
        first = torch.empty(num_experts, dtype=torch.int32, device=x.device)
        launch_moe_tiles(experts, pairs, ids.reshape(-1).contiguous(), first)
    else:
        made = torch_ops.make_tiles(ids, num_experts, rows, num_tiles)
        experts, pairs = made.experts, made.pairs
    h = torch.empty((num_pairs, stacks[0].q.shape[1]), dtype=x.dtype, device=x.device)
    y = _make_results(num_pairs, x.shape[1], x.device, num_ranks)
    launch_moe_experts(
        out, x.contiguous(), (experts, pairs), weights.contiguous(), stacks, limit, (h, y)
    )


def _check_limit(name: str, limit: float | None) -> None:
    if limit is not None and not limit > 0:
        raise ArgumentError(
            f"{name}: limit={limit}.", hint="Pass a positive limit, or None for no clamp."
        )


def _check_pairs(x: Tensor, ids: Tensor, weights: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in _FLOATS:
        raise ArgumentError(
            f"moe_experts: x is {tuple(x.shape)} {x.dtype}.",
            hint="Pass (tokens, hidden) in float32, bfloat16 or float16.",
        )
    if (
        ids.dim() != 2
        or ids.shape[0] != x.shape[0]
        or ids.shape[1] < 1
        or ids.dtype != torch.int64
        or weights.shape != ids.shape
    ):
        raise ArgumentError(
            f"moe_experts: ids are {tuple(ids.shape)} {ids.dtype} and weights "
            f"{tuple(weights.shape)} for {x.shape[0]} tokens.",
            hint=f"Pass ids ({x.shape[0]}, topk) torch.int64 and weights of the same shape.",
        )


def _check_addend(addend: Tensor | None, out: Tensor) -> None:
    if addend is not None and (addend.shape != out.shape or out.dtype != torch.float32):
        raise ArgumentError(
            f"moe_experts: addend is {tuple(addend.shape)} for a result {tuple(out.shape)} "
            f"{out.dtype}.",
            hint=f"Pass an addend {tuple(out.shape)} and out_dtype torch.float32.",
        )


def _check_experts(experts: Experts, hidden: int) -> None:
    shapes = tuple(tuple(stack.shape) for stack in (experts.w1, experts.w3, experts.w2))
    num_experts, inter = (shapes[0][0], shapes[0][1]) if len(shapes[0]) == 3 else (0, 0)
    expected = (
        (num_experts, inter, hidden),
        (num_experts, inter, hidden),
        (num_experts, hidden, inter),
    )
    if shapes != expected or num_experts < 1:
        raise ArgumentError(
            f"moe_experts: w1, w3 and w2 are {shapes} but x has {hidden} columns.",
            hint="Pass (experts, inter, hidden) twice and (experts, hidden, inter).",
        )
    for stack in (experts.w1, experts.w3, experts.w2):
        if isinstance(stack, QuantTensor):
            stack.check("moe_experts")
