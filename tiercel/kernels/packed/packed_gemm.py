"""y = x W^T for 17 to some hundreds of tokens and a K-quantised W, at the speed of reading W.

Two launches. cuda/packed_image.cu lays the tokens out as tensor cores want them in shared memory,
cuda/packed_gemm.cu streams W and that image through a ring, decodes W in registers and multiplies
by wgmma. Hopper alone has the instructions; elsewhere such products take decoded weights.

Floor: the larger of the planes read once and 2 * tokens * rows * columns operations.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.packed.packed_matvec import BLOCK, OUT_CODES, KernelPlanes
from tiercel.kernels.packed.packed_types import UNIT_TYPES
from tiercel.kernels.runtime import rtc

CAPABILITY = (9, 0)
HEAD_DIMS = (64, 128)  # of `HeadOutputs`: a CTA has at most three warpgroups of 64 rows
SQUARES_COLUMNS = 64  # of the residual, whose squares are added up together
TOKEN_CLASSES = (32, 64, 96, 128)  # tokens of a tile; more go in several tiles
_SMEM_BYTES = 225 << 10  # of 227, less the barriers
_BARRIER_BYTES = 16  # of a stage
_LEAST_STAGES, _MOST_STAGES = 2, 6
_IMAGE_THREADS = 256
# From so many rows on the ends of CTAs count at few tokens: two an SM, with two stages each. 32
# tokens x 151936 x 4096 (Q6_K) take 190 us, 239 by CTAs of three warpgroups; 24576 rows 29 and 24
# (H200, docs/notes/packed_products.md).
_LEAST_ROWS_OF_TWO = 2 * 132 * 64 * 4
# CTAs that surely run together in clusters of so many: a cluster is in one part of the device, and
# 128 CTAs in fours or eights took two turns (H200, results/q4k_gemm_h200.json).
_AT_ONCE = {1: 132, 2: 128, 3: 96, 4: 96, 6: 96, 8: 64}


# Powers of two that weights are multiplied by: `Masks` of cuda/packed/packed_gemm_masks.cuh has
# them times 2**10 and 2**15 in fp16. Types whose integers are converted have one for all.
_LEAST_EXPONENT, _MOST_EXPONENT, CONVERTED_EXPONENT = -24, 0, 4
_MOST_FP16 = 65504.0
# Times that a row's root mean square may grow by one product before an image is infinite (and the
# request fails, as of any NaN). Trained models grow 1,000 to 5,000 times where their massive
# activations appear. More room would cost bits of a row that shrinks as much where they leave.
_MOST_GROWTH = 2**13
_MOST_ROOM = 24


class PackedGemmConfig(Struct, frozen=True):
    """A launch.

    Attributes:
        tokens: of a tile.
        groups: warpgroups of 64 rows in a CTA.
        splits: CTAs of a cluster that share a row's sum; decides its order.
        stages: units in flight.
        steps: products between two waits of a warpgroup.
    """

    tokens: int
    groups: int
    splits: int
    stages: int
    steps: int

    def smem_bytes(self, type_name: str) -> int:
        """Dynamic shared memory of a CTA."""
        stage = _stage_bytes(type_name, self.tokens, self.groups) + _BARRIER_BYTES
        return self.stages * stage + 4 * self.tokens  # factors of tokens


class Gate(Struct, frozen=True):
    """What becomes of the product with the rows of gate and up: act(gate) * up, as an image.

    Attributes:
        activation: of `ops/act_mul.py`.
        next_order: of the image's columns.
    """

    activation: str
    next_order: int


class NormInputs(Struct, frozen=True):
    """What a product reads with an image that `NormOutputs` wrote, all float32 on a device.

    Attributes:
        squares: (tiles, columns / 64, tokens of a tile), sums over 64 columns of the residual.
        before: (tokens of all tiles,), what rows of the norm before are multiplied by.
        roots: likewise of this norm, overwritten.
        eps: added to the mean square.
        room: from `select_room`.
    """

    squares: Tensor
    before: Tensor
    roots: Tensor
    eps: float
    room: int


class NormOutputs(Struct, frozen=True):
    """What becomes of a product that updates the residual: its sum, and an image of its norm.

    Attributes:
        x: (tokens, rows) float32, contiguous, the residual, mutated.
        weight: (rows,) float32, of the norm.
        images: by order of columns, one or two, of `image_shape`, overwritten.
        squares: of `NormInputs`, overwritten.
        before: of `NormInputs`.
        room: likewise.
    """

    x: Tensor
    weight: Tensor
    images: Mapping[int, Tensor]
    squares: Tensor
    before: Tensor
    room: int

    @property
    def orders(self) -> tuple[int, ...]:
        """Of the images' columns."""
        return tuple(self.images)


