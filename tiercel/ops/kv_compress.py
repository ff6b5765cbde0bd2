"""The compressors of DeepSeek-V4: cache entries of 4 overlapping (CSA) or 128 (HCA) tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tiercel import env
from tiercel.errors import ArgumentError
from tiercel.ops import kv_compress_torch as torch_ops
from tiercel.ops.kv_compress_torch import Terms
from tiercel.ops.latent_rope import latent_cache_write

_MOST_CHANNELS = 2048  # of an entry, for the kernels

_INTEGERS = (torch.int32, torch.int64)


def completing_tokens(positions: Tensor, *, ratio: int, capacity: int) -> Tensor:
    """Find the tokens of a step that complete an entry, without host sync.

    Args:
        positions: (T,) int32 or int64; -1 for padding.
        ratio: tokens per entry, m >= 1.
        capacity: length of the result, >= 0. Sequences with T tokens in all complete at most
            T // m + sequences entries; tokens beyond the capacity are left out.

    Returns:
        (capacity,) int64: rows of the step in order, then -1.

    Raises:
        ArgumentError: shapes or dtypes disagree, or a size is out of range.

    Source: compaction by a prefix sum.
    """
    if positions.dim() != 1 or positions.dtype not in _INTEGERS:
        raise ArgumentError(
            f"completing_tokens: positions are {tuple(positions.shape)} {positions.dtype}.",
            hint="Pass (tokens,) torch.int32 or torch.int64.",
        )
    if ratio < 1 or capacity < 0:
        raise ArgumentError(
            f"completing_tokens: ratio={ratio}, capacity={capacity}.",
            hint="Pass ratio >= 1 and capacity >= 0.",
        )
    return torch_ops.find_completing(positions, ratio, capacity)


def compress_terms(
    tokens: Tensor,
    positions: Tensor,
    seq_ids: Tensor,
    cu_seqlens_q: Tensor,
    block_tables: Tensor,
    *,
    ratio: int,
    has_overlap: bool,
    block_size: int,
    rows_per_block: int,
) -> Terms:
    """Say for each entry to form where the inputs of its terms are.

    Position p of a sequence is a row of this step, or it is stored in slot block *
    rows_per_block + p % block_size % rows_per_block, block = block_tables[sequence, p //
    block_size].

    Args:
        tokens: (N,) int64, rows of this step that complete an entry, or -1: see
            `completing_tokens`.
        positions: (T,) int32 or int64 of this step's rows; a sequence's rows are consecutive.
        seq_ids: (T,) int32 or int64, each row's sequence.
        cu_seqlens_q: (sequences + 1,) int32 or int64, first row of each sequence.
        block_tables: (sequences, columns) int32 or int64.
        ratio: tokens per entry.
        has_overlap: whether the `ratio` tokens before are terms, too (CSA).
        block_size: tokens of a block.
        rows_per_block: stored rows of a block; at least ratio, or 2 * ratio with overlap.

    Returns:
        Terms of N entries.

    Raises:
        ArgumentError: shapes or dtypes disagree, or sizes do not divide.

    Source: the inference code published with DeepSeek-V4 for the terms.
    """
    _check_step("compress_terms", positions, seq_ids, cu_seqlens_q, block_tables)
    num_terms = ratio * (2 if has_overlap else 1)
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise ArgumentError(
            f"compress_terms: tokens are {tuple(tokens.shape)} {tokens.dtype}.",
            hint="Pass (entries,) torch.int64.",
        )
    _check_block("compress_terms", block_size, rows_per_block)
    if block_size % ratio or rows_per_block < num_terms:
        raise ArgumentError(
            f"compress_terms: ratio={ratio}, block_size={block_size}, "
            f"rows_per_block={rows_per_block}.",
            hint=f"Blocks are whole entries and store at least {num_terms} rows.",
        )
    sizes = (ratio, num_terms, block_size, rows_per_block)
    return torch_ops.make_terms(tokens, positions, seq_ids, cu_seqlens_q, block_tables, sizes)


def kv_compress(
    kv: Tensor,
    gate: Tensor,
    stored_kv: Tensor,
    stored_gate: Tensor,
    terms: Terms,
    weight: Tensor,
    table: Tensor,
    *,
    ratio: int,
    eps: float,
) -> Tensor:
    """Form cache entries: softmax over an entry's terms per channel, RMS norm, RoPE.

    c = sum over terms j of softmax_j(gate_j) * kv_j; then c / rms(c) * weight, rotated by the
    position ratio * entry of the entry's first token. With overlap, terms of the tokens before use
    channels 0 .. d - 1 and the entry's own tokens channels d .. 2 d - 1. The result does not
    depend on how a sequence is cut into steps.

    Args:
        kv: (T, d) float32, or (T, 2 d) with overlap: this step's projections.
        gate: the shape of kv, float32: this step's gates with the position bias added.
        stored_kv: (num_blocks, rows_per_block, d or 2 d) float32, earlier inputs; any strides.
        stored_gate: the shape of stored_kv, float32.
        terms: see `compress_terms`; N entries of `ratio` terms, or 2 * ratio with overlap.
        weight: (d,) float32 of the norm.
        table: (max_positions, 2, half) float32, cosines and sines.
        ratio: tokens per entry.
        eps: of the norm.

    Returns:
        (N, d) float32; zeros in rows without entry. Memory: about 24 bytes per entry, term and
        channel.

    Raises:
        ArgumentError: shapes or dtypes disagree.

    Source: the inference code published with DeepSeek-V4.
    """
    width = check_inputs((kv, gate), (stored_kv, stored_gate), terms, weight, table, ratio)
    if kv.shape[0] == 0:  # no rows, so no entries: -1 throughout
        return kv.new_zeros(terms.entries.shape[0], width)
    if not compress_refusal((kv, gate), (stored_kv, stored_gate), terms):
        from tiercel.kernels.attention.kv_compress import launch_kv_compress

        out = kv.new_empty(terms.entries.shape[0], width)
        planes = (terms.entries, terms.fresh, terms.stored)
        stored = (stored_kv, stored_gate)
        launch_kv_compress(
            (kv, gate), None, stored, planes, weight, table.contiguous(), out, ratio, eps
        )
        return out
    sums = torch_ops.compress((kv, stored_kv), (gate, stored_gate), terms, width)
    return torch_ops.finish(sums, terms.entries, ratio, weight, eps, table)


def kv_compress_step(
    inputs: tuple[Tensor, Tensor],
    bias: Tensor,
    phase: Tensor,
    stored: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    terms: Terms,
    weight: Tensor,
    table: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Add the position bias to a step's gates, form its entries, and store its inputs.

    Args:
        inputs: kv and gates of the step, as in `kv_compress` but without the position bias.
        bias: (ratio, channels) float32, added to the gates.
        phase: (T,) int64, positions modulo the ratio.
        stored: kv and gates of earlier steps, as in `kv_compress`; mutated.
        slot_mapping: (T,) int64, where the step's inputs are stored, as in `latent_cache_write`.
        terms: as in `kv_compress`.
        weight: of the norm.
        table: cosines and sines.
        eps: of the norm.

    Returns:
        (N, d) float32 entries; zeros in rows without entry.

    Raises:
        ArgumentError: shapes or dtypes disagree.

    Source: as `kv_compress`.
    """
    kv, gate = inputs
    if (
        bias.dim() != 2
        or bias.shape[1:] != kv.shape[1:]
        or (phase.shape, phase.dtype) != (kv.shape[:1], torch.int64)
    ):
        raise ArgumentError(
            f"kv_compress_step: bias is {tuple(bias.shape)}, phase {tuple(phase.shape)} "
            f"{phase.dtype}, kv {tuple(kv.shape)}.",
            hint="Pass (ratio, channels) and (tokens,) torch.int64.",
        )
    ratio = bias.shape[0]
    is_refused = (
        compress_refusal(inputs, stored, terms) or kv.shape[0] == 0 or bias.dtype != torch.float32
    )
    if is_refused:
        gate = gate + bias[phase]
        entries = kv_compress(kv, gate, *stored, terms, weight, table, ratio=ratio, eps=eps)
        for values, cache in zip((kv, gate), stored, strict=True):
            latent_cache_write(values, cache, slot_mapping)
        return entries
    from tiercel.kernels.attention.kv_compress import launch_input_write, launch_kv_compress

    width = check_inputs(inputs, stored, terms, weight, table, ratio)
    entries, bias = kv.new_empty(terms.entries.shape[0], width), bias.contiguous()
    planes = (terms.entries, terms.fresh, terms.stored)
    launch_kv_compress(
        inputs, bias, stored, planes, weight, table.contiguous(), entries, ratio, eps
    )
    launch_input_write(inputs, bias, phase, slot_mapping, stored)  # after all reads
    return entries


