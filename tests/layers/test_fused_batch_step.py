"""Which steps run all layers in one launch, and what of the layers it takes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.fused_batch_step_model import HEAD_EPS, SCALE, make_step
from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape
from tiercel.layers.attention import AttentionShape, HeadNorms
from tiercel.layers.fused_batch_step import make_fused_batch_step
from tiercel.layers.fused_layer_tail import FusedLayerTail
from tiercel.ops.fused_batch_step import Refusal, fused_batch_step

SHAPE = ChainShape(512, 512, 1024, 768, 256)


@pytest.fixture(scope="module")
def step():
    return make_step(SHAPE, 2, [70, 1], [(), ("v",), ()], torch.device("cpu"), num_sms=8)


def make_layers(step, groups=(0, 0, 0)):
    """Of a decoder, as far as they are asked for."""
    return [
        SimpleNamespace(
            attn_norm=lambda x: x,
            attention=SimpleNamespace(
                shape=AttentionShape(4, 2, 128, SCALE, 0),
                qkv=lambda _: step.heads,
                rope_table=step.weights.rope_table,
                head_norms=HeadNorms(*layer.head_norms, HEAD_EPS),
                k_cache=layer.k_cache,
                v_cache=layer.v_cache,
                group=group,
            ),
        )
        for layer, group in zip(step.weights.layers, groups, strict=True)
    ]


def make_tail(step, **groups):
    tails = [layer.tail for layer in step.weights.layers]
    return FusedLayerTail(make_layers(step, **groups), tails, None, is_dependent=False)


def test_a_step_of_single_tokens_is_one_call(step, monkeypatch):
    properties = SimpleNamespace(multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    own = step.with_caches()
    tail = make_tail(own)
    assert tail.bind_cache() is None
    found = tail(step.x.clone(), step.batch)
    expected = step.x.clone()
    other = step.with_caches()
    fused_batch_step(step.heads, expected, other.weights, step.batch)
    assert torch.equal(found, expected)
    for caches, others in zip(own.caches(), other.caches(), strict=True):
        for cache, same in zip(caches, others, strict=True):
            assert torch.equal(cache.nan_to_num(7), same.nan_to_num(7))


def test_steps_that_go_another_way(step):
    tail = make_tail(step)
    made = make_fused_batch_step(tail.layers, tail.weights, 8)
    batch = step.batch
    assert made.supports(batch)
    assert not made.supports(replace(batch, items=object()))
    assert not made.supports(replace(batch, max_query_len=2))
    assert not made.supports(replace(batch, num_tokens=17, num_reqs=17))
    assert not made.supports(replace(batch, num_tokens=0, num_reqs=0))
    assert not made.supports(replace(batch, num_tokens=4))


def test_refusals(step):
    tail = make_tail(step, groups=(0, 1, 0))
    found = make_fused_batch_step(tail.layers, tail.weights, 8)
    assert found == Refusal("layers have caches of different groups")
    layers = make_layers(step)
    layers[0].attention.rope_table = torch.zeros(100, 2, 32)
    found = make_fused_batch_step(layers, tail.weights, 8)
    assert found == Refusal("64 dimensions of a head rotate, not all")
