"""Native norms and gated activations against float64 oracles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiercel.kernels.native.library import load_variant, make_pool, variants
from tiercel.reference import act_mul as act_mul_oracle
from tiercel.reference import rms_norm as rms_norm_oracle

COLUMNS = [1, 5, 8, 31, 100, 576, 1000, 4096, 16384]
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

pytestmark = pytest.mark.parametrize("variant", variants())


def norm_rows(
    variant: str,
    x: Tensor,
    weight: Tensor,
    update: Tensor | None = None,
    update_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    num_threads: int = 2,
) -> Tensor:
    """Norm of the rows of x, which changes."""
    out = torch.full_like(x, torch.nan)
    pointers = [None if t is None else t.data_ptr() for t in (x, update, update_weight, weight)]
    pool = make_pool(num_threads, load_variant(variant)).handle
    load_variant(variant).lib.tc_norm_rows(pool, *pointers, eps, *x.shape, out.data_ptr())
    return out


def make_rows(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, cols)
    x[1::2] *= 1e-3  # rows so small that eps decides
    return x, torch.randn(cols)


@pytest.mark.parametrize("cols", COLUMNS)
@pytest.mark.parametrize("kind", ["plain", "update", "normed update"])
def test_norm_matches_the_oracle(kind: str, cols: int, variant: str) -> None:
    torch.manual_seed(cols)
    x, weight = make_rows(5, cols)
    update = None if kind == "plain" else torch.randn(5, cols)
    update_weight = torch.randn(cols) if kind == "normed update" else None
    expected_x = x.double()
    if update is not None and update_weight is not None:
        expected_x = expected_x + rms_norm_oracle.rms_norm(update, update_weight, 1e-6)
    elif update is not None:
        expected_x = expected_x + update
    out = norm_rows(variant, x, weight, update, update_weight)
    torch.testing.assert_close(x.double(), expected_x, rtol=2e-7, atol=3e-7)
    expected = rms_norm_oracle.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=2.5e-7, atol=0)


def test_a_rows_norm_does_not_depend_on_the_call(variant: str) -> None:
    x, weight = make_rows(9, 1003)
    update = torch.randn(9, 1003)
    together = norm_rows(variant, x.clone(), weight, update, weight, num_threads=3)
    for i in range(9):
        row = slice(i, i + 1)
        own = norm_rows(variant, x[row].clone(), weight, update[row], weight, num_threads=1)
        assert torch.equal(own, together[row])


def act_mul_rows(variant: str, x: Tensor, activation: str) -> Tensor:
    rows, cols = x.shape[0], x.shape[1] // 2
    out = torch.full((rows, cols), torch.nan)
    load_variant(variant).lib.tc_act_mul_rows(
        make_pool(2, load_variant(variant)).handle,
        x.data_ptr(),
        ACTIVATIONS[activation],
        rows,
        cols,
        out.data_ptr(),
    )
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("cols", [1, 7, 8, 333, 1536])
def test_activation_matches_the_oracle(cols: int, activation: str, variant: str) -> None:
    torch.manual_seed(cols)
    x = torch.randn(3, 2 * cols) * torch.tensor([[1.0], [6.0], [40.0]])
    out = act_mul_rows(variant, x, activation)
    expected = act_mul_oracle.act_mul(x, activation)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_large_values_is_finite(activation: str, variant: str) -> None:
    large = [10.0**e for e in range(2, 39)]
    gate = torch.tensor([*large, *(-value for value in large), 0.0, -0.0, 87.5, -87.5, -88.5])
    x = torch.stack((gate, torch.ones_like(gate))).reshape(1, -1)
    out = act_mul_rows(variant, x, activation)[0]
    torch.testing.assert_close(out, gate.clamp(min=0), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_keeps_nan(activation: str, variant: str) -> None:
    x = torch.ones(1, 22)
    x[0, 3] = x[0, 20] = torch.nan
    out = act_mul_rows(variant, x, activation)[0]
    assert out.isnan().nonzero().flatten().tolist() == [3, 9]
