"""Which decoders the kernel of a whole decode step runs, and who multiplies which rows and columns.

Nothing but rules of division is written here: every size of the kernel comes from `StepGeometry`,
as macros. Work is dealt in three steps.

Of 128 CTAs, each has the same number of rows of q, of k and of v. Outputs of o and down are
groups of 32, dealt in turn; so are pairs of gate and up, which fill up the CTAs that have fewer
groups of o and down. A group is made by one CTA, because 32 neighbours share a scale of 8-bit
activations.

Of a CTA's rows of a matrix, `RowPlan` says what a warp takes. 32 lanes hold 128 columns each. Where
a row has fewer, a warp takes several rows; where it has more, several warps share it, or (of down,
whose inputs arrive one after the other) a warp takes its slices in turn. Two lanes share a block of
256 weights, so slices are whole blocks of two lanes, but of rows that are no multiple of 256.

Free of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from tiercel import env
from tiercel.kernels.fused.fused_refusal import CTAS, Refusal, refuse_ranks

GROUPS, GROUP_WARPS = 4, 4  # of warps in a CTA; warps of one
WARPS = GROUPS * GROUP_WARPS
LANE_COLUMNS = 128  # that a lane holds
BLOCK = 2 * LANE_COLUMNS  # weights of a block of a file, of the types with the largest
WARP_LANES = 32
RECORD = 32  # activations with one scale
TILE_KEYS, BLOCK_TOKENS = 32, 64
HEAD_DIMS = (64, 128, 256)
MOST_HEADS = 16  # query heads of a key/value head
TEAM_HEADS = 8  # of them that a CTA attends for: rows of a tensor core's product
MOST_SPLITS = 32  # CTAs of a team: lanes that merge
SPLIT_TILES = 1024  # of a key/value head, for each group of warps: a context of 131,072 tokens
MOST_TOKENS = TILE_KEYS * GROUPS * SPLIT_TILES  # of a context
MOST_COLUMNS = 8192  # of the inputs of qkv, o, gate and up: shared memory
MOST_PARTS = 12  # groups of 32 pairs of a CTA: barriers
MOST_STEP_TOKENS = 2  # of a launch: their activations fill the registers
PAIR_SPLITS = 2  # CTAs of a team that two tokens need: with one, shared memory lacks room
MOST_LAYERS = 96  # whose tensor maps and addresses still fit a kernel's parameters
ACTIVATIONS = ("silu", "gelu_tanh")
MATRICES = ("q", "k", "v", "o", "gate_up", "down")  # bits of a layer's mask
PHASES = ("qkv", "o", "gate_up", "down")
# By their numbers in a mask, of 3 bits: bits i, i + 6 and i + 12 are those of matrix i.
TYPES = ("Q4_K", "Q6_K", "Q5_K", "Q4_0", "Q8_0", "IQ4_XS", "Q5_0", "IQ4_NL")
# Those that other kernels read among a step's weights; bits of Q5_K are in another order there.
READ_TYPES = ("Q4_K", "Q6_K")
_TIMED_TYPES = ("Q4_K", "Q6_K", "Q5_K", "Q8_0", "Q5_0")
_TIMED_RANKS = 2
_TYPE_BITS = 3
_OF_BLOCKS = ("Q4_K", "Q6_K", "Q5_K", "IQ4_XS")  # of 256 weights; else of 32


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder, which decide whether the kernel fits it.

    Attributes:
        num_layers: of the decoder.
        hidden_size: of the residual.
        intermediate_size: of the MLP.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: elements of a head.
        rotary_dim: elements of a head that rotate.
        max_tokens: of a context.
        activation: of the MLP, ``silu`` or ``gelu_tanh``.
        has_update_norms: whether outputs of attention and MLP pass norms before they are added.
        window: tokens that sliding layers see; 0 without such layers.
        sliding: of each layer, whether it slides; empty if none does.
        ranks: GPUs that share the decoder; its heads and `intermediate_size` are one's.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    max_tokens: int
    activation: str = "silu"
    has_update_norms: bool = False
    window: int = 0
    sliding: tuple[bool, ...] = ()
    ranks: int = 1

    @property
    def q_size(self) -> int:
        """Rows of q."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of k, and of v."""
        return self.num_kv_heads * self.head_dim

    @property
    def matrix_sizes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each of `MATRICES`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        sizes = dict.fromkeys(("k", "v"), (self.kv_size, hidden)) | {"q": (self.q_size, hidden)}
        return sizes | {
            "o": (hidden, self.q_size),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }


