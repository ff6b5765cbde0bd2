"""Which widths the kernel between two attentions takes, and how it deals their rows out.

Rows of o and down make groups of 32, rows of gate and up groups of 32 pairs, rows of q, k and v
tiles of 16. The CTAs take a group each in rounds; a last round may leave some of them out. What
decides is shared memory, where half of a matrix's input must fit, 256 columns a slot, in four
classes of as many slots each.
"""

from __future__ import annotations

from dataclasses import dataclass

CTAS = 128  # at most, in clusters of two, one an SM: not measured with all 132 of an H200
COLUMN = 256  # columns of a unit of weights
GROUP, TILE = 32, 16  # rows
MOST_ROUNDS = 2  # of groups of the residual, which a CTA keeps in registers
_CLASSES = 4  # of columns


@dataclass(frozen=True, slots=True)
class ChainTypes:
    """Which matrices of a launch are Q6_K, the others being Q4_K; `qk`, `v`: of the next layer."""

    o: bool
    gate_up: bool
    down: bool
    qk: bool = False
    v: bool = False

    @property
    def any_six(self) -> bool:
        """Whether a place of a ring holds a unit of Q6_K."""
        return any((self.o, self.gate_up, self.down, self.qk, self.v))


@dataclass(frozen=True, slots=True)
class ChainShape:
    """Widths of what lies between two attentions.

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


@dataclass(frozen=True, slots=True)
class Ring:
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


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a shape is dealt out.

    Attributes:
        shape: what is dealt.
        types: of its matrices.
        ctas: that take a group in each round; even.
        max_tokens: of a launch.
    """

    shape: ChainShape
    types: ChainTypes
    ctas: int
    max_tokens: int

    def ring(self, tiles: int) -> Ring:
        """Of launches of so many tiles of 8 tokens, at most `max_tokens`."""
        return _fitting(tiles, self.shape, self.types)[0]

    @property
    def columns(self) -> int:
        """Of 256 that are published: for gate and up, for down, for the next q, k and v."""
        return (2 * self.shape.hidden + self.shape.inner) // COLUMN

    @property
    def groups(self) -> int:
        """Of 32 columns of the residual."""
        return self.shape.hidden // GROUP


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the kernel does not take a shape."""

    reason: str


def partition(shape: ChainShape, types: ChainTypes, num_sms: int) -> Geometry | Refusal:
    """Deal a shape out over a GPU's SMs. Pure: equal in every process, readable by a test.

    Args:
        shape: of the matrices.
        types: of the same.
        num_sms: of the GPU.
    """
    ctas = min(CTAS, num_sms // 2 * 2)
    if ctas == 0:
        return Refusal(f"the GPU has {num_sms} SMs")
    for name in ("hidden", "attended", "inner"):
        width = getattr(shape, name)
        if width <= 0 or width % (2 * COLUMN):
            return Refusal(f"{name} is {width}, not a multiple of {2 * COLUMN}")
    for name in ("qk_rows", "v_rows"):
        rows = getattr(shape, name)
        if rows % (2 * TILE):
            return Refusal(f"{name} is {rows}, not a multiple of {2 * TILE}")
    if shape.hidden > MOST_ROUNDS * GROUP * ctas:
        return Refusal(f"hidden is {shape.hidden}; at most {MOST_ROUNDS * GROUP * ctas} fits")
    fitting = [8 * tiles for tiles in (1, 2) if _fitting(tiles, shape, types)]
    if not fitting:
        width = max(shape.hidden, shape.attended)
        return Refusal(f"{width} columns do not fit shared memory")
    return Geometry(shape, types, ctas, max(fitting))


def _fitting(tiles: int, shape: ChainShape, types: ChainTypes) -> list[Ring]:
    """Those with slots for half of the columns of o, and of x."""
    half = max(shape.hidden, shape.attended) // (2 * COLUMN)
    in_class = -(-half // _CLASSES)
    return [r for r in _RINGS[tiles, types.any_six] if r.slots // _CLASSES >= in_class]
