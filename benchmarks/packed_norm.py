"""RMSNorm into images of tokens, at widths of dense models, in graphs.

    python -m benchmarks.packed_norm --out benchmarks/results/packed_norm_h200.json

Floor: the residual and the update read once, the sum and the images written once. The peer is the
norm and a launch for each image.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main
from tiercel.kernels.packed.packed_gemm import image_shape, launch_packed_image
from tiercel.ops.packed_gemm import TokenImage
from tiercel.ops.packed_norm import packed_norm
from tiercel.ops.rms_norm import rms_norm

EPS = 1e-6
WIDTHS = (2560, 4096, 5120)
TOKENS = (17, 32, 64, 96)
ORDERS = ((4,), (4, 6))


@dataclass(frozen=True)
class Inputs:
    """The residual, its update, and the weight of the norm."""

    x: Tensor
    update: Tensor
    weight: Tensor


def in_steps(inputs: Inputs, orders: tuple[int, ...]) -> TokenImage:
    """The norm, then its images."""
    y = rms_norm(inputs.x, inputs.weight, EPS, torch.float16, update=inputs.update)
    tokens, columns = y.shape
    images = {order: y.new_empty(image_shape(tokens, columns)) for order in orders}
    for order, image in images.items():
        launch_packed_image(y, order, image, is_dependent=True)
    return TokenImage(images, (tokens, columns))


def error_of(inputs: Inputs, orders: tuple[int, ...]) -> float:
    """Against the norm by itself, which has an oracle."""
    x = inputs.x.clone()
    found = packed_norm(x, inputs.weight, EPS, orders, inputs.update)
    expected = in_steps(Inputs(inputs.x, inputs.update, inputs.weight), orders)
    pairs = [(found.tensors[order].float(), expected.tensors[order].float()) for order in orders]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def make_case(width: int, tokens: int, orders: tuple[int, ...]) -> Case:
    def make(seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(tokens, width, device="cuda", generator=generator)
        return Inputs(x, x.half() * 0.1, torch.rand(width, device="cuda", generator=generator))

    return Case(
        name=f"{width} tokens={tokens} images={len(orders)}",
        make=make,
        run=lambda inputs: packed_norm(inputs.x, inputs.weight, EPS, orders, inputs.update),
        check=lambda inputs: error_of(inputs, orders),
        tolerance=1e-3,
        num_bytes=tokens * width * (4 + 4 + 2 + 2 * len(orders)),
        peer=lambda inputs: in_steps(inputs, orders),
        peer_name="rms_norm and a launch for each image",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per width, number of tokens and images; a GPU's kernels alone."""
    if device.type == "cpu":
        raise SystemExit("packed_norm: this kernel runs on a GPU; a CPU has rms_norm.py.")
    for width in WIDTHS:
        for tokens in TOKENS:
            for orders in ORDERS:
                yield make_case(width, tokens, orders)


if __name__ == "__main__":
    main(__doc__, cases)
