"""All that a step of DeepSeek-V4 adds to the cache of one layer, and its queries, in one launch.

    program         writes
    entry           one entry of a compressor, from inputs of this step and of the cache
    index key       one key of the indexer's compressor, likewise
    vector          one token's latent vector, normed and rotated
    query           some heads of a token's queries, likewise
    index query     some heads of the indexer's queries, rotated
    inputs          one token's kv and gate of both compressors

Vectors and entries are encoded as the cache has them. Where an input of a step takes the row of one
that an entry of the same step reads (long chunks), the inputs have a launch of their own behind.

Floor: inputs, vectors and entries move once; a decode step is one launch's latency.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from tiercel.kernels.attention.kv_compress import (
    TERMS,
    compressed_entry,
    row_strides,
    store_inputs,
)
from tiercel.kernels.fused.latent_rope import (
    FP4,
    FP8,
    PLAIN,
    cache_constants,
    hadamard,
    normed,
    rotated,
    shape_constants,
    store_entry,
    turn_heads,
)
from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

WARPS = 8  # of all programs: one number for all sizes of a step, so that sums keep their order
MOST_COMPRESSORS, MOST_QUERIES = 2, 2
ELEMENTS = 4096  # of queries in a program
STEP_POINTERS: Final = 6
COMPRESSOR_POINTERS: Final = 9
QUERY_POINTERS: Final = 3


@triton.jit
def _write_entry(
    row,
    entries_ptr,
    fresh_ptr,
    stored_ptr,
    entry_slots_ptr,
    kv_ptr,
    gate_ptr,
    bias_ptr,
    stored_kv_ptr,
    stored_gate_ptr,
    weight_ptr,
    table_ptr,
    cache_ptr,
    scales_ptr,
    eps,
    TERM_SIZES: tl.constexpr,  # tuples as in the kernel
    SIZES: tl.constexpr,
    FRESH: tl.constexpr,
    STORED_KV: tl.constexpr,
    STORED_GATE: tl.constexpr,
    STRIDES: tl.constexpr,
):
    """One entry of one compressor."""
    entry = tl.load(entries_ptr + row)
    slot = tl.load(entry_slots_ptr + row)
    if (entry >= 0) & (slot >= 0):
        COUNT: tl.constexpr = TERM_SIZES[1]
        WIDTH: tl.constexpr = SIZES[0]
        BLOCK: tl.constexpr = SIZES[1]
        HALF: tl.constexpr = SIZES[2]
        x = compressed_entry(
            *(kv_ptr, gate_ptr, bias_ptr, stored_kv_ptr, stored_gate_ptr),
            *(fresh_ptr + row * COUNT, stored_ptr + row * COUNT),
            *(weight_ptr, table_ptr, entry, eps, FRESH, STORED_KV, STORED_GATE),
            *(TERM_SIZES[0], COUNT, TERM_SIZES[2], WIDTH, BLOCK, HALF),
        )
        if SIZES[6] > 0:
            x = hadamard(x, SIZES[6], SIZES[7], 1, BLOCK)
        store_entry(
            *(x, cache_ptr, scales_ptr, slot, STRIDES, SIZES[3]),
            *(SIZES[4], WIDTH, BLOCK, HALF, SIZES[5]),
        )


@triton.jit
def _write_vector(
    token,
    x_ptr,
    positions_ptr,
    table_ptr,
    weight_ptr,
    slots_ptr,
    cache_ptr,
    scales_ptr,
    eps,
    X_STRIDE: tl.constexpr,
    STRIDES: tl.constexpr,
    WINDOW: tl.constexpr,  # a tuple as in the kernel
):
    """One token's latent vector."""
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        WIDTH: tl.constexpr = WINDOW[0]
        BLOCK: tl.constexpr = WINDOW[1]
        HALF: tl.constexpr = WINDOW[2]
        channel = tl.arange(0, BLOCK)
        place = x_ptr + token * X_STRIDE + channel[None, :]
        x = tl.load(place, mask=channel[None, :] < WIDTH, other=0.0).to(tl.float32)
        x = normed(x, weight_ptr, channel, eps, WIDTH)
        position = tl.load(positions_ptr + token)
        x = rotated(x, table_ptr, position, WIDTH, BLOCK, HALF, False)
        store_entry(
            *(x, cache_ptr, scales_ptr, slot, STRIDES, WINDOW[3]),
            *(WINDOW[4], WIDTH, BLOCK, HALF, WINDOW[5]),
        )


