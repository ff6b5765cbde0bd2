"""Norms that add the parts of several ranks: in one launch where a kernel takes them."""

from types import SimpleNamespace

import pytest
import torch

from tiercel.layers.norm import RMSNorm
from tiercel.reference.rms_norm import rms_norm as oracle

EPS = 0.1


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


class Sums:
    """Kernels for small tensors that note what they are given."""

    def __init__(self, takes):
        self.takes, self.calls = takes, []

    def norms(self, x):
        return self.takes

    def add_norm(self, x, residual, weight, eps):
        self.calls.append((x, residual, weight, eps))
        return "normed"


def group_of(small):
    return SimpleNamespace(size=2, small_sums=small, all_reduce=lambda x: 2 * x)


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("has_update_norm", [False, True])
def test_parts_are_added_by_the_kernel_or_before(takes, has_update_norm):
    small, weight = Sums(takes), torch.rand(8) + 0.5
    update_weight = torch.rand(8) if has_update_norm else None
    norm = RMSNorm(weight, EPS, torch.float32, update_weight, group_of(small))
    x, update = torch.randn(3, 8), torch.randn(3, 8)
    before = x.clone()
    found = norm(x, update.as_subclass(OnGpu) if takes else update)
    if takes and not has_update_norm:
        assert found == "normed"
        ((part, residual, *rest),) = small.calls
        assert torch.equal(part, update)
        assert residual is x
        assert rest == [weight, EPS]
        return
    assert small.calls == []
    whole = 2 * update
    added = whole if update_weight is None else oracle(whole, update_weight, EPS)
    torch.testing.assert_close(x.double(), before + added, check_dtype=False)
    torch.testing.assert_close(
        found.double(), oracle(before + added, weight, EPS), rtol=1e-5, atol=1e-5
    )


def test_without_an_update_nothing_is_added():
    norm = RMSNorm(torch.ones(8), EPS, torch.float32, group=group_of(Sums(True)))
    x = torch.randn(3, 8)
    torch.testing.assert_close(
        norm(x).double(), oracle(x, torch.ones(8), EPS), rtol=1e-5, atol=1e-5
    )
