"""Which widths the kernel fused_layer_tail takes, and how it deals their rows out to CTAs.

Rows of o and down make groups of 32, rows of gate and up groups of 32 pairs, rows of q, k and v
tiles of 16. The CTAs take a group each in rounds; a last round may leave some of them out. What
decides is shared memory, where half of a matrix's input must fit, 256 columns a slot, in four
classes of as many slots each. Free of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tiercel.kernels.fused.fused_refusal import (
    CTAS,  # in clusters of two; not measured with all 132 SMs of an H200
    Refusal,
)
from tiercel.kernels.packed.packed_types import UNIT_TYPES

COLUMN = 256  # columns of a unit of weights
COLUMN_BYTES = 4352  # of activations of 8 tokens
GROUP, TILE = 32, 16  # rows
MOST_ROUNDS = 2  # of groups of the residual, which a CTA keeps in registers
TYPES = ("Q4_K", "Q6_K")
# One token of width 1024 is 5% slower than kernel by kernel, steps of 8 and 16 are 8 and 12% faster
# (H200, results/bench_speed_chain_more_h200.json); a layer of width 8192 is up to 4% slower with
# one token (results/decode_chain_sizes_h200.json). Between them one token is 4% slower to 29%
# faster, 8 and 16 are 10 to 33% faster (docs/notes/dense_sizes.md). All steps of a model go one
# way, so that a token's bits are the same in each.
_WIDTHS = range(2048, 8192)
_CLASSES = 4  # of columns
_WARPS = 16  # that multiply
# Names of the widths in a model's configuration.
_NAMES = {
    "hidden": "hidden_size",
    "attended": "num_heads * head_dim",
    "inner": "intermediate_size",
    "qk_rows": "q and k",
    "v_rows": "v",
}


class ChainTypes(Struct, frozen=True):
    """Which matrices of a launch are Q6_K and not Q4_K; `qk` and `v` are of the next layer.

    in_step: whether all are in layout STEP, not in planes.
    """

    o: bool
    gate_up: bool
    down: bool
    qk: bool = False
    v: bool = False
    in_step: bool = False

    @property
    def any_six(self) -> bool:
        """Whether a place of a ring holds a unit of Q6_K."""
        return any((self.o, self.gate_up, self.down, self.qk, self.v))


class ChainShape(Struct, frozen=True):
    """Widths of the matrices between two attentions.

    Attributes:
        hidden: of the residual.
        attended: of the attention's outputs, num_heads * head_dim.
        inner: of the inputs of down.
        qk_rows: of q and k of the next layer, with v where that is of the same type; 0 after the
            last layer.
        v_rows: of v, where it is of another type, else 0.
    """

    hidden: int
    attended: int
    inner: int
    qk_rows: int
    v_rows: int = 0

    @property
    def heads_width(self) -> int:
        """Rows of q, k and v."""
        return self.qk_rows + self.v_rows


class Ring(Struct, frozen=True):
    """Of a launch: units of a warp in flight, unit columns of x, buffers of sums."""

    stages: int
    slots: int
    buffers: int


# (tiles of 8 tokens, whether a matrix is Q6_K): the first with enough slots is taken. Others that
# fit are within 3% for Qwen3-8B (H200, docs/notes/fused_layer_tail.md); 16 slots of two tiles leave
# room for one unit of Q6_K in flight.
_RINGS = {
    (1, False): (Ring(3, 20, 2),),
    (1, True): (Ring(2, 24, 2),),
    (2, False): (Ring(2, 12, 1), Ring(2, 16, 1)),
    (2, True): (Ring(2, 12, 1), Ring(1, 16, 1)),
}


class Geometry(Struct, frozen=True):
    """How the rows of a shape are dealt out to CTAs.

    Attributes:
        shape: widths of the matrices.
        types: of the matrices.
        ctas: number of CTAs, which take a group each in a round; even.
        max_tokens: of a launch.
        ranks: GPUs that share the model; each has some columns of o and of down, and the rows that
            make their inputs.
    """

    shape: ChainShape
    types: ChainTypes
    ctas: int
    max_tokens: int
    ranks: int = 1

    def ring(self, tiles: int) -> Ring:
        """Of launches of so many tiles of 8 tokens, at most `max_tokens`."""
        return _fitting(tiles, self.shape, self.types)[0]

    def smem_bytes(self, tiles: int) -> int:
        """Shared memory of a CTA: `Layout` of cuda/fused_layer_tail_products.cuh."""
        ring = self.ring(tiles)
        name = ("Q6_K" if self.types.any_six else "Q4_K") + "_STEP" * self.types.in_step
        unit_bytes = UNIT_TYPES[name].slot_bytes
        columns, units = ring.slots * tiles * COLUMN_BYTES, _WARPS * ring.stages * unit_bytes
        sums, scratch = ring.buffers * 16 * tiles * 512, 8 * tiles * 144
        barriers = 8 * (2 * ring.slots + ring.buffers * (tiles + 2))
        return columns + units + sums + scratch + barriers + 8

    @property
    def columns(self) -> int:
        """Of 256 that are published: for gate and up, for down, for the next q, k and v."""
        return (2 * self.shape.hidden + self.shape.inner) // COLUMN

    @property
    def groups(self) -> int:
        """Of 32 columns of the residual."""
        return self.shape.hidden // GROUP


class Matrix(Struct, frozen=True):
    """A matrix (rows, columns) of one type, such as "Q4_K"."""

    qtype: str
    rows: int
    columns: int


def refuse_width(hidden: int) -> Refusal | None:
    """Why a width that would fit goes kernel by kernel, measured; None if it does not."""
    if hidden in _WIDTHS:
        return None
    low, high = _WIDTHS.start, _WIDTHS.stop
    return Refusal(
        f"hidden_size is {hidden}; below {low} and from {high} on single kernels are as fast"
    )


def partition_layer(
    o: Sequence[Matrix],
    gate_up: Sequence[Matrix],
    down: Sequence[Matrix],
    qkv: Sequence[Matrix],
    num_sms: int,
    ranks: int = 1,
    *,
    in_step: bool = False,
) -> Geometry | Refusal:
    """Fit the matrices of a layer's tail to the kernel. Pure, as `partition`.

    Args:
        o: segments of the output projection's rows, each of one type.
        gate_up: segments of gate and up in one.
        down: segments of down.
        qkv: segments of q, k and v of the next layer; empty after the last layer.
        num_sms: of the GPU.
        ranks: GPUs that share the model; the matrices are one's.
        in_step: whether they are in layout STEP.
    """
    parts = {"o": o, "gate and up": gate_up, "down": down, "q, k and v": qkv}
    for name, part in parts.items():
        unknown = [matrix.qtype for matrix in part if matrix.qtype not in TYPES]
        if unknown:
            return Refusal(f"{name}: {unknown[0]}; the kernel reads {TYPES[0]} and {TYPES[1]}")
        if len(part) > (2 if part is qkv else 1):
            return Refusal(f"{name}: {len(part)} segments of different types")
    if len(qkv) == 2 and qkv[0].qtype == qkv[1].qtype:
        return Refusal("q, k and v: two segments of one type")
    is_six = [[matrix.qtype == TYPES[1] for matrix in part] for part in parts.values()]
    qk, v = (is_six[3][0], is_six[3][-1]) if qkv else (False, False)
    types = ChainTypes(is_six[0][0], is_six[1][0], is_six[2][0], qk, v, in_step)
    rows = [matrix.rows for matrix in qkv]
    hidden, inner = down[0].rows, down[0].columns
    shape = ChainShape(hidden, o[0].columns, inner, *(rows or [0]))
    given = [(matrix.rows, matrix.columns) for part in parts.values() for matrix in part]
    expected = [(hidden, shape.attended), (2 * inner, hidden), (hidden, inner)]
    if given != expected + [(num_rows, hidden) for num_rows in rows]:
        return Refusal(f"matrices of shapes {given}")
    return partition(shape, types, num_sms, ranks)


def partition(
    shape: ChainShape, types: ChainTypes, num_sms: int, ranks: int = 1
) -> Geometry | Refusal:
    """Deal a shape out over a GPU's SMs. Pure: equal in every process, readable by a test.

    Args:
        shape: of the matrices.
        types: of the same.
        num_sms: of the GPU.
        ranks: GPUs that share the model; the shape is one's.
    """
    ctas = min(CTAS, num_sms // 2 * 2)
    if ctas == 0:
        return Refusal(f"the GPU has {num_sms} SMs")
    for name in ("hidden", "attended", "inner"):
        width = getattr(shape, name)
        if width <= 0 or width % (2 * COLUMN):
            return Refusal(f"{_NAMES[name]} is {width}, not a multiple of {2 * COLUMN}")
    for name in ("qk_rows", "v_rows"):
        rows = getattr(shape, name)
        if rows % (2 * TILE):
            return Refusal(f"{_NAMES[name]} have {rows} rows, not a multiple of {2 * TILE}")
    if shape.hidden > MOST_ROUNDS * GROUP * ctas:
        return Refusal(f"hidden_size is {shape.hidden}; at most {MOST_ROUNDS * GROUP * ctas} fits")
    fitting = [8 * tiles for tiles in (1, 2) if _fitting(tiles, shape, types)]
    if not fitting:
        width = max(shape.hidden, shape.attended)
        return Refusal(f"{width} columns do not fit shared memory")
    return Geometry(shape, types, ctas, max(fitting), ranks)


def _fitting(tiles: int, shape: ChainShape, types: ChainTypes) -> list[Ring]:
    """Those with slots for half of the columns of o, and of x."""
    half = max(shape.hidden, shape.attended) // (2 * COLUMN)
    in_class = -(-half // _CLASSES)
    return [r for r in _RINGS[tiles, types.any_six] if r.slots // _CLASSES >= in_class]
