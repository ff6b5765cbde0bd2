"""From one attention of a dense decoder to the next for up to 16 tokens, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory
from tiercel.kernels.fused import fused_device
from tiercel.kernels.fused import fused_layer_tail as kernel
from tiercel.kernels.fused.fused_device import refuse_device as refuse_device
from tiercel.kernels.fused.fused_layer_tail_geometry import Geometry, Matrix, partition_layer
from tiercel.kernels.fused.fused_layer_tail_geometry import refuse_width as refuse_width
from tiercel.kernels.fused.fused_refusal import Refusal as Refusal
from tiercel.kernels.fused.fused_refusal import refuse_sharing as refuse_sharing
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_matvec import PackedWeight
from tiercel.ops.packed_repack import packed_repack
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """Weights from one attention to the next.

    Attributes:
        o: output projection (hidden, attended) of this layer's attention.
        gate_up: (2 * inner, hidden), gate first.
        down: (hidden, inner).
        qkv: of the next layer: q, k and v in one, or q and k, and v; empty after the last layer.
        mlp_norm: (hidden,) float32.
        next_norm: (hidden,) float32, of the next attention; not read after the last layer.
        geometry: how they are dealt out.
        eps: of both norms.
    """

    o: QuantTensor
    gate_up: QuantTensor
    down: QuantTensor
    qkv: tuple[QuantTensor, ...]
    mlp_norm: Tensor
    next_norm: Tensor
    geometry: Geometry
    eps: float

    def planes(self) -> list[tuple[Tensor, ...]]:
        """Of the five matrices that the kernel knows; () for those that are not there."""
        matrices = (self.o, self.gate_up, self.down, *self.qkv)
        planes = [matrix.ordered_planes() for matrix in matrices]
        return planes + [()] * (5 - len(planes))

    def arguments(
        self, attended: Tensor, x: Tensor, heads: Tensor | None, exchange: ChainExchange
    ) -> Any:
        """Of the kernel, for tensors as in `fused_layer_tail` that outlive its launch."""
        return kernel.make_args(
            attended,
            x,
            heads,
            self.planes(),
            self.mlp_norm,
            self.next_norm,
            exchange.data,
            exchange.squares,
            exchange.launches,
            exchange.counters,
            self.eps,
            exchange.memory,
        )


class ChainExchange(Struct, frozen=True):
    """Memory through which activations travel; one serves all layers, for calls in one stream.

    Nothing is reset between calls: every CTA counts its launches, and each launch adds the same to
    the counters of all columns, so all layers have as many. Counts wrap around
    at 2**32; the kernel asks whether they are equal, never which is larger.

    memory: in which ranks that share a model exchange sums; all make the same calls in the same
        order. None for one GPU.
    """

    data: Tensor
    squares: Tensor
    launches: Tensor
    counters: Tensor
    memory: SymmetricMemory | None = None


def prepare_fused_layer_tail(
    o: Sequence[PackedWeight],
    gate_up: Sequence[PackedWeight],
    down: Sequence[PackedWeight],
    qkv: Sequence[PackedWeight],
    mlp_norm: Tensor,
    next_norm: Tensor,
    eps: float,
    num_sms: int,
    ranks: int = 1,
) -> ChainWeights | Refusal:
    """Bring matrices at rest together, each given as the segments of its rows.

    Args:
        o: see `ChainWeights`.
        gate_up: of one type.
        down: of one segment.
        qkv: one or two segments; none after the last layer.
        mlp_norm: (hidden,) float32.
        next_norm: (hidden,) float32.
        eps: of both norms.
        num_sms: of the device.
        ranks: GPUs that share the model; the matrices are this one's.

    Returns:
        The weights of `fused_layer_tail`, or why it does not take these matrices: a width that does
        not fit, another type than Q4_K and Q6_K, or another layout than planes.
    """
    parts = [[weight.tensor for weight in segments] for segments in (o, gate_up, down, qkv)]
    matrices = [[Matrix(p.qtype.name, *p.shape) for p in part] for part in parts]
    layouts = {tensor.layout for part in parts for tensor in part}
    in_step = layouts == {Layout.STEP}
    geometry = partition_layer(
        matrices[0], matrices[1], matrices[2], matrices[3], num_sms, ranks, in_step=in_step
    )
    if isinstance(geometry, Refusal):
        return geometry
    if not in_step and layouts != {Layout.SOA}:
        return Refusal("the weights are in the layout of the file (TIERCEL_Q4K_SOA=0)")
    o_, gate_up_, down_ = (part[0] for part in parts[:3])
    weights = ChainWeights(o_, gate_up_, down_, tuple(parts[3]), mlp_norm, next_norm, geometry, eps)
    if mlp_norm.is_cuda:
        kernel.load_fused_layer_tail(geometry, mlp_norm.device)
    return weights


def make_exchange(
    geometry: Geometry, device: torch.device, memory: SymmetricMemory | None = None
) -> ChainExchange:
    """For layers of a geometry, and others of as many columns over as many CTAs.

    memory: from `share_memory`, where several GPUs share the model.
    """
    assert (geometry.ranks > 1) == (memory is not None), "ranks exchange sums"
    return ChainExchange(
        torch.zeros(kernel.exchange_bytes(geometry), dtype=torch.uint8, device=device),
        torch.zeros((2, geometry.groups, 2, 8), dtype=torch.int32, device=device),
        torch.zeros((2, geometry.ctas), dtype=torch.int32, device=device),
        torch.zeros((geometry.columns, 2), dtype=torch.int32, device=device),
        memory,
    )


def share_memory(
    hidden: int, group: dist.ProcessGroup, device: torch.device, refusal: Refusal | None
) -> SymmetricMemory | Refusal:
    """Memory in which ranks exchange sums; all of them call it, also those that want none.

    Args:
        hidden: width of the residual.
        group: of the ranks, which gathers tensors of `device`.
        device: this rank's GPU.
        refusal: why this rank's layers do not fit.

    Returns:
        The memory, or why there is none, the same on all ranks.
    """
    num_bytes = kernel.peer_bytes(hidden, group.size())
    return fused_device.share_memory(num_bytes, group, device, refusal)


def fused_layer_tail(
    attended: Tensor,
    x: Tensor,
    weights: ChainWeights,
    exchange: ChainExchange,
    *,
    is_dependent: bool = False,
) -> Tensor | None:
    """X += o(attended); x += down(silu(gate) * up of norm(x)); q, k, v of norm(x).

    A token's bits depend on no other token.

    Args:
        attended: (tokens, attended) float16, contiguous; 1 to `geometry.max_tokens` tokens.
        x: (tokens, hidden) float32, contiguous, the residual; mutated.
        weights: from `prepare_fused_layer_tail`.
        exchange: from `make_exchange`, of as many columns; no other call may use it meanwhile.
        is_dependent: see `rtc.launch`.

    Returns:
        (tokens, rows of q, k, v) float16; None after the last layer. Inputs of matrices are rounded
        to float16: residual times norm weight, before 1 / rms, which is applied to sums.

    Raises:
        ArgumentError: the shapes or dtypes disagree.
    """
    geometry, tokens = weights.geometry, x.shape[0]
    shape = geometry.shape
    is_right = tuple(x.shape) == (tokens, shape.hidden)
    is_right = is_right and tuple(attended.shape) == (tokens, shape.attended)
    is_right = is_right and x.dtype == torch.float32 and attended.dtype == torch.float16
    is_right = is_right and x.is_contiguous() and attended.is_contiguous()
    if not is_right or not 1 <= tokens <= geometry.max_tokens:
        raise ArgumentError(
            f"fused_layer_tail: attended is {tuple(attended.shape)} {attended.dtype}, x "
            f"{tuple(x.shape)} {x.dtype}.",
            hint=f"Pass 1 to {geometry.max_tokens} contiguous rows of {shape.attended} float16 "
            f"and {shape.hidden} float32.",
        )
    if exchange.counters.shape[0] != geometry.columns:
        raise ArgumentError(
            f"fused_layer_tail: the exchange is for {exchange.counters.shape[0]} columns of 256, "
            f"the layer has {geometry.columns}.",
            hint="Pass an exchange made for layers of as many columns: make_exchange.",
        )
    if not x.is_cuda:
        assert geometry.ranks == 1, "of one process"
        return _fused_layer_tail_torch(attended, x, weights)
    heads = None
    if weights.qkv:
        heads = torch.empty((tokens, shape.heads_width), dtype=torch.float16, device=x.device)
    kernel.launch_fused_layer_tail(
        weights.arguments(attended, x, heads, exchange),
        tokens,
        geometry,
        x.device,
        is_dependent=is_dependent,
    )
    return heads


def _fused_layer_tail_torch(attended: Tensor, x: Tensor, weights: ChainWeights) -> Tensor | None:
    """Each token on its own, so that its bits do not depend on other tokens."""

    def times(matrix: QuantTensor, row: Tensor) -> Tensor:
        dense = dequantize(packed_repack(matrix, Layout.FILE), torch.float32)
        return torch.stack([dense @ token for token in row.half().float()])

    def norm(weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, weights.eps)

    x += times(weights.o, attended)
    gate, up = times(weights.gate_up, norm(weights.mlp_norm)).chunk(2, dim=1)
    x += times(weights.down, torch.nn.functional.silu(gate) * up)
    if not weights.qkv:
        return None
    h = norm(weights.next_norm)
    return torch.cat([times(matrix, h) for matrix in weights.qkv], dim=1).half()
