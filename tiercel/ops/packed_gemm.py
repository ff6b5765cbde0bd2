"""Packed GEMM: some dozens of tokens times a K-quantised matrix that stays as small as its file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.kernels.packed import packed_gemm as kernel
from tiercel.kernels.packed.packed_types import UNIT_COLUMNS
from tiercel.ops.dequantize import dequantize
from tiercel.ops.packed_matvec import PackedWeight, prepare_result
from tiercel.quant_types import Layout, QuantType

TYPES = (
    QuantType.Q4_K,
    QuantType.Q6_K,
    QuantType.Q5_K,
    QuantType.Q8_0,
    QuantType.Q4_0,
    QuantType.Q4_1,
    QuantType.IQ4_NL,
    QuantType.IQ4_XS,
)


class TokenImage(Struct, frozen=True):
    """Tokens as `packed_gemm` reads them on a GPU.

    Attributes:
        tensors: float16, by the order of their columns (`column_order`).
        shape: (tokens, columns).
        roots: (tokens of all tiles,) float32, what rows were multiplied by in the norm before its
            weight; None where they are no norm's.
        scaled: by which the rows are normed where they are read; None where they are.
    """

    tensors: Mapping[int, Tensor]
    shape: tuple[int, int]
    roots: Tensor | None = None
    scaled: kernel.NormInputs | None = None


class NextNorm(Struct, frozen=True):
    """The norm of the residual after a product is added to it.

    Attributes:
        x: (tokens, rows) float32, contiguous, the residual, mutated.
        weight: (rows,) float32.
        eps: added to the mean square, > 0.
        orders: of its images, for what reads it.
        roots: `TokenImage.roots` of the norm before.
        room: from `norm_room`.
    """

    x: Tensor
    weight: Tensor
    eps: float
    orders: Sequence[int]
    roots: Tensor
    room: int

    def make_outputs(self) -> tuple[kernel.NormOutputs, TokenImage]:
        """Tensors for a product to write, and the image that they then are."""
        tokens, rows = self.x.shape
        shape, tile = kernel.image_shape(tokens, rows), kernel.tile_tokens(tokens)
        images = {order: self.x.new_empty(shape, dtype=torch.float16) for order in self.orders}
        squares = self.x.new_empty(shape[0], rows // kernel.SQUARES_COLUMNS, tile)
        written = kernel.NormOutputs(self.x, self.weight, images, squares, self.roots, self.room)
        roots = torch.empty_like(self.roots)
        scaled = kernel.NormInputs(squares, self.roots, roots, self.eps, self.room)
        return written, TokenImage(images, (tokens, rows), roots, scaled)


def norm_room(weight: Tensor) -> int:
    """The room of a norm's images between two products; waits for the device, so at load."""
    return kernel.select_room(weight.abs().max().item(), weight.shape[0])


def column_order(weight: PackedWeight) -> int:
    """The order of columns that a weight reads."""
    return kernel.column_order(weight.tensor.kernel_type)


@functools.cache
def has_packed_gemm(device: torch.device) -> bool:
    """Whether this op's kernel runs on a CUDA device."""
    return torch.cuda.get_device_capability(device) == kernel.CAPABILITY


def is_read(weight: PackedWeight) -> bool:
    """Whether this op reads a weight: its type, its layout, rows of whole units."""
    is_whole = weight.tensor.shape[1] % UNIT_COLUMNS == 0
    is_known = weight.tensor.layout in (Layout.SOA, Layout.STEP) and weight.tensor.qtype in TYPES
    return is_whole and is_known


def load_packed_gemm(
    weight: PackedWeight,
    out_dtype: torch.dtype,
    orders: Sequence[int] = (),
    *,
    is_scaled: bool = False,
    heads: kernel.HeadKind = kernel.NO_HEADS,
) -> None:
    """Load every kernel that `packed_gemm` may launch for a weight on a GPU.

    Args:
        weight: from `prepare_packed`.
        out_dtype: of results.
        orders: of images, for `packed_gemm_norm`.
        is_scaled: whether tokens are its images.
        heads: for `packed_gemm_heads`: columns of a head, whether it norms and prefetches them.
    """
    tensor = weight.tensor
    device = tensor.ordered_planes()[0].device
    if is_read(weight) and has_packed_gemm(device):
        shape = (tensor.shape[0], tensor.shape[1])
        kernel.load_packed_gemm(
            tensor.kernel_type,
            shape,
            out_dtype,
            device,
            tuple(orders),
            is_scaled=is_scaled,
            heads=heads,
        )


