"""The fused layer tail of several GPUs that share a model: sums over ranks within the launch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import fused_layer_tail_on_cpu
from tests.fused_layer_tail_model import EPS, make_model
from tests.fused_layer_tail_on_cpu import RankInputs
from tiercel.kernels.collectives.symmetric_memory import SymmetricMemory
from tiercel.kernels.fused import fused_device
from tiercel.kernels.fused.fused_layer_tail import peer_bytes
from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape
from tiercel.kernels.fused.fused_refusal import Refusal, refuse_ranks
from tiercel.ops import fused_layer_tail as op
from tiercel.reference import fused_layer_tail as oracle

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TOLERANCE = 1e-3  # as of one GPU
# Widths of one rank: a group of the residual for each CTA; two for some CTAs, one for others.
NARROW = ChainShape(512, 512, 512, 128, 64)
TWO_GROUPS = ChainShape(1536, 512, 1024, 256, 128)


def make_ranks(size, shape, six, num_sms, device=CPU, *, is_last=False, memories=None):
    """A model of each rank: its own random columns, and the norms of all."""
    if memories is None:
        buffers = [
            torch.zeros(peer_bytes(shape.hidden, size), dtype=torch.uint8) for _ in range(size)
        ]
        addresses = tuple(buffer.data_ptr() for buffer in buffers)
        memories = [SymmetricMemory(r, addresses, buffers[r], None) for r in range(size)]
    models = [
        make_model(six, shape, device, rank, is_last=is_last, num_sms=num_sms, memory=memory)
        for rank, memory in enumerate(memories)
    ]
    first = models[0].weights
    norms = {"mlp_norm": first.mlp_norm, "next_norm": first.next_norm}
    for model in models:
        model.weights = replace(model.weights, **norms)
    return models


def make_inputs(models, tokens, seed=0):
    """Attention's outputs of each rank, and the residual of all."""
    shape = models[0].weights.geometry.shape
    generator = torch.Generator().manual_seed(seed)
    attended = [torch.randn(tokens, shape.attended, generator=generator).half() for _ in models]
    return attended, torch.randn(tokens, shape.hidden, generator=generator)


def expected_of(models, attended, x):
    """The residual of all ranks, and each one's heads, in float64."""
    layers = [model.dense() for model in models]
    joined = {name: layers[0][name] for name in ("mlp_norm", "next_norm")}
    joined |= {name: torch.cat([layer[name] for layer in layers], 1) for name in ("o", "down")}
    joined |= {name: torch.cat([layer[name] for layer in layers]) for name in ("gate", "up", "qkv")}
    residual, heads = oracle.fused_layer_tail(torch.cat(attended, 1), x, joined, EPS)
    return residual, heads.chunk(len(models), dim=1)


def relative_error(actual, expected):
    return ((actual.double() - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


@pytest.fixture(scope="module")
def build_source(tmp_path_factory):
    """Compiles the source for a number of tokens and ranks; once for each."""

    @functools.cache
    def build(tokens, size, shape, six, num_sms, is_last):
        models = make_ranks(size, shape, six, num_sms, is_last=is_last)
        folder = tmp_path_factory.mktemp("ranks")
        return models, fused_layer_tail_on_cpu.build(tokens, models[0].weights, folder)

    return build


CASES = [
    pytest.param(3, 2, NARROW, ("down", "v"), 16, False, 2, id="two"),
    pytest.param(11, 2, TWO_GROUPS, (), 32, False, 2, id="two_tiles", marks=pytest.mark.slow),
    pytest.param(1, 4, NARROW, ("o",), 16, True, 2, id="four"),
    pytest.param(16, 8, NARROW, (), 8, False, 2, id="eight", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("tokens", "size", "shape", "six", "num_sms", "is_last", "launches"), CASES
)
def test_source_adds_all_ranks(tokens, size, shape, six, num_sms, is_last, launches, build_source):
    """In any order of warps; all ranks have the same residual, launch after launch."""
    models, library = build_source(tokens, size, shape, six, num_sms, is_last)
    attended, start = make_inputs(models, tokens)
    expected, expected_heads = expected_of(models, attended, start)
    for model in models:
        model.exchange.launches.fill_(-2)  # counts wrap around at 2**32
        model.exchange.counters.fill_(-16)
    found = []
    for seed in range(launches):
        inputs = [
            RankInputs(own, start.clone(), model.weights, model.exchange)
            for own, model in zip(attended, models, strict=True)
        ]
        heads = fused_layer_tail_on_cpu.run_ranks(library, inputs, seed=seed)
        for one in inputs[1:]:
            assert torch.equal(one.x, inputs[0].x)
        found.append([inputs[0].x, *(part for part in heads if part is not None)])
    added = expected - start.double()
    assert relative_error(found[0][0].double() - start.double(), added) < TOLERANCE
    for part, wanted in zip(found[0][1:], expected_heads, strict=False):
        assert relative_error(part, wanted) < TOLERANCE
    assert len(found[0]) == 1 + (0 if is_last else size)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.reliability
def test_source_ends_without_another_rank(build_source):
    """A rank that is never heard of ends the wait, with NaN."""
    models, library = build_source(3, 2, NARROW, ("down", "v"), 16, False)
    attended, start = make_inputs(models, 3)
    inputs = []
    for own, model in zip(attended, models, strict=True):
        memory = model.exchange.memory
        memory.buffer.zero_()  # of other launches
        nowhere = torch.zeros_like(memory.buffer)
        addresses = [nowhere.data_ptr()] * 2
        addresses[memory.rank] = memory.buffer.data_ptr()
        memory = replace(memory, addresses=tuple(addresses), handle=nowhere)
        exchange = op.make_exchange(model.weights.geometry, CPU, memory)
        inputs.append(RankInputs(own, start.clone(), model.weights, exchange))
    fused_layer_tail_on_cpu.run_ranks(library, inputs)
    assert all(one.x.isnan().all() for one in inputs)


def test_more_ranks_than_the_kernel_knows():
    assert refuse_ranks(8) is None
    assert refuse_ranks(16) == Refusal("16 GPUs share the model, more than 8")


@pytest.mark.parametrize("refusal", [None, Refusal("no such width")])
def test_ranks_agree_on_their_memory(refusal, monkeypatch):
    told = []

    def make(num_bytes, group, device, reason):
        told.append((num_bytes, reason))
        return "a rank wants none" if reason else "memory"

    class Two:
        def size(self):
            return 2

    monkeypatch.setattr(fused_device, "make_symmetric_memory", make)
    found = op.share_memory(512, Two(), CPU, refusal)
    assert told == [(2 * 16 * 2 * 2 * 2048, refusal.reason if refusal else "")]
    assert found == Refusal("a rank wants none" if refusal else "memory")


@pytest.mark.gpu
@pytest.mark.multigpu
def test_two_gpus_have_the_bits_of_each_other_and_the_sums_of_both():
    command = [sys.executable, "-m", "tests.fused_layer_tail_on_gpus"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, cwd=ROOT, env=environment, timeout=300).returncode == 0
