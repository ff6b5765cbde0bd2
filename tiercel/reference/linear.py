"""Oracle of the linear layer, in float64 on decoded weights."""

from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X @ weight^T + bias, float64."""
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()
