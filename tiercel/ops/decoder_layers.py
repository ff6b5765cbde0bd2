"""All layers of a dense decoder in one call, on a CPU with the native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.native.decoder_layers import LayerParts, LayersShape, NativeLayers
from tiercel.kernels.native.matrices import NativeMatrix

if TYPE_CHECKING:
    from tiercel.batch import Batch

__all__ = [
    "LayerParts",
    "LayersShape",
    "NativeLayers",
    "NativeMatrix",
    "decoder_layers",
    "layer_attention",
    "prepare_layers",
]


def prepare_layers(
    parts: Sequence[LayerParts], shape: LayersShape, last_update_norm: Tensor | None
) -> NativeLayers:
    """Describe layers to the native library.

    Args:
        parts: of each layer, at least one.
        shape: of all of them.
        last_update_norm: (hidden,) float32, of the norm of the last layer's update; None for none.

    Raises:
        ArgumentError: a matrix or a vector does not fit the shape.
    """
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    for part in parts:
        for name, rows, cols in (
            ("qkv", width, hidden),
            ("output", hidden, shape.num_heads * shape.head_dim),
            ("gate_up", 2 * inner, hidden),
            ("down", hidden, inner),
        ):
            matrices = getattr(part, name)
            if sum(m.shape[0] for m in matrices) != rows or any(
                m.shape[1] != cols for m in matrices
            ):
                raise ArgumentError(
                    f"decoder_layers: {name} is {[m.shape for m in matrices]}.",
                    hint=f"Pass matrices of {rows} rows together and {cols} columns.",
                )
        if [m.shape[0] for m in part.gate_up] != [inner, inner]:
            raise ArgumentError(
                f"decoder_layers: gate and up have {[m.shape[0] for m in part.gate_up]} rows.",
                hint=f"Pass two matrices of {inner} rows.",
            )
        _check_vectors(part, hidden, width, shape.head_dim)
    return NativeLayers(parts, shape, last_update_norm)


def decoder_layers(
    x: Tensor, layers: NativeLayers, batch: Batch, pulse: Callable[[], None]
) -> Tensor:
    """Pass the tokens of a step through all layers.

    Row-invariant: a token's bits do not depend on other tokens of the step, on chunks of its
    prompt, nor on the number of threads.

    Args:
        x: (T, hidden) float32 contiguous, the residual; mutated.
        layers: from `prepare_layers`, with a cache.
        batch: the step, on the CPU.
        pulse: called between layers of a long step.

    Returns:
        x, the residual after the last layer with its update.

    Class: with rounded activations argmax-stable against float32, else sums of float32.

    Sources: the ops `rms_norm`, `linear`, `rotary_kv_write`, `decode_attention`,
    `multi_item_attention` and `act_mul`, whose formulas these are; activations of 8 bits: ggml.
    """
    if x.dtype != torch.float32 or not x.is_contiguous() or x.shape[0] != batch.num_tokens:
        raise ArgumentError(
            f"decoder_layers: x is {x.dtype} {tuple(x.shape)} for {batch.num_tokens} tokens.",
            hint="Pass contiguous float32 rows, one a token.",
        )
    layers.run(x, _tensors(batch), batch.num_reqs, pulse)
    return x


def layer_attention(heads: Tensor, layers: NativeLayers, index: int, batch: Batch) -> Tensor:
    """What one layer computes between its projections in a step, for profiling.

    Args:
        heads: (T, all heads, head_dim) float32 contiguous: q, k and v of each token, mutated. q and
            k are normed and rotated, k and v written to the cache.
        layers: from `prepare_layers`, with a cache.
        index: of the layer.
        batch: the step, on the CPU.

    Returns:
        (T, rows of q) float32.
    """
    return layers.attend(index, heads, _tensors(batch), batch.num_reqs)


def _tensors(batch: Batch) -> dict[str, Tensor | None]:
    """The tensors of `tc_step` by its names."""
    items = batch.items
    return {
        "rows": batch.rows,
        "starts": batch.cu_seqlens_q,
        "seq_lens": batch.seq_lens,
        "positions": batch.positions,
        "slots": batch.slot_mapping.contiguous(),
        "tables": batch.block_tables,
        "prefix_len": None if items is None else torch.tensor(items.prefix_len, dtype=torch.int32),
        "item_start": None if items is None else items.item_start,
    }


def _check_vectors(part: LayerParts, hidden: int, width: int, head_dim: int) -> None:
    q_norm, k_norm = part.head_norms or (None, None)
    for name, vector, length in (
        ("attn_norm", part.attn_norm, hidden),
        ("attn_update_norm", part.attn_update_norm, hidden),
        ("mlp_norm", part.mlp_norm, hidden),
        ("mlp_update_norm", part.mlp_update_norm, hidden),
        ("qkv_bias", part.qkv_bias, width),
        ("output_bias", part.output_bias, hidden),
        ("q_norm", q_norm, head_dim),
        ("k_norm", k_norm, head_dim),
    ):
        if vector is not None and (vector.shape != (length,) or vector.dtype != torch.float32):
            raise ArgumentError(
                f"decoder_layers: {name} is {vector.dtype} {tuple(vector.shape)}.",
                hint=f"Pass float32 ({length},).",
            )
