"""Wdown (act(Wgate x) * Wup x) for 17 to 96 tokens and K-quantised matrices, in two launches.

Both are products of packed_gemm: that with gate and up, whose CTAs hold equal rows of both and
write act(gate) * up as an image of tokens, then that of the image with down.

Floor: the planes of both matrices read once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from tiercel.kernels.packed.packed_gemm import (
    TOKEN_CLASSES,
    Gate,
    NormInputs,
    NormOutputs,
    PackedGemmConfig,
    column_order,
    gemm_source,
    image_source,
    launch_packed_product,
    select_packed_gemm,
)
from tiercel.kernels.runtime import rtc

Types = tuple[str, str]
"""Of gate and up, and of down."""
Sizes = tuple[int, int]
"""Columns of x, and of down."""


class MlpMatrices(Struct, frozen=True):
    """The matrices of an MLP on a device.

    Attributes:
        types: of gate and up, and of down.
        sizes: columns of gate and up, and of down.
        gate_up: planes of the rows of gate, then of up, in layout SOA.
        down: planes of down.
        exponents: of gate and up, and of down; see `launch_packed_product`.
    """

    types: Types
    sizes: Sizes
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    exponents: tuple[int, int]


def select_packed_mlp(
    types: Types, sizes: Sizes, tokens: int
) -> tuple[PackedGemmConfig, PackedGemmConfig]:
    """Choose both launches, of one tile of tokens. Pure.

    Args:
        types: of gate and up, and of down.
        sizes: columns of both.
        tokens: > 0.
    """
    hidden, inner = sizes
    first = select_packed_gemm(types[0], (2 * inner, hidden), tokens)
    return first, select_packed_gemm(types[1], (hidden, inner), tokens)


def load_packed_mlp(
    types: Types,
    sizes: Sizes,
    activation: str,
    device: torch.device,
    orders: tuple[int, ...] = (),
    *,
    is_scaled: bool = False,
) -> None:
    """Load what `select_packed_mlp` may choose for one tile of tokens.

    Args:
        types: of gate and up, and of down.
        sizes: columns of both.
        activation: of `ops/act_mul.py`.
        device: a GPU.
        orders: of the images of `NormOutputs`; () for a result of its own.
        is_scaled: whether the tokens come with `NormInputs`.
    """
    gate = Gate(activation, column_order(types[1]))
    kernels = []
    for tokens in TOKEN_CLASSES:
        first, second = select_packed_mlp(types, sizes, tokens)
        up = gemm_source(types[0], torch.float16, first, gate, is_scaled=is_scaled)
        down = gemm_source(types[1], torch.float16, second, orders=orders)
        kernels.append((image_source(column_order(types[0]), tokens), 0))
        kernels.append((up, first.smem_bytes(types[0])))
        kernels.append((down, second.smem_bytes(types[1])))
    rtc.fill_cache([source for source, _ in kernels], rtc.device_arch(device))
    for source, smem_bytes in kernels:
        rtc.load_kernel(source, device, smem_bytes)


def launch_packed_mlp(
    image: Tensor,
    matrices: MlpMatrices,
    activation: str,
    between: Tensor,
    out: Tensor | NormOutputs,
    configs: tuple[PackedGemmConfig, PackedGemmConfig],
    scaled: NormInputs | None = None,
    *,
    is_dependent: bool,
) -> None:
    """Enqueue both products on the current stream; the op has checked and allocated.

    Args:
        image: of the tokens, in the order of gate's and up's columns.
        matrices: on its device.
        activation: of `ops/act_mul.py`.
        between: image of act(gate) * up, of `image_shape`, float16, overwritten.
        out: (tokens, hidden) float16, unit inner stride; or what takes its place.
        configs: from `select_packed_mlp`.
        scaled: with an image from `NormOutputs`.
        is_dependent: see `rtc.launch`.
    """
    (first, second), (hidden, inner) = configs, matrices.sizes
    names = matrices.types
    gate = Gate(activation, column_order(names[1]))
    tokens = out.x.shape[0] if isinstance(out, NormOutputs) else out.shape[0]
    shape = (tokens, 2 * inner, hidden)
    up, last = matrices.exponents
    launch_packed_product(
        matrices.gate_up,
        names[0],
        image,
        between,
        shape,
        up,
        first,
        gate,
        scaled,
        is_dependent=is_dependent,
    )
    shape = (tokens, hidden, inner)
    launch_packed_product(
        matrices.down, names[1], between, out, shape, last, second, is_dependent=is_dependent
    )
