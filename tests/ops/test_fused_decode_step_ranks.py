"""A whole decode step of several GPUs that share a model: sums over ranks within the launch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import fused_decode_step_on_cpu
from tests.fused_decode_step_model import (
    V_AND_DOWN,
    make_model,
    make_shape,
    shape_of_ranks,
    shard_model,
    share_here,
)
from tests.fused_decode_step_on_cpu import RankInputs
from tests.ops.test_fused_decode_step import (
    SMALL_BLOCKS,
    TOLERANCE,
    layer_slots,
    make_batch,
    make_planes,
    relative_error,
    step,
)
from tiercel.kernels.fused import fused_device
from tiercel.kernels.fused.fused_refusal import Refusal
from tiercel.ops import fused_decode_step as op

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SHAPES = {
    "few": make_shape(hidden=512, inner=1024, heads=8, kv_heads=4),
    "shared": make_shape(hidden=512, inner=1024, heads=8, kv_heads=2),  # of 4 ranks two have a head
    # 8 CTAs have two groups of outputs, and wait for the sums of both.
    "wide": make_shape(hidden=4352, inner=512, heads=4, kv_heads=2),
    "gemma": make_shape(hidden=640, inner=1536, heads=4, kv_heads=2, head_dim=256, window=300),
}


@pytest.fixture(scope="module")
def build_source(tmp_path_factory):
    """Compiles the source for the ranks of a model on a processor; once for each."""

    @functools.cache
    def build(name, masks, size):
        is_biased = name == "shared"
        model = make_model(masks, SHAPES[name], has_qk_norm=not is_biased, has_bias=is_biased)
        memories = share_here(shape_of_ranks(SHAPES[name], size))
        ranks = [shard_model(model, rank, memory) for rank, memory in enumerate(memories)]
        weights, _ = ranks[0]
        folder = tmp_path_factory.mktemp("ranks")
        library = fused_decode_step_on_cpu.build(
            weights.geometry, folder, has_qk_norm=not is_biased, has_bias=is_biased
        )
        return model, ranks, library

    return build


def make_inputs(model, ranks, length):
    """The planes of all heads, each rank's of its own, a batch and a residual."""
    batch, num_blocks = make_batch(length, CPU)
    planes = make_planes(model, num_blocks, batch, CPU)
    inputs = [
        RankInputs(
            weights, *([plane[:, :, heads].contiguous() for plane in side] for side in planes)
        )
        for weights, heads in ranks
    ]
    return planes, inputs, batch, torch.randn(1, model.weights.geometry.shape.hidden_size)


@pytest.mark.parametrize(
    ("name", "masks", "size", "length"),
    [
        pytest.param("few", (V_AND_DOWN, 0), 2, 70, id="two"),
        pytest.param("shared", (0,), 4, 70, id="four", marks=pytest.mark.slow),
        pytest.param("wide", (0, V_AND_DOWN), 2, 300, id="wide", marks=pytest.mark.slow),
        pytest.param("gemma", SMALL_BLOCKS, 2, 500, id="gemma", marks=pytest.mark.slow),
    ],
)
def test_source_adds_all_ranks(name, masks, size, length, build_source):
    """In any order of warps and ranks; all of them have the same bits, launch after launch."""
    model, ranks, library = build_source(name, masks, size)
    planes, inputs, batch, x = make_inputs(model, ranks, length)
    for weights, _ in ranks:
        weights.passed.fill_(-len(masks))  # counts wrap around at 2**32
    found = [
        fused_decode_step_on_cpu.run_ranks(library, x, inputs, batch, seed=seed)
        for seed in range(2)
    ]
    for outs in found:
        assert all(torch.equal(out, found[0][0]) for out in outs)
    assert all((weights.passed == len(masks)).all() for weights, _ in ranks)
    expected = step(x, model, *planes, batch)
    assert relative_error(found[0][0], expected.double()) < TOLERANCE * len(masks)
    for layer, (_, slot) in enumerate(layer_slots(model, batch)):
        for (_, heads), one in zip(ranks, inputs, strict=True):
            for whole, part in ((planes[0], one.k), (planes[1], one.v)):
                wanted = whole[layer].flatten(0, 1)[slot, heads].double()
                error = relative_error(part[layer].flatten(0, 1)[slot], wanted)
                assert error < TOLERANCE * len(masks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["few", "wide"])
def test_source_in_any_order_of_ranks(name, build_source):
    """Many launches with the same memory, of changing lengths, while ranks lag."""
    model, ranks, library = build_source(name, (0, V_AND_DOWN), 2)
    for length in (1, 70, 300):
        _, inputs, batch, x = make_inputs(model, ranks, length)
        run = functools.partial(fused_decode_step_on_cpu.run_ranks, library, x, inputs, batch)
        found = [out for seed in range(6) for out in run(seed=seed)]
        assert found[0].isfinite().all()
        assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.reliability
def test_source_ends_without_another_rank(build_source):
    """A rank that is never heard of ends the wait, with NaN; then all go on."""
    # Of one layer, since who gives up overtakes his own words.
    model, ranks, library = build_source("few", (V_AND_DOWN,), 2)
    _, inputs, batch, x = make_inputs(model, ranks, 70)
    apart, nowhere = [], []
    for one in inputs:
        memory = one.weights.memory
        nowhere.append(torch.zeros_like(memory.buffer))
        addresses = [nowhere[-1].data_ptr()] * 2
        addresses[memory.rank] = memory.buffer.data_ptr()
        alone = replace(memory, addresses=tuple(addresses))
        apart.append(replace_weights(one, memory=alone))
    before = inputs[0].weights.passed.clone()
    outs = fused_decode_step_on_cpu.run_ranks(library, x, apart, batch)
    assert all(out.isnan().all() for out in outs)
    assert torch.equal(inputs[0].weights.passed, before + 1)
    outs = fused_decode_step_on_cpu.run_ranks(library, x, inputs, batch)
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)


def replace_weights(one, **changes):
    """Inputs with other fields of their weights."""
    fields = {name: getattr(one.weights, name) for name in one.weights.__struct_fields__}
    return replace(one, weights=op.FusedDecodeStepWeights(**fields | changes))


@pytest.mark.parametrize("refusal", [None, Refusal("no such width")])
def test_ranks_agree_on_their_memory(refusal, monkeypatch):
    told = []

    def make(num_bytes, group, device, reason):
        told.append((num_bytes, reason))
        return "a rank wants none" if reason else "memory"

    monkeypatch.setattr(fused_device, "make_symmetric_memory", make)
    shape = shape_of_ranks(SHAPES["few"], 2)
    found = op.share_memory(shape, None, CPU, refusal)
    assert told == [(2 * 16 * 2 * 256, refusal.reason if refusal else "")]
    assert found == Refusal("a rank wants none" if refusal else "memory")


@pytest.mark.gpu
@pytest.mark.multigpu
def test_two_gpus_have_the_bits_of_each_other_and_the_step_of_one():
    command = [sys.executable, "-m", "tests.fused_decode_step_on_gpus"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=ROOT, env=environment, timeout=300).returncode == 0
