"""Which dense decoders the kernel fused_batch_step takes: their layers' tails, and the attention.

Its products are those of `fused_layer_tail_geometry.py`, of layers of one width each, whose types
may differ. The attention uses the shared memory of the columns of activations. Free of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tiercel.kernels.fused.fused_layer_tail_geometry import (
    COLUMN_BYTES,
    GROUP,
    TILE,
    ChainShape,
    ChainTypes,
    Geometry,
    partition,
)
from tiercel.kernels.fused.fused_refusal import SMEM_BYTES, Refusal

HEAD_DIM = 128
KEYS = 16  # of a tile of the attention
# Keys of a part of a request's attention. Two requests of 8,192 keys and 8 key/value heads are an
# item for each of 64 clusters.
SPAN = 2048
REQUEST_BYTES, LAYER_BYTES = 28, 224  # of Plan and Layer of the source
_LEAST_SHARERS, _MOST_SHARERS = 2, 8  # query heads on a key/value head
_WARPS = 16
_MATRICES = ("o", "gate_up", "down", "qk", "v")  # in order of their bits


class Heads(Struct, frozen=True):
    """Of the attention.

    Attributes:
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: of each.
        rotary_dim: dimensions of a head that rotate.
        block_size: tokens of a block of the cache.
        has_norms: whether heads of q and k are normed.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    block_size: int
    has_norms: bool

    @property
    def sharers(self) -> int:
        """Query heads on a key/value head."""
        return self.num_heads // self.num_kv_heads


class BatchStepGeometry(Struct, frozen=True):
    """How a decoder's rows are dealt out.

    Attributes:
        tail: of every layer; its types are those that a matrix has in some layer.
        heads: of the attention.
        sixes: bits of the matrices that are Q6_K in each layer: o, gate and up, down, q and k, v of
            the next layer, the lowest first.
        max_tokens: of a launch.
    """

    tail: Geometry
    heads: Heads
    sixes: tuple[int, ...]
    max_tokens: int

    def smem_bytes(self, tiles: int) -> int:
        """Shared memory of a CTA, for so many tiles of 8 tokens."""
        return smem_bytes(tiles, self.tail, self.heads.sharers)

    @property
    def columns(self) -> int:
        """Of 256 that are published: those of a tail, and the attention's outputs."""
        return self.tail.columns + self.tail.shape.attended // 256

    @property
    def always_six(self) -> int:
        """Bits of the matrices that are Q6_K in all layers."""
        found = (1 << len(_MATRICES)) - 1
        for mask in self.sixes[:-1]:
            found &= mask
        # The last layer has no q, k and v.
        return found & (self.sixes[-1] | 0b11000 * (len(self.sixes) > 1))

    @property
    def maybe_six(self) -> int:
        """Bits of the matrices that are Q6_K in some layers."""
        found = 0
        for mask in self.sixes:
            found |= mask
        return found & ~self.always_six


def refuse_heads(heads: Heads) -> Refusal | None:
    """Why the kernel does not attend with such heads; None if it does."""
    if heads.head_dim != HEAD_DIM:
        return Refusal(f"heads of {heads.head_dim}, not {HEAD_DIM}")
    if heads.rotary_dim != HEAD_DIM:
        return Refusal(f"{heads.rotary_dim} dimensions of a head rotate, not all")
    if not _LEAST_SHARERS <= heads.sharers <= _MOST_SHARERS:
        return Refusal(
            f"{heads.sharers} query heads share keys, not {_LEAST_SHARERS} to {_MOST_SHARERS}"
        )
    if heads.block_size % KEYS:
        return Refusal(f"blocks of {heads.block_size} tokens, not a multiple of {KEYS}")
    return None


def join_layers(
    tails: Sequence[Geometry], heads: Heads, num_sms: int
) -> BatchStepGeometry | Refusal:
    """Fit the layers of a decoder to the kernel. Pure.

    Args:
        tails: of all layers in order, each with q, k and v of the next one.
        heads: of the attention.
        num_sms: of the GPU.
    """
    refusal = refuse_heads(heads) or _refuse_tails(tails, heads)
    if refusal is not None:
        return refusal
    first = tails[0].shape
    sixes = tuple(_mask(tail) for tail in tails)
    ever = 0
    for mask in sixes:
        ever |= mask
    types = ChainTypes(*(bool(ever >> i & 1) for i in range(len(_MATRICES))))
    kv_rows = heads.num_kv_heads * HEAD_DIM
    rows = (heads.num_heads * HEAD_DIM + kv_rows, kv_rows)
    shape = ChainShape(first.hidden, first.attended, first.inner, *rows)
    joined = partition(shape, types, num_sms)
    if isinstance(joined, Refusal):
        return joined
    most = [
        8 * tiles
        for tiles in range(1, joined.max_tokens // 8 + 1)
        if attention_bytes(heads.sharers) <= joined.ring(tiles).slots * tiles * COLUMN_BYTES
        and smem_bytes(tiles, joined, heads.sharers) <= SMEM_BYTES
    ]
    if not most:
        return Refusal(f"the attention of {heads.sharers} heads that share keys does not fit")
    return BatchStepGeometry(joined, heads, sixes, max(most))


def _refuse_tails(tails: Sequence[Geometry], heads: Heads) -> Refusal | None:
    """Why the layers do not fit each other or the kernel."""
    kv_rows = heads.num_kv_heads * HEAD_DIM
    first, ctas = tails[0].shape, tails[0].ctas
    widths = (first.hidden, first.attended, first.inner)
    tiles = (heads.num_heads + 2 * heads.num_kv_heads) * HEAD_DIM // TILE
    # A CTA that takes no part in a product could lag behind by more than a layer.
    is_idle = 2 * first.hidden < GROUP * ctas or first.inner < GROUP * ctas
    is_idle = is_idle or (tiles < 2 * ctas and tiles != ctas)
    reasons = {
        "several GPUs share the model": any(tail.ranks > 1 for tail in tails),
        "other kernels read the weights of the fused decode step (TIERCEL_ONE_COPY)": any(
            tail.types.in_step for tail in tails
        ),
        "q and k are of different types": any(t.shape.v_rows not in (0, kv_rows) for t in tails),
        "layers of different widths": any(
            (t.shape.hidden, t.shape.attended, t.shape.inner) != widths for t in tails
        ),
        f"some of {ctas} CTAs have no rows of a matrix": is_idle,
    }
    return next((Refusal(reason) for reason, holds in reasons.items() if holds), None)


def _mask(tail: Geometry) -> int:
    types, shape = tail.types, tail.shape
    v = types.v if shape.v_rows else types.qk  # of one type: one matrix
    flags = (types.o, types.gate_up, types.down, types.qk, v)
    return sum(flag << i for i, flag in enumerate(flags))


def attention_bytes(sharers: int) -> int:
    """Shared memory of the attention, in the place of columns: `AttentionLayout` of the source."""
    stats = sharers * (2 * HEAD_DIM + 64 + 2 * (4 * HEAD_DIM + 16) + 8 * _WARPS)
    return stats + _WARPS * max(2 * KEYS * HEAD_DIM, sharers * 4 * HEAD_DIM)


def smem_bytes(tiles: int, tail: Geometry, sharers: int) -> int:
    """Shared memory of a CTA: `Layout` of cuda/fused_layer_tail_products.cuh."""
    barriers = tail.smem_bytes(tiles) + 16 * sharers + 8
    rows = -(-barriers // 16) * 16
    return rows + 2 * LAYER_BYTES + 4 * HEAD_DIM + 8 * tiles * REQUEST_BYTES + 8