class RowPlan(Struct, frozen=True):
    """How the 16 warps of a CTA share a matrix.

    Attributes:
        lanes: of 128 columns in a block: 2, or 1 where a row is no multiple of 256 columns.
        blocks: in a row.
        across: warps that share a row; a power of two.
        times: slices that a warp takes one after the other.
        tile: rows that a warp takes together.
    """

    lanes: int
    blocks: int
    across: int
    times: int
    tile: int

    @property
    def slices(self) -> int:
        """Slices of a row; the first ones have one block more than the last."""
        return self.across * self.times

    @property
    def side(self) -> int:
        """Warps of a group that share a row."""
        return min(self.across, GROUP_WARPS)

    @property
    def step(self) -> int:
        """Rows of a slot, which has a unit for each warp of a group."""
        return self.tile * (GROUP_WARPS // self.side)

    @property
    def turn(self) -> int:
        """Slots that are taken side by side."""
        return GROUPS * self.side // self.across

    def first_block(self, index: int) -> int:
        """Where slice `index` begins in a row."""
        return index * (self.blocks // self.slices) + min(index, self.blocks % self.slices)


class StepGeometry(Struct, frozen=True):
    """Everything that the kernel and its packed weights depend on.

    Attributes:
        shape: of the decoder.
        masks: of each layer; bits i, i + 6 and i + 12 are the number in `TYPES` of the type of
            matrix i of `MATRICES`.
        plans: of each of `PHASES`.
        sharers: groups of query heads (teams) of a key/value head.
        splits: CTAs of such a group in attention.
        pairs: of each CTA, its groups of 32 pairs of gate and up.
    """

    shape: DecoderShape
    masks: tuple[int, ...]
    plans: tuple[RowPlan, RowPlan, RowPlan, RowPlan]
    sharers: int
    splits: int
    pairs: tuple[tuple[int, ...], ...]

    def qtype(self, layer: int, name: str) -> str:
        """The type of one of `MATRICES`, of `TYPES`."""
        bits = self.masks[layer] >> MATRICES.index(name)
        return TYPES[sum((bits >> len(MATRICES) * bit & 1) << bit for bit in range(_TYPE_BITS))]

    @property
    def types(self) -> tuple[str, ...]:
        """Those that a matrix has, in the order of `TYPES`."""
        found = {self.qtype(layer, name) for layer in range(len(self.masks)) for name in MATRICES}
        return tuple(name for name in TYPES if name in found)

    @property
    def unread_types(self) -> tuple[str, ...]:
        """Types of matrices that other kernels need in a copy of their own."""
        return tuple(name for name in self.types if name not in READ_TYPES)

    @property
    def heads(self) -> int:
        """Query heads of a group of them."""
        return self.shape.num_heads // (self.shape.num_kv_heads * self.sharers)

    @property
    def most_tiles(self) -> int:
        """Tiles of keys of a group of warps."""
        return math.ceil(SPLIT_TILES / self.splits)

    @property
    def sliding_tiles(self) -> int:
        """The same of sliding layers."""
        window = self.shape.window
        return (
            math.ceil((math.ceil(window / TILE_KEYS) + 1) / (self.splits * GROUPS)) if window else 0
        )

    @property
    def most_pairs(self) -> int:
        """Groups of 32 pairs of the CTA with the most."""
        return max(len(own) for own in self.pairs)

    def plan(self, name: str) -> RowPlan:
        """The plan of one of `MATRICES`."""
        return self.plans[max(0, MATRICES.index(name) - 2)]

    def part_rows(self, name: str) -> int:
        """Rows of each part of one of `MATRICES`."""
        if name in ("q", "k", "v"):
            return (self.shape.q_size if name == "q" else self.shape.kv_size) // CTAS
        return 2 * RECORD if name == "gate_up" else RECORD

    def parts(self, name: str, cta: int) -> tuple[range, ...]:
        """The rows of a matrix that a CTA multiplies, those of a part together.

        gate_up has rows gate 0, up 0, gate 1, ...
        """
        rows = self.part_rows(name)
        if name in ("q", "k", "v"):
            indices: Sequence[int] = (cta,)
        elif name == "gate_up":
            indices = self.pairs[cta]
        else:
            indices = range(cta, self.shape.hidden_size // RECORD, CTAS)
        return tuple(range(rows * i, rows * (i + 1)) for i in indices)


def refuse_shape(shape: DecoderShape) -> Refusal | None:
    """Why a decoder's sizes do not fit the kernel; None if they do. Pure."""
    rules = (_refuse_multiples, _refuse_heads, _refuse_limits)
    found = next((found for rule in rules if (found := rule(shape)) is not None), None)
    if found is None or shape.ranks == 1:
        return refuse_ranks(shape.ranks) or found
    return Refusal(f"{found.reason} (of one of {shape.ranks} GPUs)")


def _refuse_multiples(shape: DecoderShape) -> Refusal | None:
    sizes = {"hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size}
    for name, size in sizes.items():
        if size % LANE_COLUMNS:
            return Refusal(f"{name} is {size}, not a multiple of {LANE_COLUMNS}")
    for name, rows in (("q has", shape.q_size), ("k and v have", shape.kv_size)):
        if rows % CTAS:
            return Refusal(f"{name} {rows} rows, not a multiple of {CTAS}")
    return None


def _refuse_heads(shape: DecoderShape) -> Refusal | None:
    if shape.head_dim not in HEAD_DIMS:
        return Refusal(f"head_dim is {shape.head_dim}; the kernel has heads of 64, 128 and 256")
    if shape.rotary_dim != shape.head_dim:
        return Refusal(f"rotary_dim is {shape.rotary_dim}; the kernel rotates all {shape.head_dim}")
    if shape.num_heads % shape.num_kv_heads or shape.num_heads > MOST_HEADS * shape.num_kv_heads:
        return Refusal(
            f"{shape.num_heads} query heads share {shape.num_kv_heads} key/value heads; "
            f"at most {MOST_HEADS} can share one"
        )
    if shape.activation not in ACTIVATIONS:
        return Refusal(f"the activation is {shape.activation}; the kernel has silu and gelu_tanh")
    return None


def _refuse_limits(shape: DecoderShape) -> Refusal | None:
    limits = (
        ("groups of query heads", shape.num_kv_heads * _count_teams(shape), CTAS),
        ("hidden_size", shape.hidden_size, MOST_COLUMNS),
        ("columns of o", shape.q_size, MOST_COLUMNS),
        ("intermediate_size", shape.intermediate_size, MOST_PARTS * RECORD * CTAS),
        ("num_layers", shape.num_layers, MOST_LAYERS),
        ("tokens of a context", shape.max_tokens, MOST_TOKENS),
    )
    for name, size, most in limits:
        if size > most:
            return Refusal(f"{name}: {size}; at most {most} fit")
    return None


def select_plan(columns: int, rows: int, *, may_wait: bool = False) -> RowPlan:
    """The division of a matrix that keeps the warps of a CTA busy for the shortest time. Pure.

    Args:
        columns: of the matrix.
        rows: that a CTA has of it together.
        may_wait: whether slices of columns can follow each other: then a row's sum stays in a
            lane's register, so a warp takes one row at a time and at most two in all.
    """
    lanes = 1 if columns % BLOCK else 2
    blocks, unit_blocks = columns // (LANE_COLUMNS * lanes), WARP_LANES // lanes
    candidates = []
    for across in (1, 2, 4, 8, 16):
        for times in range(1, blocks + 1) if may_wait and across == 1 else (1,):
            width = -(-blocks // (across * times))
            if width > unit_blocks or across * times > blocks:
                continue
            tile = 1 if times > 1 else unit_blocks // width
            if times > 1 and rows > 2 * WARPS:
                continue
            units = times * math.ceil(math.ceil(rows / tile) * across / WARPS)
            # In tenths of a unit: activations are loaded again for each slice; sums of several rows
            # take more shuffles, and sums over warps a few loads.
            cost = 10 * units + times + (units if tile > 1 else 0) + min(across, 4)
            candidates.append((cost, across, times, tile))
    _, across, times, tile = min(candidates)
    return RowPlan(lanes, blocks, across, times, tile)


def _deal_pairs(shape: DecoderShape) -> tuple[tuple[int, ...], ...]:
    """Groups of 32 pairs for each CTA: at most one more than the mean, else equal sums of bytes."""
    groups, outputs = shape.intermediate_size // RECORD, shape.hidden_size // RECORD
    most = -(-groups // CTAS)
    output = RECORD * (shape.q_size + shape.intermediate_size)
    pair = 2 * RECORD * shape.hidden_size
    loads = [output * len(range(cta, outputs, CTAS)) for cta in range(CTAS)]
    counts = [0] * CTAS
    for _ in range(groups):
        cta = min(
            (cta for cta in range(CTAS) if counts[cta] < most),
            key=lambda cta: (loads[cta], counts[cta], -cta),
        )
        counts[cta] += 1
        loads[cta] += pair
    # Each CTA's first group, then each one's second: so all give to a slice of down.
    own: list[list[int]] = [[] for _ in range(CTAS)]
    index = 0
    for turn in range(most):
        for cta in range(CTAS):
            if counts[cta] > turn:
                own[cta].append(index)
                index += 1
    return tuple(tuple(found) for found in own)


def partition(
    shape: DecoderShape, layers: Sequence[Mapping[str, Sequence[str]]]
) -> StepGeometry | Refusal:
    """Fit a decoder to the kernel. Pure: equal in every process, readable by a test.

    Args:
        shape: of the decoder.
        layers: of each, the types of each of `MATRICES`: of gate and up, else of one.
    """
    refusal = refuse_shape(shape)
    if refusal is not None:
        return refusal
    columns = {name: columns for name, (_, columns) in shape.matrix_sizes.items()}
    for index, layer in enumerate(layers):
        for name in MATRICES:
            reason = _refuse_types(list(dict.fromkeys(layer[name])), columns[name])
            if reason:
                return Refusal(f"{name} of layer {index} {reason}")
    return make_geometry(
        shape, [make_mask([layer[name][0] for name in MATRICES]) for layer in layers]
    )


def select_geometry(
    shape: DecoderShape, layers: Sequence[Mapping[str, Sequence[str]]]
) -> StepGeometry | Refusal:
    """`partition`, but a form whose speed is not known must be asked for."""
    found = partition(shape, layers)
    return found if isinstance(found, Refusal) else _refuse_untimed(found) or found


def _refuse_untimed(geometry: StepGeometry) -> Refusal | None:
    shape = geometry.shape
    types = [name for name in geometry.types if name not in _TIMED_TYPES]
    forms = {
        f"matrices in {' and '.join(types)}": bool(types),
        f"more than {TEAM_HEADS} query heads a key/value head": geometry.sharers > 1,
        "the single layer of a draft head": shape.num_layers == 1,
        f"sums over {shape.ranks} GPUs": shape.ranks > _TIMED_RANKS,
    }
    found = next((form for form, applies in forms.items() if applies), "")
    if not found or env.has_untimed_step():
        return None
    return Refusal(f"not timed on a GPU with {found}; TIERCEL_MEGAKERNEL=1 uses it")


def refuse_pairs(geometry: StepGeometry) -> Refusal | None:
    """Why the kernel takes no two tokens of a model that it runs; None if it does. Pure."""
    ranks = geometry.shape.ranks
    if ranks > 1:
        return Refusal(f"sums over {ranks} GPUs are those of one token")
    if geometry.splits < PAIR_SPLITS:
        teams = geometry.shape.num_kv_heads * geometry.sharers
        return Refusal(f"{teams} groups of query heads leave no shared memory for two tokens")
    if not env.has_megakernel_pairs():
        return Refusal("not timed on a GPU; TIERCEL_MEGAKERNEL_PAIRS=1 uses it")
    return None


def _refuse_types(kinds: Sequence[str], columns: int) -> str:
    """Why a matrix of some types does not fit; empty if it does."""
    unknown = [kind for kind in kinds if kind not in TYPES]
    if unknown:
        return f"is {unknown[0]}; the kernel reads {', '.join(TYPES[:-1])} and {TYPES[-1]}"
    if len(kinds) > 1:
        return f"is of two types, {' and '.join(kinds)}"
    if kinds[0] in _OF_BLOCKS and columns % BLOCK:
        return f"is {kinds[0]} with {columns} columns, not a multiple of {BLOCK}"
    return ""


def make_mask(types: Sequence[str]) -> int:
    """The mask of a layer, see `StepGeometry`.

    Args:
        types: of each of `MATRICES`.
    """
    return sum(
        (TYPES.index(kind) >> bit & 1) << i + len(MATRICES) * bit
        for i, kind in enumerate(types)
        for bit in range(_TYPE_BITS)
    )


def make_geometry(shape: DecoderShape, masks: Sequence[int]) -> StepGeometry:
    """The geometry of a decoder that fits. Pure.

    Args:
        shape: that `refuse_shape` does not refuse.
        masks: see `StepGeometry`.
    """
    plans = (
        select_plan(shape.hidden_size, (shape.q_size + 2 * shape.kv_size) // CTAS),
        select_plan(shape.q_size, RECORD),
        select_plan(shape.hidden_size, 2 * RECORD),
        select_plan(shape.intermediate_size, RECORD, may_wait=True),
    )
    sharers = _count_teams(shape)
    splits = min(MOST_SPLITS, CTAS // (shape.num_kv_heads * sharers))
    return StepGeometry(shape, tuple(masks), plans, sharers, splits, _deal_pairs(shape))


def _count_teams(shape: DecoderShape) -> int:
    """Groups of at most `TEAM_HEADS` query heads, of equal size, of a key/value head."""
    heads = shape.num_heads // shape.num_kv_heads
    return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= TEAM_HEADS)