HeadKind = tuple[int, bool, bool]
"""Columns of a head, whether queries and keys are normed, and whether there is a `KeyPrefetch`."""
NO_HEADS: HeadKind = (0, False, False)
_MOST_PIECE = 32 << 10  # bytes of a prefetch: 8 to 16 of a CTA, one beside each unit


class KeyPrefetch(Struct, frozen=True):
    """Keys and values that a product requests to the L2 for the attention behind it.

    Attributes:
        tables: (engine rows, max_blocks) int32, unit inner stride.
        rows: (requests,) int32, of the tables.
        seq_lens: (requests,) int32; at least that many tokens have blocks.
        num_bytes: of all requests; each gets as many from its first token on.
    """

    tables: Tensor
    rows: Tensor
    seq_lens: Tensor
    num_bytes: int


class HeadOutputs(Struct, frozen=True):
    """What becomes of a product with query, key and value heads: see `ops/rotary_kv_write.py`.

    Attributes:
        positions: (tokens,) int32.
        table: (positions, 2, head_dim / 2) float32, cos then sin.
        slots: (tokens,) int64, of the caches; -1 writes nothing.
        k_cache: (blocks, block_size, kv_heads, head_dim) float16, contiguous, mutated.
        v_cache: like k_cache.
        norms: weights of queries' and of keys' norms, (head_dim,) float32; () for none.
        eps: of the norms.
        num_heads: of queries.
        first: head of the product's first row.
        prefetch: beside the product; None for none.
    """

    positions: Tensor
    table: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    norms: tuple[Tensor, ...]
    eps: float
    num_heads: int
    first: int = 0
    prefetch: KeyPrefetch | None = None

    @property
    def kind(self) -> HeadKind:
        """What the kernel is built for."""
        return self.k_cache.shape[3], bool(self.norms), self.prefetch is not None


class _HeadWrite(ctypes.Structure):
    """HeadWrite of cuda/packed/packed_gemm_heads.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "table", "slots")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "q_weight", "k_weight")),
        *((name, ctypes.c_int) for name in ("first", "heads", "kv_heads")),
        ("eps", ctypes.c_float),
    )

    @classmethod
    def of(cls, heads: HeadOutputs) -> _HeadWrite:
        """Addresses and sizes."""
        tensors = (heads.positions, heads.table, heads.slots, heads.k_cache, heads.v_cache)
        weights = [weight.data_ptr() for weight in heads.norms] or [0, 0]
        sizes = heads.first, heads.num_heads, heads.k_cache.shape[2], heads.eps
        return cls(*(tensor.data_ptr() for tensor in tensors), *weights, *sizes)


class _KeyPrefetch(ctypes.Structure):
    """KeyPrefetch of cuda/packed/packed_gemm_heads.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tables", "rows", "seq_lens")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("requests", "pieces")),
        *((name, ctypes.c_uint) for name in ("bytes", "tokens", "per_block")),
    )

    @classmethod
    def of(cls, keys: KeyPrefetch, k_cache: Tensor) -> _KeyPrefetch:
        """Addresses, and pieces of whole tokens that divide a block."""
        tokens = k_cache.shape[1]
        token_bytes = k_cache[0, 0].numel() * k_cache.element_size()
        while tokens * token_bytes > _MOST_PIECE and tokens % 2 == 0:
            tokens //= 2
        piece, requests = tokens * token_bytes, keys.rows.shape[0]
        tensors = (keys.tables, keys.rows, keys.seq_lens)
        return cls(
            *(tensor.data_ptr() for tensor in tensors),
            keys.tables.stride(0),
            requests,
            keys.num_bytes // (requests * piece),
            piece,
            tokens,
            k_cache.shape[1] // tokens,
        )


