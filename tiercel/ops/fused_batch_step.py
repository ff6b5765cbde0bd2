"""All layers of a dense decoder for up to 16 requests with one new token each, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.batch import Batch
from tiercel.errors import ArgumentError
from tiercel.kernels.fused import fused_batch_step as kernel
from tiercel.kernels.fused.fused_batch_step_geometry import BatchStepGeometry, join_layers
from tiercel.kernels.fused.fused_batch_step_geometry import Heads as Heads
from tiercel.kernels.fused.fused_refusal import Refusal as Refusal
from tiercel.ops.decode_attention import decode_attention
from tiercel.ops.fused_layer_tail import ChainWeights, fused_layer_tail, make_exchange
from tiercel.ops.rotary_kv_write import rotary_kv_write


@dataclass(frozen=True, slots=True)
class BatchStepLayer:
    """A layer's attention, and what follows it.

    Attributes:
        tail: matrices from its output projection to the next layer's q, k and v.
        k_cache: (blocks, block_size, kv_heads, 128) float16, contiguous.
        v_cache: like k_cache.
        head_norms: weights of the norms of heads of q and k, (128,) float32 each, or none.
    """

    tail: ChainWeights
    k_cache: Tensor
    v_cache: Tensor
    head_norms: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class BatchStepWeights:
    """A decoder's layers with their caches, and memory through which activations travel.

    Nothing of the memory is reset between calls, which are made in one stream; see `ChainExchange`.

    Attributes:
        layers: all of them.
        geometry: how their rows are dealt out.
        rope_table: (positions, 2, 64) float32, contiguous: cos, then sin.
        table: addresses of the layers.
        exchange: see `kernels.fused.fused_batch_step.make_args`.
        head_eps: of the norms of heads.
        scale: of scores.
    """

    layers: tuple[BatchStepLayer, ...]
    geometry: BatchStepGeometry
    rope_table: Tensor
    table: Tensor
    exchange: tuple[Tensor, ...]
    head_eps: float
    scale: float

    def arguments(self, heads: Tensor, x: Tensor, batch: Batch, group: int) -> kernel.Args:
        """Of the kernel, for tensors as in `fused_batch_step` that outlive its launch."""
        return kernel.make_args(
            x,
            heads,
            self.table,
            self.exchange,
            self.rope_table,
            batch.positions,
            batch.slot_mapping[group],
            batch.seq_lens,
            batch.rows,
            batch.block_tables[group],
            num_layers=len(self.layers),
            eps=self.layers[0].tail.eps,
            head_eps=self.head_eps,
            scale=self.scale,
        )


def prepare_batch_step(
    layers: Sequence[BatchStepLayer],
    heads: Heads,
    rope_table: Tensor,
    num_sms: int,
    *,
    head_eps: float,
    scale: float,
) -> BatchStepWeights | Refusal:
    """Bring the layers of a decoder together, or say why they do not fit.

    Args:
        layers: in order; none but the last lacks q, k and v of the next one.
        heads: of the attention of all layers.
        rope_table: of all layers.
        num_sms: of the device.
        head_eps: of the norms of heads.
        scale: of scores.
    """
    geometry = join_layers([layer.tail.geometry for layer in layers], heads, num_sms)
    if isinstance(geometry, Refusal):
        return geometry
    if layers[0].k_cache.dtype != torch.float16:
        return Refusal("keys and values are not float16")
    device = rope_table.device
    tensors = [
        kernel.LayerTensors(
            tuple(planes for planes in layer.tail.planes() if planes),
            layer.tail.mlp_norm,
            layer.tail.next_norm,
            layer.head_norms,
            layer.k_cache,
            layer.v_cache,
        )
        for layer in layers
    ]
    tail = make_exchange(geometry.tail, device)
    sizes = (kernel.heads_bytes(geometry), kernel.parts_bytes(geometry, rope_table.shape[0]))
    exchange = (
        torch.zeros(kernel.exchange_bytes(geometry), dtype=torch.uint8, device=device),
        tail.squares,
        tail.launches,
        torch.zeros((geometry.columns, 2), dtype=torch.int32, device=device),
        *(torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes),
    )
    if rope_table.is_cuda:
        kernel.load_fused_batch_step(geometry, device)
    return BatchStepWeights(
        tuple(layers),
        geometry,
        rope_table.contiguous(),
        kernel.make_table(geometry, tensors),
        exchange,
        head_eps,
        scale,
    )


def fused_batch_step(
    heads: Tensor, x: Tensor, weights: BatchStepWeights, batch: Batch, group: int = 0
) -> None:
    """Attention and tail of every layer; x becomes the residual after the last one.

    A token's bits depend on its own request alone. Keys and values of the new tokens are written to
    their slots.

    Args:
        heads: (tokens, rows of q, k and v) float16, contiguous, of the first layer; 1 to
            `geometry.max_tokens` tokens, each the newest of a request.
        x: (tokens, hidden) float32, contiguous, the residual; mutated.
        weights: from `prepare_batch_step`; no other call may use them meanwhile.
        batch: the step.
        group: of the caches of all layers.

    Raises:
        ArgumentError: the shapes or dtypes disagree.
    """
    tokens, shape = x.shape[0], weights.geometry.tail.shape
    is_right = tuple(x.shape) == (tokens, shape.hidden) and x.dtype == torch.float32
    is_right = is_right and tuple(heads.shape) == (tokens, shape.heads_width)
    is_right = is_right and heads.dtype == torch.float16
    is_right = is_right and x.is_contiguous() and heads.is_contiguous()
    most = weights.geometry.max_tokens
    if not is_right or not 1 <= tokens <= most or batch.max_query_len > 1:
        raise ArgumentError(
            f"fused_batch_step: heads is {tuple(heads.shape)} {heads.dtype}, x {tuple(x.shape)} "
            f"{x.dtype}, requests have up to {batch.max_query_len} tokens.",
            hint=f"Pass 1 to {most} contiguous rows of {shape.heads_width} float16 and "
            f"{shape.hidden} float32, each the one new token of a request.",
        )
    if not x.is_cuda:
        _fused_batch_step_torch(heads, x, weights, batch, group)
        return
    args = weights.arguments(heads, x, batch, group)
    kernel.launch_fused_batch_step(args, weights.geometry, x.device)


def _fused_batch_step_torch(
    heads: Tensor, x: Tensor, weights: BatchStepWeights, batch: Batch, group: int
) -> None:
    """Op by op."""
    tail_exchange = make_exchange(weights.geometry.tail, x.device)
    num_heads, head_dim = weights.geometry.heads.num_heads, weights.geometry.heads.head_dim
    following: Tensor | None = heads
    for layer in weights.layers:
        assert following is not None, "only the last layer has no next one"
        turned = following.unflatten(1, (-1, head_dim)).clone()
        norms = layer.head_norms or (None, None)
        rotary_kv_write(
            turned,
            batch.positions,
            weights.rope_table,
            layer.k_cache,
            layer.v_cache,
            batch.slot_mapping[group],
            q_weight=norms[0],
            k_weight=norms[1],
            eps=weights.head_eps,
        )
        attended = decode_attention(
            turned[:, :num_heads], layer.k_cache, layer.v_cache, batch, weights.scale, group=group
        )
        following = fused_layer_tail(attended, x, layer.tail, tail_exchange)