def make_image(x: Tensor, weight: PackedWeight) -> TokenImage:
    """The image of x (tokens, in) on a GPU, float16 and contiguous, for a weight."""
    tokens, columns = x.shape
    order = column_order(weight)
    image = x.new_empty(kernel.image_shape(tokens, columns))
    kernel.launch_packed_image(x, order, image, is_dependent=weight.is_dependent)
    return TokenImage({order: image}, (tokens, columns))


def packed_gemm(
    x: Tensor | TokenImage,
    weight: PackedWeight,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """X @ W^T by tensor cores, the weights decoded on their way to them.

    Args:
        x: (tokens, in) float16, contiguous, on the weight's device; or an image for the weight.
        weight: from `prepare_packed`, in layout SOA or STEP.
        out_dtype: float16, bfloat16 or float32; None for that of `out`, or float16.
        out: (tokens, rows) to write to, unit inner stride; None for a new one.

    Returns:
        (tokens, rows). Weights are rounded to float16 on their way, their scales before that; sums
        in float32, rounded once. The order of sums depends on the number of tokens and the shape.

    Raises:
        ArgumentError: the shapes or dtypes disagree, or the weight is in the layout of the file.
    """
    check_tokens("packed_gemm", x, weight)
    tokens, rows = x.shape[0], weight.tensor.shape[0]
    device = weight.tensor.ordered_planes()[0].device
    out = prepare_result("packed_gemm", (tokens, rows), device, out_dtype, out)
    if isinstance(x, Tensor) and not x.is_cuda:
        return out.copy_(x.float() @ dequantize(weight.tensor, torch.float32).t())
    if tokens:
        _launch(x, weight, out)
    return out


def packed_gemm_norm(x: Tensor | TokenImage, weight: PackedWeight, norm: NextNorm) -> TokenImage:
    """The residual += X @ W^T, and its norm for the next product, in one launch on a GPU.

    Args:
        x: as in `packed_gemm`.
        weight: of `norm_refusal`'s columns as rows.
        norm: of as many tokens.

    Returns:
        The image. A row's sum is rounded to float16 once, times the norm's weight and the root of
        the norm before; what reads it multiplies its results by the quotient of both roots.

    Raises:
        ArgumentError: the shapes or dtypes disagree.
    """
    check_tokens("packed_gemm_norm", x, weight)
    tokens, rows = x.shape[0], weight.tensor.shape[0]
    if norm.x.shape != (tokens, rows) or rows % UNIT_COLUMNS or not tokens:
        raise ArgumentError(
            f"packed_gemm_norm: the residual is {tuple(norm.x.shape)} but the product is "
            f"{(tokens, rows)}.",
            hint=f"Pass a residual of the product's shape, in rows of {UNIT_COLUMNS}.",
        )
    written, normed = norm.make_outputs()
    _launch(x, weight, written)
    return normed


def heads_refusal(weights: Sequence[PackedWeight], head_dim: int, dtype: torch.dtype) -> str:
    """Why `packed_gemm_heads` takes no weights, without a full stop; "" if it does. Pure."""
    if head_dim not in kernel.HEAD_DIMS:
        return f"heads are {head_dim}, none of {kernel.HEAD_DIMS} columns"
    if dtype != torch.float16:
        return f"the cache is {dtype}, not float16".replace("torch.", "")
    if any(weight.tensor.shape[0] % head_dim for weight in weights):
        return "a matrix ends within a head"
    if not all(map(is_read, weights)):
        return "packed_gemm does not read a matrix"
    return ""


def keys_ahead(
    tables: Tensor, rows: Tensor, seq_lens: Tensor, num_bytes: int
) -> kernel.KeyPrefetch | None:
    """The first keys and values of each request, for `packed_gemm_heads`; None for no bytes.

    Args:
        tables: (engine rows, max_blocks) int32, unit inner stride, of k_cache and v_cache.
        rows: (requests,) int32, of the tables.
        seq_lens: (requests,) int32; at least that many tokens have blocks.
        num_bytes: of all requests together.
    """
    return kernel.KeyPrefetch(tables, rows, seq_lens, num_bytes) if num_bytes else None


def packed_gemm_heads(
    x: Tensor | TokenImage,
    weights: Sequence[PackedWeight],
    positions: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    norms: tuple[Tensor, ...] = (),
    eps: float = 0.0,
    prefetch: kernel.KeyPrefetch | None = None,
) -> Tensor:
    """`packed_gemm`, then `rotary_kv_write` of its results, in a launch for each weight on a GPU.

    Args:
        x: as in `packed_gemm`, at least one token.
        weights: rows of queries, keys and values end to end; `heads_refusal` has no reason.
        positions: as in `rotary_kv_write`, and likewise those below.
        table: (max_positions, 2, head_dim / 2): heads rotate whole.
        k_cache: float16, mutated.
        v_cache: likewise.
        slot_mapping: likewise.
        num_heads: of queries.
        norms: weights of queries' and keys' norms; () for none.
        eps: added to the mean squares.
        prefetch: keys and values that the attention after it reads, from `keys_ahead`; None for
            none. The first weight's launch requests them.

    Returns:
        (tokens, num_heads, head_dim) float16 queries. Sums in float32, rounded once after rotation.

    Raises:
        ArgumentError: the shapes or dtypes disagree.
    """
    for weight in weights:
        check_tokens("packed_gemm_heads", x, weight)
    (kv_heads, head_dim), tokens = k_cache.shape[2:], x.shape[0]
    reason = heads_refusal(weights, head_dim, k_cache.dtype)
    rows, wanted = sum(weight.tensor.shape[0] for weight in weights), num_heads + 2 * kv_heads
    is_whole = rows == wanted * head_dim and 2 * table.shape[2] == head_dim
    if reason or not is_whole or not 0 < tokens == len(positions) == len(slot_mapping):
        raise ArgumentError(
            f"packed_gemm_heads: {reason or f'{rows} rows for {wanted} heads of {head_dim}'}.",
            hint="Pass tokens with positions and slots, all matrices, and a table of whole heads.",
        )
    device = weights[0].tensor.ordered_planes()[0].device
    out = torch.empty(tokens, num_heads, head_dim, dtype=torch.float16, device=device)
    heads = kernel.HeadOutputs(
        positions, table, slot_mapping, k_cache, v_cache, norms, eps, num_heads, 0, prefetch
    )
    first = 0
    for weight in weights:
        _launch(x, weight, out.flatten(1), heads)
        first += weight.tensor.shape[0] // head_dim
        heads = replace(heads, first=first, prefetch=None)
    return out


def _launch(
    x: Tensor | TokenImage,
    weight: PackedWeight,
    out: Tensor | kernel.NormOutputs,
    heads: kernel.HeadOutputs | None = None,
) -> None:
    image = make_image(x, weight) if isinstance(x, Tensor) else x
    tokens, (rows, columns), name = x.shape[0], weight.tensor.shape, weight.tensor.kernel_type
    multiple = kernel.HEAD_DIMS[0] if heads is None else heads.kind[0]
    kernel.launch_packed_product(
        weight.tensor.ordered_planes(),
        name,
        image.tensors[column_order(weight)],
        out,
        (tokens, rows, columns),
        weight.exponent,
        kernel.select_packed_gemm(name, (rows, columns), tokens, multiple),
        scaled=image.scaled,
        heads=heads,
        is_dependent=weight.is_dependent,
    )


def check_tokens(op: str, x: Tensor | TokenImage, weight: PackedWeight) -> None:
    """Refuse what a product with a weight does not read.

    Raises:
        ArgumentError: see `packed_gemm`; names the op.
    """
    in_features = weight.tensor.shape[1]
    is_input = len(x.shape) == 2 and x.shape[1] == in_features
    if isinstance(x, Tensor):
        is_input = is_input and x.is_contiguous() and x.dtype == torch.float16
    else:
        is_input = is_input and column_order(weight) in x.tensors
    if not is_input or not is_read(weight):
        kind = x.dtype if isinstance(x, Tensor) else "image"
        raise ArgumentError(
            f"{op}: x is {tuple(x.shape)} {kind} but the weight takes rows of {in_features} and is "
            f"{weight.tensor.qtype.name} in layout {weight.tensor.layout.name}.",
            hint=f"Pass contiguous (tokens, {in_features}) float16 and layout SOA of one of "
            f"{', '.join(qtype.name for qtype in TYPES)} in rows of {UNIT_COLUMNS}.",
        )