def compress_refusal(
    inputs: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], terms: Terms
) -> str:
    """Why the kernels do not take some inputs; "" if they do."""
    reasons = (
        (not inputs[0].is_cuda, "the inputs are not on a GPU"),
        (not env.has_compress_kernel(), "TIERCEL_COMPRESS_KERNEL=0"),
        (inputs[0].shape[1] > 2 * _MOST_CHANNELS, "an entry does not fit in registers"),
        (inputs[0].shape[1] % 4 != 0, "the channels of an entry are odd"),
        (
            any(part.stride(-1) != 1 for part in (*inputs, *stored)),
            "the channels of an input are not next to each other",
        ),
        (
            terms.fresh.stride(-1) != 1 or terms.fresh.stride() != terms.stored.stride(),
            "the terms are strided",
        ),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def check_inputs(
    inputs: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    terms: Terms,
    weight: Tensor,
    table: Tensor,
    ratio: int,
) -> int:
    """Check what `kv_compress` takes; the channels of an entry."""
    (kv, gate), (stored_kv, stored_gate) = inputs, stored
    width = weight.shape[0] if weight.dim() == 1 else 0
    if kv.dim() != 2 or kv.shape[1] not in (width, 2 * width) or gate.shape != kv.shape:
        raise ArgumentError(
            f"kv_compress: kv is {tuple(kv.shape)}, gate {tuple(gate.shape)}, weight "
            f"{tuple(weight.shape)}.",
            hint="Pass (tokens, d), or (tokens, 2 d) with overlap, and a weight of (d,).",
        )
    if (
        stored_kv.dim() != 3
        or stored_kv.shape[2] != kv.shape[1]
        or stored_gate.shape != (stored_kv.shape)
    ):
        raise ArgumentError(
            f"kv_compress: stored inputs are {tuple(stored_kv.shape)} and "
            f"{tuple(stored_gate.shape)} but kv is {tuple(kv.shape)}.",
            hint=f"Pass (blocks, rows, {kv.shape[1]}) twice.",
        )
    for name, tensor in (
        ("kv", kv),
        ("gate", gate),
        ("stored_kv", stored_kv),
        ("stored_gate", stored_gate),
        ("weight", weight),
    ):
        if tensor.dtype != torch.float32:
            raise ArgumentError(f"kv_compress: {name} is {tensor.dtype}.", hint="Pass float32.")
    _check_terms(terms, ratio * (kv.shape[1] // width))
    is_table = table.dim() == 3 and table.shape[1] == 2 and table.dtype == torch.float32
    if not is_table or 2 * table.shape[2] > width:
        raise ArgumentError(
            f"kv_compress: table is {tuple(table.shape)} {table.dtype}, d is {width}.",
            hint="Pass (max_positions, 2, half) torch.float32 with 2 * half <= d.",
        )
    return width


def _check_terms(terms: Terms, num_terms: int) -> None:
    shapes = [tuple(plane.shape) for plane in (terms.entries, terms.fresh, terms.stored)]
    count = terms.entries.numel()
    if shapes != [(count,), (count, num_terms), (count, num_terms)]:
        raise ArgumentError(
            f"kv_compress: entries, fresh and stored are {shapes}.",
            hint=f"Pass ({count},) and twice ({count}, {num_terms}).",
        )


def _check_block(name: str, block_size: int, rows_per_block: int) -> None:
    if rows_per_block < 1 or block_size < 1 or block_size % rows_per_block:
        raise ArgumentError(
            f"{name}: block_size={block_size}, rows_per_block={rows_per_block}.",
            hint="The rows of a block must divide its tokens.",
        )


def _check_step(
    name: str, positions: Tensor, seq_ids: Tensor, cu_seqlens_q: Tensor, block_tables: Tensor
) -> None:
    sizes = [tuple(plane.shape) for plane in (positions, seq_ids, cu_seqlens_q, block_tables)]
    sound = (
        positions.dim() == 1
        and seq_ids.shape == positions.shape
        and block_tables.dim() == 2
        and cu_seqlens_q.shape == (block_tables.shape[0] + 1,)
    )
    planes = (positions, seq_ids, cu_seqlens_q, block_tables)
    if not sound or any(plane.dtype not in _INTEGERS for plane in planes):
        raise ArgumentError(
            f"{name}: positions, seq_ids, cu_seqlens_q and block_tables are {sizes} of "
            f"{[str(plane.dtype) for plane in planes]}.",
            hint="Pass (T,), (T,), (sequences + 1,) and (sequences, columns) of integers.",
        )
