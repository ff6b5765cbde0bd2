"""Which steps go from attention to attention in one launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape, ChainTypes, partition
from tiercel.layers import fused_layer_tail as layers
from tiercel.layers.fused_layer_tail import FusedLayerTail, make_fused_layer_tail
from tiercel.ops.fused_layer_tail import Refusal

TYPES = ChainTypes(o=False, gate_up=False, down=False)


def make_chain(*widths):
    """Of layers whose attention has these widths; no more of them is asked for."""
    shapes = [ChainShape(2048, width, 2048, 512) for width in widths]
    weights = [SimpleNamespace(geometry=partition(shape, TYPES, 132)) for shape in shapes]
    return FusedLayerTail((), weights, None, is_dependent=False)


@pytest.mark.parametrize(("widths", "most"), [((2048, 2048), 16), ((2048, 8704), 8)])
def test_a_step_has_no_more_tokens_than_every_layer_takes(widths, most):
    chain = make_chain(*widths)
    taken = [
        tokens
        for tokens in range(20)
        if chain.supports(SimpleNamespace(num_tokens=tokens, items=None))
    ]
    assert taken == list(range(1, most + 1))
    assert not chain.supports(SimpleNamespace(num_tokens=1, items=object()))


def test_a_width_that_is_not_faster_is_left_out_before_weights_are_looked_at(monkeypatch):
    monkeypatch.setattr(layers, "refuse_device", lambda device: pytest.fail("was asked"))
    norm = SimpleNamespace(weight=torch.ones(1024))
    layer = SimpleNamespace(mlp_norm=norm)
    found = make_fused_layer_tail([layer], 1e-6, torch.device("cpu"))
    assert found.reason.startswith("hidden_size is 1024;")


def test_gpus_without_shared_memory_are_refused_with_a_reason(monkeypatch):
    monkeypatch.setattr(layers, "refuse_device", lambda device: None)
    layer = SimpleNamespace(mlp_norm=SimpleNamespace(weight=torch.ones(2048)))
    group = SimpleNamespace(size=2, small_sums=None, processes=object())
    found = make_fused_layer_tail([layer], 1e-6, torch.device("cuda"), group)
    assert found == Refusal("2 GPUs share the model and no memory")


@pytest.mark.parametrize("fits", [False, True])
def test_a_rank_that_does_not_fit_asks_the_others_all_the_same(monkeypatch, fits):
    """It would keep them waiting for its memory."""
    told = []
    misfit = Refusal("no such width")
    made = [SimpleNamespace(geometry=partition(ChainShape(2048, 2048, 2048, 512), TYPES, 132, 2))]

    def share(hidden, processes, device, refusal):
        told.append((hidden, refusal))
        return Refusal("of rank 1")

    monkeypatch.setattr(layers, "refuse_device", lambda device: None)
    monkeypatch.setattr(layers, "_bring_together", lambda *_: made if fits else misfit)
    monkeypatch.setattr(layers, "share_memory", share)
    layer = SimpleNamespace(mlp_norm=SimpleNamespace(weight=torch.ones(2048)))
    group = SimpleNamespace(size=2, small_sums=object(), processes=object())
    found = make_fused_layer_tail([layer], 1e-6, torch.device("cuda"), group)
    assert told == [(2048, None if fits else misfit)]
    assert found == Refusal("of rank 1")


def test_a_cpu_is_refused_with_a_reason():
    layer = SimpleNamespace(mlp_norm=SimpleNamespace(weight=torch.ones(2048)))
    found = make_fused_layer_tail([layer], 1e-6, torch.device("cpu"))
    assert found == Refusal("the device is cpu, not a GPU")
