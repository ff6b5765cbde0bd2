"""Head norm and partial interleaved RoPE of DeepSeek-V4, and the write to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops import latent_rope_torch as torch_ops

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def latent_rope(
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    *,
    eps: float | None = None,
    weight: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """Norm each head, then rotate its last channels in interleaved pairs.

    Channels (2i, 2i + 1) of the last 2 * half: (a, b) becomes (a cos - b sin, a sin + b cos).

    Args:
        x: (T, d) or (T, heads, d), float32, bfloat16 or float16, with any strides.
        positions: (T,) int32 or int64, each below `table.shape[0]` (not checked on a device).
        table: (max_positions, 2, half) float32, 2 * half <= d, cos then sin.
        eps: added to the mean square of a norm over d; None for no norm.
        weight: (d,) float32, a factor after the norm; None for the norm without weight.
        inverse: rotate by the negative angle, as for the attention output.

    Returns:
        The shape and dtype of x, contiguous; float32 inside, rounded once.

    Raises:
        ArgumentError: shapes or dtypes disagree, or a weight without eps.

    Source: "RoFormer", arXiv 2104.09864, in its interleaved form; the inference code published
    with DeepSeek-V4.
    """
    if x.dim() not in (2, 3) or x.dtype not in _FLOATS:
        raise ArgumentError(
            f"latent_rope: x is {tuple(x.shape)} {x.dtype}.",
            hint="Pass (tokens, d) or (tokens, heads, d) in float32, bfloat16 or float16.",
        )
    _check_table(x, positions, table)
    if weight is not None and (
        eps is None or weight.shape != x.shape[-1:] or weight.dtype != torch.float32
    ):
        raise ArgumentError(
            f"latent_rope: weight is {tuple(weight.shape)} {weight.dtype}, eps={eps}, x has "
            f"{x.shape[-1]} channels.",
            hint=f"Pass ({x.shape[-1]},) torch.float32 together with eps.",
        )
    y = x.float() if eps is None else torch_ops.normalise(x, eps, weight)
    return torch_ops.rotate(y, table[positions], inverse).to(x.dtype)


def latent_cache_write(values: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy latent vectors, or their encoded bytes, to their slots of the cache.

    Args:
        values: (T, width), rounded to the dtype of the cache.
        cache: (num_blocks, entries_per_block, width), with any strides; mutated. Slot 0, in the
            null block, must not be written by a token.
        slot_mapping: (T,) int64, block * entries_per_block + offset; -1 writes nothing. No slot
            above 0 may occur twice.

    Raises:
        ArgumentError: the shapes disagree.

    Source: "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    arXiv 2309.06180.
    """
    if (
        cache.dim() != 3
        or values.shape != (slot_mapping.shape[0], cache.shape[2])
        or slot_mapping.dtype != torch.int64
    ):
        raise ArgumentError(
            f"latent_cache_write: values are {tuple(values.shape)}, the cache "
            f"{tuple(cache.shape)}, slots {tuple(slot_mapping.shape)} {slot_mapping.dtype}.",
            hint="Pass (T, width), (num_blocks, entries_per_block, width) and (T,) torch.int64.",
        )
    torch_ops.write_rows(values, cache, slot_mapping)


def _check_table(x: Tensor, positions: Tensor, table: Tensor) -> None:
    if positions.shape != x.shape[:1] or positions.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"latent_rope: positions are {tuple(positions.shape)} {positions.dtype} but x is "
            f"{tuple(x.shape)}.",
            hint=f"Pass ({x.shape[0]},) torch.int32 or torch.int64.",
        )
    is_table = table.dim() == 3 and table.shape[1] == 2 and table.dtype == torch.float32
    if not is_table or 2 * table.shape[2] > x.shape[-1]:
        raise ArgumentError(
            f"latent_rope: table is {tuple(table.shape)} {table.dtype} but x has {x.shape[-1]} "
            "channels.",
            hint="Pass (max_positions, 2, half) torch.float32 with 2 * half channels or fewer.",
        )