@triton.jit
def _write_inputs(
    token,
    phase_ptr,
    slot,
    kv_ptr,
    gate_ptr,
    bias_ptr,
    stored_kv_ptr,
    stored_gate_ptr,
    TERM_SIZES: tl.constexpr,  # tuples as in the kernel
    FRESH: tl.constexpr,
    STORED_KV: tl.constexpr,
    STORED_GATE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One token's inputs of one compressor."""
    phase = tl.load(phase_ptr + token)
    store_inputs(
        *(kv_ptr, gate_ptr, bias_ptr, stored_kv_ptr, stored_gate_ptr),
        *(token, phase, slot, tl.arange(0, CHANNELS[1])),
        *(FRESH, STORED_KV, STORED_GATE, TERM_SIZES[0], CHANNELS[0]),
    )


@triton.jit
def _turn_query(
    place,
    x_ptr,
    table_ptr,
    out_ptr,
    positions_ptr,
    eps,
    HEADS: tl.constexpr,  # tuples as in the kernel
    STRIDES: tl.constexpr,
):
    """Some heads of one token's queries; `place` counts them through all tokens."""
    PROGRAMS: tl.constexpr = (HEADS[0] + HEADS[1] - 1) // HEADS[1]
    turn_heads(
        *(place // PROGRAMS, place % PROGRAMS * HEADS[1]),
        *(x_ptr, positions_ptr, table_ptr, None, out_ptr, eps),
        *(STRIDES, HEADS[0], HEADS[1], HEADS[2], HEADS[3], HEADS[4]),
        *(HEADS[5], False, HEADS[6], HEADS[7]),
    )


@triton.jit
def _turn_queries(
    place,
    x0_ptr,
    table0_ptr,
    out0_ptr,
    x1_ptr,
    table1_ptr,
    out1_ptr,
    positions_ptr,
    eps,
    num_heads0,
    num_heads1,
    QUERIES: tl.constexpr,
    HEADS0: tl.constexpr,
    STRIDES0: tl.constexpr,
    HEADS1: tl.constexpr,
    STRIDES1: tl.constexpr,
):
    """Some heads of one token's queries of one kind, if the program is one of theirs."""
    if QUERIES > 0:  # noqa: SIM102 - known when the kernel is compiled
        if (place >= 0) & (place < num_heads0):
            _turn_query(place, x0_ptr, table0_ptr, out0_ptr, positions_ptr, eps, HEADS0, STRIDES0)
    if QUERIES > 1:
        place -= num_heads0
        if (place >= 0) & (place < num_heads1):
            _turn_query(place, x1_ptr, table1_ptr, out1_ptr, positions_ptr, eps, HEADS1, STRIDES1)


# Not specialised: a kernel for each divisibility of a count would be compiled between two steps.
@triton.jit(
    do_not_specialize=[
        *("eps", "eps0", "eps1", "eps2", "num_entries", "num_vectors", "num_heads0", "num_heads1"),
    ]
)
def latent_step_write_kernel(
    x_ptr, positions_ptr,  # (tokens, WIDTH), inner stride 1; (tokens,)
    window_table_ptr, window_weight_ptr, window_slots_ptr,  # (positions, 2, HALF); (WIDTH,); int64
    window_ptr,  # (blocks, PER_BLOCK, channels or bytes), inner stride 1
    window_scales_ptr,  # (blocks, PER_BLOCK, SCALES) uint8, inner stride 1, or None
    phase_ptr, entries_ptr, fresh_ptr, stored_ptr,  # (tokens,), (N,), twice (N, COUNT) int64
    entry_slots_ptr, input_slots_ptr,  # (N,), (tokens,) int64
    # Of both compressors, names as in `kv_compress_kernel`; cache and scales of their entries.
    kv0_ptr, gate0_ptr, bias0_ptr, stored_kv0_ptr, stored_gate0_ptr, weight0_ptr, table0_ptr,
    cache0_ptr, scales0_ptr,
    kv1_ptr, gate1_ptr, bias1_ptr, stored_kv1_ptr, stored_gate1_ptr, weight1_ptr, table1_ptr,
    cache1_ptr, scales1_ptr,
    # Queries (tokens, heads, width), inner stride 1; their tables; results, contiguous.
    query0_ptr, query_table0_ptr, query_out0_ptr, query1_ptr, query_table1_ptr, query_out1_ptr,
    eps, eps0, eps1, eps2,  # of vectors, of both compressors, of the queries' norms
    # Programs of each compressor, of vectors, of both queries; the others write inputs.
    num_entries, num_vectors, num_heads0, num_heads1,
    X_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,  # WIDTH, BLOCK, HALF, PER_BLOCK, FORMAT, SCALES
    WINDOW_STRIDES: tl.constexpr, COMPRESSORS: tl.constexpr,
    TERM_SIZES: tl.constexpr,  # RATIO, COUNT, TERMS
    SIZES0: tl.constexpr,  # WIDTH, BLOCK, HALF, PER_BLOCK, FORMAT, SCALES, HADAMARD, LOG
    # Of inputs, as in `kv_compress_kernel`; Triton 3.6 takes no tuple of tuples.
    FRESH0: tl.constexpr, STORED_KV0: tl.constexpr, STORED_GATE0: tl.constexpr,
    CHANNELS0: tl.constexpr,  # of inputs, and a power of two no less
    STRIDES0: tl.constexpr,  # of the cache
    SIZES1: tl.constexpr, FRESH1: tl.constexpr, STORED_KV1: tl.constexpr,
    STORED_GATE1: tl.constexpr, CHANNELS1: tl.constexpr, STRIDES1: tl.constexpr,
    QUERIES: tl.constexpr,  # how many there are
    HEADS0: tl.constexpr,  # HEADS, ROWS, WIDTH, BLOCK, HALF, HAS_NORM, HADAMARD, LOG
    QUERY_STRIDES0: tl.constexpr, HEADS1: tl.constexpr, QUERY_STRIDES1: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One entry, one index key, one vector, or one token's inputs."""
    wait_for_inputs(IS_DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    first_vector = COMPRESSORS * num_entries
    if COMPRESSORS > 0:  # noqa: SIM102 - known when the kernel is compiled
        if place < num_entries:
            _write_entry(
                *(place, entries_ptr, fresh_ptr, stored_ptr, entry_slots_ptr),
                *(kv0_ptr, gate0_ptr, bias0_ptr, stored_kv0_ptr, stored_gate0_ptr),
                *(weight0_ptr, table0_ptr, cache0_ptr, scales0_ptr, eps0),
                *(TERM_SIZES, SIZES0, FRESH0, STORED_KV0, STORED_GATE0, STRIDES0),
            )
    if COMPRESSORS > 1:  # noqa: SIM102 - likewise
        if (place >= num_entries) & (place < first_vector):
            _write_entry(
                *(place - num_entries, entries_ptr, fresh_ptr, stored_ptr, entry_slots_ptr),
                *(kv1_ptr, gate1_ptr, bias1_ptr, stored_kv1_ptr, stored_gate1_ptr),
                *(weight1_ptr, table1_ptr, cache1_ptr, scales1_ptr, eps1),
                *(TERM_SIZES, SIZES1, FRESH1, STORED_KV1, STORED_GATE1, STRIDES1),
            )
    token = place - first_vector
    if (token >= 0) & (token < num_vectors):
        _write_vector(
            *(token, x_ptr, positions_ptr, window_table_ptr, window_weight_ptr, window_slots_ptr),
            *(window_ptr, window_scales_ptr, eps, X_STRIDE, WINDOW_STRIDES, WINDOW),
        )
    token -= num_vectors
    _turn_queries(
        *(token, query0_ptr, query_table0_ptr, query_out0_ptr),
        *(query1_ptr, query_table1_ptr, query_out1_ptr, positions_ptr, eps2),
        *(num_heads0, num_heads1, QUERIES, HEADS0, QUERY_STRIDES0, HEADS1, QUERY_STRIDES1),
    )
    if COMPRESSORS > 0:
        token -= num_heads0 + num_heads1
        if token >= 0:
            slot = tl.load(input_slots_ptr + token)
            if slot >= 0:
                _write_inputs(
                    *(token, phase_ptr, slot, kv0_ptr, gate0_ptr, bias0_ptr, stored_kv0_ptr),
                    *(stored_gate0_ptr, TERM_SIZES, FRESH0, STORED_KV0, STORED_GATE0, CHANNELS0),
                )
                if COMPRESSORS > 1:
                    _write_inputs(
                        *(token, phase_ptr, slot, kv1_ptr, gate1_ptr, bias1_ptr, stored_kv1_ptr),
                        *(stored_gate1_ptr, TERM_SIZES, FRESH1, STORED_KV1),
                        *(STORED_GATE1, CHANNELS1),
                    )


@dataclass(frozen=True, slots=True)
class VectorPart:
    """The latent vectors of a step.

    Attributes:
        x: (T, width), inner stride 1.
        positions: (T,).
        table: (positions, 2, half) float32, contiguous.
        weight: (width,) float32 of the norm.
        eps: of the norm.
        slots: (T,) int64.
        cache: (blocks, entries, channels or bytes), inner stride 1.
        scales: of encoded vectors, else None.
    """

    x: Tensor
    positions: Tensor
    table: Tensor
    weight: Tensor
    eps: float
    slots: Tensor
    cache: Tensor
    scales: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        """Pointers of the kernel."""
        planes = [self.slots, self.cache, self.scales]
        return [self.x, self.positions, self.table, self.weight, *planes]

    def constants(self) -> tuple[object, ...]:
        """X_STRIDE, WINDOW and WINDOW_STRIDES."""
        width, half = self.x.shape[1], self.table.shape[2]
        strides, scales = cache_constants(self.cache, self.scales)
        block, _, _ = shape_constants(width, has_hadamard=False)
        form = PLAIN if self.scales is None else FP8
        return self.x.stride(0), (width, block, half, strides[0], form, scales), strides[1:]


@dataclass(frozen=True, slots=True)
class CompressorPart:
    """What one compressor adds.

    Attributes:
        inputs: kv and gate of the step, (T, channels) float32, inner stride 1.
        bias: (ratio, channels) float32, contiguous.
        stored: kv and gate of the cache, (blocks, rows, channels) float32, inner stride 1.
        weight: (width,) float32 of the norm.
        eps: of the norm.
        table: (positions, 2, half) float32, contiguous.
        cache: of the entries.
        scales: of encoded entries, else None.
        has_hadamard: whether entries pass that rotation, as index keys.
    """

    inputs: tuple[Tensor, Tensor]
    bias: Tensor
    stored: tuple[Tensor, Tensor]
    weight: Tensor
    eps: float
    table: Tensor
    cache: Tensor
    scales: Tensor | None
    has_hadamard: bool

    def tensors(self) -> list[Tensor | None]:
        """Pointers of the kernel."""
        others = [self.weight, self.table, self.cache, self.scales]
        return [*self.inputs, self.bias, *self.stored, *others]

    def constants(self) -> tuple[object, ...]:
        """SIZES, FRESH, STORED_KV, STORED_GATE, CHANNELS and STRIDES of the kernel."""
        (width,), half, channels = self.weight.shape, self.table.shape[2], self.bias.shape[1]
        block, factor, log = shape_constants(width, has_hadamard=self.has_hadamard)
        strides, scales = cache_constants(self.cache, self.scales)
        form = PLAIN if self.scales is None else FP4 if self.has_hadamard else FP8
        kv, gate = self.inputs
        return (
            (width, block, half, strides[0], form, scales, factor, log),
            (kv.stride(0), gate.stride(0)),
            *map(row_strides, self.stored),
            (channels, triton.next_power_of_2(channels)),
            strides[1:],
        )


@dataclass(frozen=True, slots=True)
class QueryPart:
    """Queries of a step that are normed and rotated.

    Attributes:
        x: (T, heads, width), inner stride 1.
        table: (positions, 2, half) float32, contiguous.
        out: the shape of x, contiguous.
        has_norm: whether heads pass a norm without weight.
        has_hadamard: whether they pass that rotation, as index queries.
    """

    x: Tensor
    table: Tensor
    out: Tensor
    has_norm: bool
    has_hadamard: bool

    def tensors(self) -> list[Tensor | None]:
        """Pointers of the kernel."""
        return [self.x, self.table, self.out]

    def constants(self) -> tuple[tuple[object, ...], tuple[int, int]]:
        """HEADS and QUERY_STRIDES of the kernel."""
        _, num_heads, width = self.x.shape
        block, factor, log = shape_constants(width, has_hadamard=self.has_hadamard)
        sizes = (num_heads, self._rows(), width, block, self.table.shape[2])
        return (*sizes, self.has_norm, factor, log), (self.x.stride(0), self.x.stride(1))

    def _rows(self) -> int:
        """Heads of a program."""
        _, num_heads, width = self.x.shape
        block, _, _ = shape_constants(width, has_hadamard=self.has_hadamard)
        return int(min(max(1, ELEMENTS // block), triton.next_power_of_2(num_heads)))

    @property
    def num_programs(self) -> int:
        """Programs of all tokens."""
        return self.x.shape[0] * -(-self.x.shape[1] // self._rows())


@functools.cache
def _launch(
    window: tuple[object, ...],
    term_sizes: tuple[int, int],
    compressors: tuple[tuple[object, ...], ...],
    queries: tuple[tuple[object, ...], ...] = (),
) -> TritonLaunch:
    ratio, count = term_sizes
    terms = min(TERMS, triton.next_power_of_2(count))
    names = ("SIZES", "FRESH", "STORED_KV", "STORED_GATE", "CHANNELS", "STRIDES")
    constants = dict(zip(("X_STRIDE", "WINDOW", "WINDOW_STRIDES"), window, strict=True))
    constants |= {"COMPRESSORS": len(compressors), "TERM_SIZES": (ratio, count, terms)}
    for i in range(MOST_COMPRESSORS):
        given = compressors[i] if i < len(compressors) else (0,) * len(names)
        constants |= {f"{name}{i}": value for name, value in zip(names, given, strict=True)}
    constants["QUERIES"] = len(queries)
    for i in range(MOST_QUERIES):
        heads, strides = queries[i] if i < len(queries) else (0, 0)
        constants |= {f"HEADS{i}": heads, f"QUERY_STRIDES{i}": strides}
    return TritonLaunch(latent_step_write_kernel, WARPS, constants)


def launch_latent_step_write(
    vectors: VectorPart,
    compressors: Sequence[CompressorPart],
    step: Sequence[torch.Tensor],
    *,
    has_free_rows: bool,
    queries: Sequence[QueryPart] = (),
    query_eps: float = 0.0,
) -> None:
    """Enqueue on the current stream; the op has checked.

    step: phase, entries, fresh, stored, entry_slots and input_slots of a `CompressStep`, terms
    contiguous; empty without compressors. has_free_rows: whether inputs take no row that is read.
    queries: of the same tokens, up to 2. query_eps: of their norms.
    """
    num_tokens = vectors.x.shape[0]
    if num_tokens == 0:
        return
    term_sizes = (compressors[0].bias.shape[0], step[2].shape[1]) if compressors else (1, 1)
    parts = tuple(part.constants() for part in compressors)
    turned = tuple(part.constants() for part in queries)
    launch = _launch(vectors.constants(), term_sizes, parts, turned)
    indices: Sequence[Tensor | None] = step or (None,) * STEP_POINTERS
    tensors = [*vectors.tensors(), *indices]
    for part in compressors:
        tensors += part.tensors()
    tensors += [None] * COMPRESSOR_POINTERS * (MOST_COMPRESSORS - len(compressors))
    for query in queries:
        tensors += query.tensors()
    tensors += [None] * QUERY_POINTERS * (MOST_QUERIES - len(queries))
    eps = [part.eps for part in compressors] + [0.0] * (MOST_COMPRESSORS - len(compressors))
    heads = [query.num_programs for query in queries] + [0] * (MOST_QUERIES - len(queries))
    num_entries = step[1].shape[0] if compressors else 0
    outputs = len(compressors) * num_entries + num_tokens + sum(heads)
    inputs = num_tokens if compressors else 0
    all_eps = (vectors.eps, *eps, query_eps)
    if has_free_rows:
        launch((outputs + inputs, 1, 1), tensors, (*all_eps, num_entries, num_tokens, *heads))
        return
    launch((outputs, 1, 1), tensors, (*all_eps, num_entries, num_tokens, *heads))
    launch((inputs, 1, 1), tensors, (*all_eps, 0, 0, 0, 0))
