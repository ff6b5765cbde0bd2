"""What a step of DeepSeek-V4 adds to the cache of a layer, and its queries, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.ops.kv_compress import check_inputs, compress_refusal, kv_compress_step
from tiercel.ops.latent_rope import (
    check_slots,
    check_table,
    has_whole_rows,
    index_key_write,
    latent_rope,
    latent_write,
    rope_refusal,
)
from tiercel.ops.step_index_torch import CompressStep

# Tokens whose queries are turned by the launch that writes the cache. Of more, most programs turn
# queries, and would have the registers of those that form entries.
MOST_QUERY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """Queries of a step's tokens, which pass `latent_rope`.

    Attributes:
        x: (T, heads, d), float32, bfloat16 or float16.
        table: (max_positions, 2, half) float32, cosines and sines.
        eps: of a norm of each head without weight; None for no norm.
        has_hadamard: whether heads pass `hadamard` after the rotation.
        out_dtype: of the results.
    """

    x: Tensor
    table: Tensor
    eps: float | None
    has_hadamard: bool
    out_dtype: torch.dtype

    def turned(self, positions: Tensor) -> Tensor:
        """By a launch of their own."""
        return latent_rope(
            *(self.x, positions, self.table),
            eps=self.eps,
            has_hadamard=self.has_hadamard,
            out_dtype=self.out_dtype,
        )


@dataclass(frozen=True, slots=True)
class LatentVectors:
    """The latent vectors of a step.

    Attributes:
        x: (T, d), float32, bfloat16 or float16: before norm and rotation.
        positions: (T,) int32 or int64.
        table: (max_positions, 2, half) float32, cosines and sines.
        weight: (d,) float32 of the norm.
        eps: of the norm.
        planes: cache and scales as of `latent_write`; mutated.
        slots: (T,) int64; -1 writes nothing.
    """

    x: Tensor
    positions: Tensor
    table: Tensor
    weight: Tensor
    eps: float
    planes: tuple[Tensor, Tensor | None]
    slots: Tensor


@dataclass(frozen=True, slots=True)
class CompressedRows:
    """What one compressor adds in a step.

    Attributes:
        inputs: kv and gate of the step as of `kv_compress_step`.
        bias: (ratio, channels) float32, added to the gates.
        stored: planes of earlier kv and gates; mutated.
        weight: (d,) float32 of the norm.
        eps: of the norm.
        table: (max_positions, 2, half) float32, cosines and sines.
        planes: cache and scales of the entries, as of `latent_write`, or, with `has_hadamard`, as
            of `index_key_write`; mutated.
        has_hadamard: whether the entries are encoded index keys.
    """

    inputs: tuple[Tensor, Tensor]
    bias: Tensor
    stored: tuple[Tensor, Tensor]
    weight: Tensor
    eps: float
    table: Tensor
    planes: tuple[Tensor, Tensor | None]
    has_hadamard: bool = False


def latent_step_write(
    vectors: LatentVectors,
    rotary_dim: int,
    compressors: Sequence[CompressedRows] = (),
    step: CompressStep | None = None,
    queries: Sequence[LatentQueries] = (),
) -> list[Tensor]:
    """Write a step's vectors, the entries that it completes, and the inputs of its compressors.

    Queries of the same tokens may be normed and rotated in the same launch.

    Args:
        vectors: of the step.
        rotary_dim: their last channels, which rotate.
        compressors: up to 2, of one kind of compression.
        step: which entries complete; given with compressors.
        queries: of the step's tokens.

    Returns:
        The queries (T, heads, d) as `latent_rope` gives them, contiguous.

    Raises:
        ArgumentError: shapes or dtypes disagree, or compressors come without a step.

    Source: as `latent_write`, `kv_compress_step` and `index_key_write`.
    """
    if bool(compressors) != (step is not None):
        raise ArgumentError(
            f"latent_step_write: {len(compressors)} compressors "
            f"{'without' if step is None else 'with'} a step.",
            hint="Pass the step of the compressors, and only with them.",
        )
    if step_write_refusal(vectors, rotary_dim, compressors, step):
        _write_one_by_one(vectors, rotary_dim, compressors, step)
        return [query.turned(vectors.positions) for query in queries]
    _check(vectors, compressors, step)
    if query_refusal(vectors, queries):
        _launch(vectors, compressors, step)
        return [query.turned(vectors.positions) for query in queries]
    return _launch(vectors, compressors, step, queries)


def step_write_refusal(
    vectors: LatentVectors,
    rotary_dim: int,
    compressors: Sequence[CompressedRows],
    step: CompressStep | None,
) -> str:
    """Why one kernel does not write a step; "" if it does."""
    reason = rope_refusal(vectors.x, *vectors.planes)
    tables = [vectors.table, *(part.table for part in compressors)]
    if not reason and any(2 * table.shape[2] != rotary_dim for table in tables):
        reason = f"a table rotates other channels than {rotary_dim}"
    if reason or step is None:
        return reason
    if len(compressors) > 2:
        return f"{len(compressors)} compressors"
    for part in compressors:
        reason = compress_refusal(part.inputs, part.stored, step.terms)
        width = part.weight.shape[0]
        if reason or part.bias.dtype != torch.float32:
            return reason or f"a bias is {part.bias.dtype}"
        if part.has_hadamard and not has_whole_rows(part.weight, has_hadamard=True):
            return f"index keys of {width} channels"
        if any(plane is not None and plane.stride(-1) != 1 for plane in part.planes):
            return "the channels of an entry are not next to each other"
    is_dense = step.terms.fresh.is_contiguous() and step.terms.stored.is_contiguous()
    return "" if is_dense else "the terms are strided"


def query_refusal(vectors: LatentVectors, queries: Sequence[LatentQueries]) -> str:
    """Why the launch that writes a step does not turn queries; "" if it does."""
    if vectors.x.shape[0] > MOST_QUERY_TOKENS:
        return f"{vectors.x.shape[0]} tokens are more than {MOST_QUERY_TOKENS}"
    if len(queries) > 2:
        return f"{len(queries)} kinds of queries"
    if len({query.eps for query in queries} - {None}) > 1:
        return "the norms have different eps"
    for query in queries:
        check_table(query.x, vectors.positions, query.table)
        reason = rope_refusal(query.x)
        if reason or not has_whole_rows(query.x, query.has_hadamard):
            return reason or "a Hadamard transform does not fit"
    return ""


def _write_one_by_one(
    vectors: LatentVectors,
    rotary_dim: int,
    compressors: Sequence[CompressedRows],
    step: CompressStep | None,
) -> None:
    rotation, norm = (vectors.positions, vectors.table), (vectors.eps, vectors.weight)
    latent_write(
        *(vectors.x, vectors.planes, vectors.slots),
        rotary_dim=rotary_dim,
        rotation=rotation,
        norm=norm,
    )
    for part in compressors:
        assert step is not None, "compressors come with a step"
        entries = kv_compress_step(
            part.inputs,
            part.bias,
            step.phase,
            part.stored,
            step.input_slots,
            step.terms,
            part.weight,
            part.table,
            eps=part.eps,
        )
        cache, scales = part.planes
        if part.has_hadamard and scales is not None:
            index_key_write(entries, (cache, scales), step.entry_slots)
        else:
            latent_write(entries, part.planes, step.entry_slots, rotary_dim=rotary_dim)


def _check(
    vectors: LatentVectors, compressors: Sequence[CompressedRows], step: CompressStep | None
) -> None:
    check_slots(vectors.planes[0], vectors.slots, vectors.x.shape[:1])
    check_table(vectors.x, vectors.positions, vectors.table)
    for part in compressors:
        assert step is not None, "compressors come with a step"
        ratio = part.bias.shape[0]
        check_inputs(part.inputs, part.stored, step.terms, part.weight, part.table, ratio)
        check_slots(part.planes[0], step.entry_slots, step.terms.entries.shape)
        expected = (vectors.x.shape[0], ratio, part.inputs[0].shape[1])
        found = (part.inputs[0].shape[0], *part.bias.shape)
        if found != expected or step.phase.shape != vectors.x.shape[:1]:
            raise ArgumentError(
                f"latent_step_write: inputs are {tuple(part.inputs[0].shape)}, bias "
                f"{tuple(part.bias.shape)}, phase {tuple(step.phase.shape)}.",
                hint="Pass (tokens, channels), (ratio, channels) and (tokens,).",
            )


def _launch(
    vectors: LatentVectors,
    compressors: Sequence[CompressedRows],
    step: CompressStep | None,
    queries: Sequence[LatentQueries] = (),
) -> list[Tensor]:
    from tiercel.kernels.attention import latent_step_write as kernel

    own = kernel.VectorPart(
        *(vectors.x, vectors.positions, vectors.table.contiguous(), vectors.weight),
        *(vectors.eps, vectors.slots, *vectors.planes),
    )
    parts = [
        kernel.CompressorPart(
            *(part.inputs, part.bias.contiguous(), part.stored, part.weight, part.eps),
            *(part.table.contiguous(), *part.planes, part.has_hadamard),
        )
        for part in compressors
    ]
    indices: list[Tensor] = []
    if step is not None:
        terms = step.terms
        indices = [step.phase, terms.entries, terms.fresh, terms.stored]
        indices += [step.entry_slots, step.input_slots]
    has_free_rows = step is None or step.has_free_rows
    outs = [
        torch.empty(query.x.shape, dtype=query.out_dtype, device=query.x.device)
        for query in queries
    ]
    turned = [
        kernel.QueryPart(
            *(query.x, query.table.contiguous(), out),
            *(query.eps is not None, query.has_hadamard),
        )
        for query, out in zip(queries, outs, strict=True)
    ]
    eps = next((query.eps for query in queries if query.eps is not None), 0.0)
    kernel.launch_latent_step_write(
        own, parts, indices, has_free_rows=has_free_rows, queries=turned, query_eps=eps
    )
    return outs
