"""Head norm and partial interleaved RoPE of DeepSeek-V4, and the write to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel import env
from tiercel.errors import ArgumentError
from tiercel.ops import latent_rope_torch as torch_ops
from tiercel.ops.block_quantize import encode_index_keys, encode_kv_entries, hadamard

_MOST_CHANNELS = 2048  # of the kernels
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def latent_rope(
    x: Tensor,
    positions: Tensor,
    table: Tensor,
    *,
    eps: float | None = None,
    weight: Tensor | None = None,
    inverse: bool = False,
    has_hadamard: bool = False,
    out_dtype: torch.dtype | None = None,
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
        has_hadamard: whether the head then passes `hadamard`, as an indexer's query.
        out_dtype: of the result; None for that of x.

    Returns:
        The shape of x, contiguous; float32 inside, rounded once.

    Raises:
        ArgumentError: shapes or dtypes disagree, a weight without eps, or a Hadamard transform of
            channels that are no power of two.

    Source: "RoFormer", arXiv 2104.09864, in its interleaved form; the inference code published
    with DeepSeek-V4.
    """
    if x.dim() not in (2, 3) or x.dtype not in _FLOATS:
        raise ArgumentError(
            f"latent_rope: x is {tuple(x.shape)} {x.dtype}.",
            hint="Pass (tokens, d) or (tokens, heads, d) in float32, bfloat16 or float16.",
        )
    check_table(x, positions, table)
    if weight is not None and (
        eps is None or weight.shape != x.shape[-1:] or weight.dtype != torch.float32
    ):
        raise ArgumentError(
            f"latent_rope: weight is {tuple(weight.shape)} {weight.dtype}, eps={eps}, x has "
            f"{x.shape[-1]} channels.",
            hint=f"Pass ({x.shape[-1]},) torch.float32 together with eps.",
        )
    out_dtype = out_dtype or x.dtype
    if not rope_refusal(x) and has_whole_rows(x, has_hadamard):
        from tiercel.kernels.fused.latent_rope import launch_latent_rope

        out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        heads, outs = (x, out) if x.dim() == 3 else (x.unsqueeze(1), out.unsqueeze(1))
        table = table.contiguous()
        launch_latent_rope(heads, positions, table, outs, eps, weight, inverse, has_hadamard)
        return out
    y = x.float() if eps is None else torch_ops.normalise(x, eps, weight)
    y = torch_ops.rotate(y, table[positions], inverse)
    return (hadamard(y) if has_hadamard else y).to(out_dtype)


def latent_write(
    x: Tensor,
    planes: tuple[Tensor, Tensor | None],
    slot_mapping: Tensor,
    *,
    rotary_dim: int,
    rotation: tuple[Tensor, Tensor] | None = None,
    norm: tuple[float, Tensor | None] | None = None,
) -> None:
    """Norm and rotate latent vectors, and write them to their slots of the cache.

    Args:
        x: (T, d), float32, bfloat16 or float16.
        planes: the cache (num_blocks, entries_per_block, d) of a float dtype and None, or the
            bytes of `encode_kv_entries` in two: (..., d + rotary_dim) uint8 and its scales; with
            any strides; mutated.
        slot_mapping: (T,) int64, as for `latent_cache_write`.
        rotary_dim: the last channels, which rotate.
        rotation: positions and table of `latent_rope`; None where x is rotated.
        norm: eps and weight of `latent_rope`; None for no norm.

    Raises:
        ArgumentError: shapes or dtypes disagree.

    Source: as `latent_rope` and `encode_kv_entries`.
    """
    eps, weight = norm or (None, None)
    cache, scales = planes
    check_slots(cache, slot_mapping, x.shape[:1])
    if not rope_refusal(x, *planes):
        from tiercel.kernels.fused.latent_rope import launch_latent_write

        if rotation is not None:
            check_table(x, *rotation)
        launch_latent_write(x, rotation, norm, planes, slot_mapping, rotary_dim, False)
        return
    if rotation is not None:
        x = latent_rope(x, *rotation, eps=eps, weight=weight, out_dtype=torch.float32)
    elif eps is not None:
        x = torch_ops.normalise(x, eps, weight)
    if scales is None:
        torch_ops.write_rows(x, cache, slot_mapping)
        return
    encoded, width = encode_kv_entries(x, rotary_dim), cache.shape[2]
    torch_ops.write_rows(encoded[:, :width], cache, slot_mapping)
    torch_ops.write_rows(encoded[:, width:], scales, slot_mapping)


def index_key_write(x: Tensor, planes: tuple[Tensor, Tensor], slot_mapping: Tensor) -> None:
    """Rotate index keys by `hadamard`, encode them and write them to their slots of the cache.

    Args:
        x: (T, n) float, n a power of two, >= 32.
        planes: the bytes of `encode_index_keys` in two: (num_blocks, entries_per_block, n / 2)
            uint8 and its scales, (..., n / 32) uint8; with any strides; mutated.
        slot_mapping: (T,) int64, as for `latent_cache_write`.

    Raises:
        ArgumentError: shapes or dtypes disagree.

    Source: as `encode_index_keys`.
    """
    cache, scales = planes
    check_slots(cache, slot_mapping, x.shape[:1])
    if not rope_refusal(x, *planes) and has_whole_rows(x, True):
        from tiercel.kernels.fused.latent_rope import launch_latent_write

        launch_latent_write(x, None, None, planes, slot_mapping, 0, True)
        return
    encoded, width = encode_index_keys(hadamard(x)), cache.shape[2]
    torch_ops.write_rows(encoded[:, :width], cache, slot_mapping)
    torch_ops.write_rows(encoded[:, width:], scales, slot_mapping)


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
    if cache.is_floating_point() and not rope_refusal(values, cache):
        from tiercel.kernels.fused.latent_rope import launch_latent_write

        launch_latent_write(values, None, None, (cache, None), slot_mapping, 0, False)
        return
    torch_ops.write_rows(values, cache, slot_mapping)


def rope_refusal(x: Tensor, *planes: Tensor | None) -> str:
    """Why the kernels do not take some vectors; "" if they do.

    planes: of the cache that they are written to.
    """
    reasons = (
        (not x.is_cuda, "the vectors are not on a GPU"),
        (not env.has_rope_kernel(), "TIERCEL_ROPE_KERNEL=0"),
        (x.dtype not in _FLOATS, "the vectors are not floats of up to 32 bits"),
        (x.shape[-1] > _MOST_CHANNELS, "a vector does not fit in registers"),
        (x.shape[-1] % 2 == 1, "the channels are odd"),
        (
            any(part is not None and part.stride(-1) != 1 for part in (x, *planes)),
            "the channels of a vector are not next to each other",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def has_whole_rows(x: Tensor, has_hadamard: bool) -> bool:
    """Whether a Hadamard transform fits the kernel's rows."""
    width = x.shape[-1]
    return not has_hadamard or (width >= 32 and width & (width - 1) == 0)


def check_slots(cache: Tensor, slot_mapping: Tensor, shape: torch.Size) -> None:
    """Raise unless there is a slot of the cache for each of (T,) vectors."""
    if cache.dim() != 3 or slot_mapping.shape != shape or slot_mapping.dtype != torch.int64:
        raise ArgumentError(
            f"latent_write: the cache is {tuple(cache.shape)}, slots {tuple(slot_mapping.shape)} "
            f"{slot_mapping.dtype}.",
            hint=f"Pass (num_blocks, entries_per_block, width) and {tuple(shape)} torch.int64.",
        )


def check_table(x: Tensor, positions: Tensor, table: Tensor) -> None:
    """Raise unless positions and table fit the vectors."""
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
