"""From one attention of a dense decoder to the next for up to 16 tokens, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels import decode_chain as kernel
from tiercel.kernels.decode_chain import ChainTypes
from tiercel.ops.dequantize import dequantize
from tiercel.ops.q4k_matvec import Q4kWeight
from tiercel.ops.q4k_repack import q4k_repack
from tiercel.quant import Layout, QuantTensor, QuantType

MAX_TOKENS = kernel.MAX_TOKENS
_TYPES = (QuantType.Q4_K, QuantType.Q6_K)
_MOST_SLICES = 4


@dataclass(frozen=True, slots=True)
class ChainWeights:
    """What lies between two attentions.

    Attributes:
        o: output projection (4096, 4096) of this layer's attention.
        gate_up: (2 * inner, 4096), gate first.
        down: (4096, inner).
        qkv: of the next layer: q, k and v (6144, 4096), or q and k (5120, 4096), and v; empty
            behind the last layer.
        mlp_norm: (4096,) float32.
        next_norm: (4096,) float32, of the next attention; behind the last layer nobody reads it.
        types: which of them are Q6_K.
        eps: of both norms.
    """

    o: QuantTensor
    gate_up: QuantTensor
    down: QuantTensor
    qkv: tuple[QuantTensor, ...]
    mlp_norm: Tensor
    next_norm: Tensor
    types: ChainTypes
    eps: float

    @property
    def slices(self) -> int:
        """Of 4096 columns in a row of down."""
        return self.down.shape[1] // kernel.HIDDEN

    def planes(self) -> list[tuple[Tensor, ...]]:
        """Of the five matrices that the kernel knows; () for those that are not there."""
        matrices = (self.o, self.gate_up, self.down, *self.qkv)
        planes = [matrix.ordered_planes() for matrix in matrices]
        return planes + [()] * (5 - len(planes))

    def arguments(
        self, attended: Tensor, x: Tensor, heads: Tensor | None, exchange: ChainExchange
    ) -> Any:
        """Of the kernel, for tensors as in `decode_chain` that outlive its launch."""
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
        )


@dataclass(frozen=True, slots=True)
class ChainExchange:
    """Memory through which activations travel; one serves all layers, for calls in one stream.

    Nothing is reset between calls: every CTA counts its launches, and each launch adds the same to
    the counters of all kinds of activations, so all layers have as many slices. Counts wrap around
    at 2**32; the kernel asks whether they are equal, never which is larger.
    """

    data: Tensor
    squares: Tensor
    launches: Tensor
    counters: Tensor


def can_decode_chain(device: torch.device) -> bool:
    """Whether a device runs the kernel: Hopper with 128 SMs at least."""
    return kernel.can_run(device)


def prepare_decode_chain(
    o: Sequence[Q4kWeight],
    gate_up: Sequence[Q4kWeight],
    down: Sequence[Q4kWeight],
    qkv: Sequence[Q4kWeight],
    mlp_norm: Tensor,
    next_norm: Tensor,
    eps: float,
) -> ChainWeights | None:
    """Bring matrices at rest together, each given as the segments of its rows; None if unfit.

    Fitting: the sizes of Qwen3-8B, inner a multiple of 4096 up to 16384; Q4_K and Q6_K as planes,
    one segment a matrix but for v.

    Args:
        o: see `ChainWeights`, as the rest.
        gate_up: of one type.
        down: of one segment.
        qkv: one or two segments; none behind the last layer.
        mlp_norm: (4096,) float32.
        next_norm: (4096,) float32.
        eps: of both norms.
    """
    hidden = kernel.HIDDEN
    parts = [[weight.tensor for weight in segments] for segments in (o, gate_up, down, qkv)]
    is_known = all(p.qtype in _TYPES and p.layout is Layout.SOA for part in parts for p in part)
    shapes = [[tensor.shape for tensor in part] for part in parts]
    inner = shapes[2][0][1]
    fits = inner % hidden == 0 and inner <= _MOST_SLICES * hidden
    fits = fits and shapes[:3] == [[(hidden, hidden)], [(2 * inner, hidden)], [(hidden, inner)]]
    split = [(kernel.QK_ROWS, hidden), (kernel.HEADS_WIDTH - kernel.QK_ROWS, hidden)]
    if not (is_known and fits and shapes[3] in ([], [(kernel.HEADS_WIDTH, hidden)], split)):
        return None
    six = [[p.qtype is QuantType.Q6_K for p in part] for part in parts]
    qk, v = (six[3][0], six[3][-1]) if six[3] else (False, False)
    if len(six[3]) == 2 and qk == v:
        return None
    types = ChainTypes(six[0][0], six[1][0], six[2][0], qk, v)
    weights = ChainWeights(
        parts[0][0],
        parts[1][0],
        parts[2][0],
        tuple(parts[3]),
        mlp_norm,
        next_norm,
        types,
        eps,
    )
    if mlp_norm.is_cuda:
        kernel.load_decode_chain(weights.slices, types, mlp_norm.device, is_last=not qkv)
    return weights


def make_exchange(slices: int, device: torch.device) -> ChainExchange:
    """For layers of so many slices."""
    return ChainExchange(
        torch.zeros(kernel.exchange_bytes(slices), dtype=torch.uint8, device=device),
        torch.zeros((2, kernel.CTAS, 2, 8), dtype=torch.int32, device=device),
        torch.zeros((2, kernel.CTAS), dtype=torch.int32, device=device),
        torch.zeros((slices + 2, kernel.COLUMNS, 2), dtype=torch.int32, device=device),
    )


def decode_chain(
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
        attended: (tokens, 4096) float16, contiguous; 1 to 16 tokens.
        x: (tokens, 4096) float32, contiguous, the residual; mutated.
        weights: from `prepare_decode_chain`.
        exchange: from `make_exchange`, of as many slices; no other call may use it meanwhile.
        is_dependent: see `rtc.launch`.

    Returns:
        (tokens, 6144) float16; None behind the last layer. Inputs of matrices are rounded to
        float16: residual times norm weight, before 1 / rms, which is applied to sums.

    Raises:
        ArgumentError: the shapes or dtypes disagree.
    """
    tokens, hidden = x.shape[0], kernel.HIDDEN
    is_right = tuple(x.shape) == tuple(attended.shape) == (tokens, hidden)
    is_right = is_right and x.dtype == torch.float32 and attended.dtype == torch.float16
    is_right = is_right and x.is_contiguous() and attended.is_contiguous()
    if not is_right or not 1 <= tokens <= MAX_TOKENS:
        raise ArgumentError(
            f"decode_chain: attended is {tuple(attended.shape)} {attended.dtype}, x "
            f"{tuple(x.shape)} {x.dtype}.",
            hint=f"Pass 1 to {MAX_TOKENS} contiguous rows of {hidden}, float16 and float32.",
        )
    if exchange.counters.shape[0] != weights.slices + 2:
        raise ArgumentError(
            f"decode_chain: the exchange is for {exchange.counters.shape[0] - 2} slices of 4096, "
            f"down has {weights.slices}.",
            hint="Pass an exchange made for layers of as many slices: make_exchange.",
        )
    if not x.is_cuda:
        return _decode_chain_torch(attended, x, weights)
    heads = None
    if weights.qkv:
        heads = torch.empty((tokens, kernel.HEADS_WIDTH), dtype=torch.float16, device=x.device)
    kernel.launch_decode_chain(
        weights.arguments(attended, x, heads, exchange),
        tokens,
        weights.slices,
        weights.types,
        x.device,
        is_last=heads is None,
        is_dependent=is_dependent,
    )
    return heads


def _decode_chain_torch(attended: Tensor, x: Tensor, weights: ChainWeights) -> Tensor | None:
    """Each token on its own, so that its bits do not depend on the others."""

    def times(matrix: QuantTensor, row: Tensor) -> Tensor:
        dense = dequantize(q4k_repack(matrix, Layout.FILE), torch.float32)
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