class _RowNorm(ctypes.Structure):
    """RowNorm of cuda/packed/packed_gemm_norm.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "second")),
        *((name, ctypes.c_void_p) for name in ("squares", "before", "roots")),
        ("parts", ctypes.c_ushort),
        ("room", ctypes.c_short),
        ("eps", ctypes.c_float),
    )

    @classmethod
    def of(cls, norm: NormInputs | NormOutputs | None) -> _RowNorm:
        """Addresses, of which a kernel reads those it needs."""
        result = cls()
        if norm is None:
            return result
        result.squares, result.before = norm.squares.data_ptr(), norm.before.data_ptr()
        result.parts, result.room = norm.squares.shape[1], norm.room
        if isinstance(norm, NormInputs):
            result.roots, result.eps = norm.roots.data_ptr(), norm.eps
        else:
            result.x, result.weight = norm.x.data_ptr(), norm.weight.data_ptr()
            result.second = list(norm.images.values())[-1].data_ptr()
        return result


def _stage_bytes(type_name: str, tokens: int, groups: int) -> int:
    used = 512 * tokens + 4 * groups * UNIT_TYPES[type_name].slot_bytes
    return -(-used // 1024) * 1024


def make_config(type_name: str, tokens: int, groups: int, splits: int) -> PackedGemmConfig:
    """The launch with as many stages as fit."""
    stages = _SMEM_BYTES // _stage_bytes(type_name, tokens, groups)
    steps = 2 if tokens == TOKEN_CLASSES[0] else 4
    return PackedGemmConfig(tokens, groups, splits, min(stages, _MOST_STAGES), steps)


@functools.cache
def most_groups(type_name: str, tokens: int) -> int:
    """Warpgroups of a CTA at most: two stages must fit, and registers suffice without spills."""
    if UNIT_TYPES[type_name].code == 6 and tokens == TOKEN_CLASSES[-1]:
        return 2
    return next(
        g for g in (3, 2, 1) if make_config(type_name, tokens, g, 1).stages >= _LEAST_STAGES
    )


@functools.cache
def select_packed_gemm(
    type_name: str, shape: tuple[int, int], tokens: int, head_dim: int = 64
) -> PackedGemmConfig:
    """Choose the launch by counting waves. Pure: equal in every process, readable by a test.

    Args:
        type_name: of the weights.
        shape: (rows, in) of W.
        tokens: > 0.
        head_dim: rows of which a CTA has a multiple, one of `HEAD_DIMS`.
    """
    tile = tile_tokens(tokens)
    units, token_tiles = shape[1] // BLOCK, -(-tokens // tile)

    def cost(launch: tuple[int, int]) -> float:
        groups, splits = launch
        ctas = -(-shape[0] // (64 * groups)) * splits * token_tiles
        waves = -(-ctas // _AT_ONCE[splits])
        # Warpgroups of an SM take turns at its tensor cores, which operands from registers cost 36
        # cycles a product: a unit takes as long as its groups one by one. A CTA's start and end
        # cost 5 such turns, sums of a cluster 1.5.
        return waves * (-(-units // splits) * groups + 5 + 1.5 * (splits > 1))

    if tile == TOKEN_CLASSES[0] and shape[0] >= _LEAST_ROWS_OF_TWO and head_dim == HEAD_DIMS[0]:
        return PackedGemmConfig(tile, 1, 1, _LEAST_STAGES, 2)
    groups = [g for g in range(most_groups(type_name, tile), 0, -1) if not 64 * g % head_dim]
    launches = itertools.product(groups, (n for n in _AT_ONCE if n <= units))
    return make_config(type_name, tile, *min(launches, key=cost))


def select_exponent(scale: float, least: float) -> int:
    """The power of two by which weights of Q4_K or Q6_K are multiplied. Pure.

    Their integers are subnormal fp16, so that scales times 2**24 must be in its range; weights far
    below the largest of a matrix lose bits otherwise, so the power is as large as that allows.

    Args:
        scale: the largest of a group's, >= 0.
        least: the largest dmin, >= 0.
    """
    most = max(scale * 2**24, least * 2**10) / _MOST_FP16
    if not math.isfinite(most):
        return _LEAST_EXPONENT
    wanted = -math.ceil(math.log2(most)) if most else _MOST_EXPONENT
    return min(max(wanted, _LEAST_EXPONENT), _MOST_EXPONENT)


def select_room(weight: float, columns: int) -> int:
    """The power of two by which images of a norm are multiplied that a product writes. Pure.

    Rows are scaled by the root of the norm before; a channel is then at most weight * sqrt(columns)
    times what the row has grown since. A row that shrinks loses bits, so the power is as large as
    the range of fp16 allows.

    Args:
        weight: the largest of the norm's, >= 0.
        columns: of a row.
    """
    most = weight * math.sqrt(columns) * _MOST_GROWTH / _MOST_FP16
    if not math.isfinite(most) or not most:
        return 0
    return min(max(-math.ceil(math.log2(most)), -_MOST_ROOM), _MOST_ROOM)


def column_order(type_name: str) -> int:
    """ORDER of the image that weights of a type read, see cuda/packed/packed_places.cuh."""
    code = UNIT_TYPES[type_name].code
    return code if code in (4, 6) else 32


def tile_tokens(tokens: int) -> int:
    """Tokens of a tile of the image of so many."""
    return next((most for most in TOKEN_CLASSES if tokens <= most), TOKEN_CLASSES[-1])


@functools.cache
def image_source(order: int, tile: int) -> rtc.KernelSource:
    """The kernel that lays out the tokens."""
    return rtc.KernelSource("packed_image", (("ORDER", order), ("TOKENS", tile)))


@functools.cache
def gemm_source(
    type_name: str,
    out_dtype: torch.dtype,
    config: PackedGemmConfig,
    gate: Gate | None = None,
    orders: tuple[int, ...] = (),
    *,
    is_scaled: bool = False,
    heads: HeadKind = NO_HEADS,
) -> rtc.KernelSource:
    """The kernel that multiplies, as built for one kind of call.

    Args:
        type_name: of the weights.
        out_dtype: of results.
        config: the launch.
        gate: as in `launch_packed_product`.
        orders: of the images of `NormOutputs`.
        is_scaled: whether the tokens come with `NormInputs`.
        heads: of `HeadOutputs`.
    """
    nexts = orders if gate is None else (gate.next_order,)
    macros = (
        ("QTYPE", UNIT_TYPES[type_name].code),
        ("TOKENS", config.tokens),
        ("WGS", config.groups),
        ("STAGES", config.stages),
        ("SPLITS", config.splits),
        ("STEPS", config.steps),
        ("OUT", OUT_CODES[out_dtype]),
        ("GATED", int(gate is not None)),
        ("IS_GELU", int(gate is not None and gate.activation == "gelu_tanh")),
        ("NEXT", nexts[0] if nexts else 0),
        ("IS_BF16", 0),
        ("IN_STEP", int(UNIT_TYPES[type_name].in_step)),
        ("RESIDUAL", int(bool(orders))),
        ("SECOND", orders[1] if len(orders) > 1 else 0),
        ("SCALED", int(is_scaled)),
        ("HEADS", heads[0]),
        *((("HAS_NORMS", int(heads[1])), ("PREFETCH", int(heads[2]))) if heads[0] else ()),
    )
    return rtc.KernelSource("packed_gemm", macros)


def load_packed_gemm(
    type_name: str,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    device: torch.device,
    orders: tuple[int, ...] = (),
    *,
    is_scaled: bool = False,
    heads: HeadKind = NO_HEADS,
) -> None:
    """Load what `select_packed_gemm` may choose for a matrix and one tile of tokens.

    Args:
        type_name: of the weights.
        shape: (rows, in) of W.
        out_dtype: of results.
        device: a GPU.
        orders: of the images of `NormOutputs`; () for a result of its own.
        is_scaled: whether the tokens come with `NormInputs`.
        heads: of `HeadOutputs`.
    """
    multiple = heads[0] or HEAD_DIMS[0]
    configs = [select_packed_gemm(type_name, shape, tokens, multiple) for tokens in TOKEN_CLASSES]
    sources = [
        gemm_source(type_name, out_dtype, config, None, orders, is_scaled=is_scaled, heads=heads)
        for config in configs
    ]
    rtc.fill_cache(sources, rtc.device_arch(device))
    for source, config in zip(sources, configs, strict=True):
        rtc.load_kernel(image_source(column_order(type_name), config.tokens), device)
        rtc.load_kernel(source, device, config.smem_bytes(type_name))


def image_shape(tokens: int, in_features: int) -> tuple[int, int]:
    """Of the image of so many tokens, float16: tiles by places."""
    tile = tile_tokens(tokens)
    return -(-tokens // tile), tile * in_features


def launch_packed_image(x: Tensor, order: int, image: Tensor, *, is_dependent: bool) -> None:
    """Enqueue the first kernel on the current stream; the op has checked and allocated.

    Args:
        x: (tokens, in) float16, contiguous.
        order: of the image's columns.
        image: of `image_shape`, float16, overwritten.
        is_dependent: see `rtc.launch`.
    """
    tokens, in_features = x.shape
    units = in_features // BLOCK
    kernel = rtc.load_kernel(image_source(order, tile_tokens(tokens)), x.device)
    arguments = [rtc.pointer(x), rtc.pointer(image), ctypes.c_int(tokens), ctypes.c_int(units)]
    grid = -(-image.numel() // (16 * _IMAGE_THREADS))
    rtc.launch(kernel, grid, _IMAGE_THREADS, arguments, is_dependent=is_dependent)


def launch_packed_product(
    planes: Sequence[Tensor],
    type_name: str,
    image: Tensor,
    out: Tensor | NormOutputs,
    shape: tuple[int, int, int],
    exponent: int,
    config: PackedGemmConfig,
    gate: Gate | None = None,
    scaled: NormInputs | None = None,
    heads: HeadOutputs | None = None,
    *,
    is_dependent: bool,
) -> None:
    """Enqueue the second kernel, likewise.

    Args:
        planes: of W (rows, in) on the image's device in layout SOA or STEP, contiguous, in order.
        type_name: of W.
        image: of the tokens, in the order of W's columns.
        out: (tokens, rows) float16, bfloat16 or float32, unit inner stride; with a gate the image
            of its results, of `image_shape`, float16; or what takes its place.
        shape: tokens, rows and columns of the product.
        exponent: of two, by which weights are multiplied on their way, from `select_exponent`.
        config: from `select_packed_gemm`.
        gate: None for the product itself.
        scaled: with an image from `NormOutputs`.
        heads: None for the product itself; else `out` is (tokens, columns of query heads) float16.
        is_dependent: see `rtc.launch`.
    """
    tokens, rows, columns = shape
    orders: tuple[int, ...] = ()
    stride = 0
    if isinstance(out, NormOutputs):
        orders, norm, written = out.orders, _RowNorm.of(out), next(iter(out.images.values()))
    else:
        norm, written, stride = _RowNorm.of(scaled), out, 0 if gate else out.stride(0)
    is_scaled = scaled is not None
    kind = NO_HEADS if heads is None else heads.kind
    source = gemm_source(
        type_name, written.dtype, config, gate, orders, is_scaled=is_scaled, heads=kind
    )
    kernel = rtc.load_kernel(source, image.device, config.smem_bytes(type_name))
    arguments = [
        KernelPlanes.of(planes),
        rtc.pointer(image),
        rtc.pointer(written),
        *map(ctypes.c_int, (rows, columns // BLOCK, tokens, stride, exponent)),
        norm,
    ]
    if heads is not None:
        arguments.append(_HeadWrite.of(heads))
        if heads.prefetch is not None:
            arguments.append(_KeyPrefetch.of(heads.prefetch, heads.k_cache))
    rtc.launch(
        kernel,
        -(-rows // (64 * config.groups)),
        128 * config.groups + 32,
        arguments,
        grid_y=config.splits,
        grid_z=image.shape[0],
        is_dependent=is_dependent,
    )
