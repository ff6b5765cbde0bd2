"""Oracle of what a step writes: all vectors and entries of one sequence, in float64."""

from torch import Tensor

from tiercel.reference.kv_compress import kv_compress
from tiercel.reference.latent_rope import latent_rope


def vectors(
    x: Tensor, positions: Tensor, angles: list[float], eps: float, weight: Tensor
) -> Tensor:
    """Latent vectors (T, d), normed and rotated."""
    return latent_rope(x, positions, angles, eps, weight)


def entries(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    angles: list[float],
    eps: float,
    weight: Tensor,
) -> Tensor:
    """Entries (T // ratio, d) of a sequence from position 0.

    kv, gate: (T, channels) without the position bias (ratio, channels).
    """
    ratio, width = bias.shape[0], weight.shape[0]
    biased = gate.double() + bias.double().repeat(-(-gate.shape[0] // ratio), 1)[: gate.shape[0]]
    sums = kv_compress(kv, biased, width, ratio)
    first = sums.new_tensor(range(0, ratio * sums.shape[0], ratio))
    return latent_rope(sums, first, angles, eps, weight)
