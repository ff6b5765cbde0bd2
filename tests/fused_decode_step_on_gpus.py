"""Checks the whole decode step of several GPUs, a process each; ends with 0 if all is right.

    python -m tests.fused_decode_step_on_gpus --ranks 2 --launches 2000

Layers of Qwen3-8B's sizes, which each rank draws whole from one seed and of which it takes its
part: against the kernel of one GPU and against the oracle. Then launches at changing depths, eager
ones and in a graph, while a rank lags: all of them must have the bits of the first, on all ranks.
Once a rank comes seconds later than CTAs of one GPU would wait.
"""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.all_reduce import join_ranks
from tests.fused_decode_step_model import (
    EPS,
    SCALE,
    V_AND_DOWN,
    make_model,
    make_shape,
    shape_of_ranks,
    shard_model,
)
from tests.launches_on_gpus import run_on_gpus
from tests.ops.test_fused_decode_step import (
    TOLERANCE,
    layer_slots,
    make_batch,
    make_planes,
    relative_error,
    step,
)
from tiercel.ops.fused_decode_step import Refusal, fused_decode_step, prepare_caches, share_memory
from tiercel.reference import fused_decode_step as oracle

LENGTHS = (1, 70, 1000, 8192)
MASKS = (V_AND_DOWN, 0, V_AND_DOWN, 0)
GRAPH_LAUNCHES = 12
LATE_S = 6.0


class Decoder:
    """Layers of all ranks, a token at each depth, and what this rank has of them."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        torch.manual_seed(3)
        shape = make_shape(inner=12288)
        model = make_model(MASKS, shape, device)
        assert dist.group.WORLD is not None
        memory = share_memory(shape_of_ranks(shape, ranks), dist.group.WORLD, device, None)
        assert not isinstance(memory, Refusal), memory.reason
        self.weights, heads = shard_model(model, rank, memory)
        self.x = torch.randn(1, shape.hidden_size, device=device)
        self.inputs = []
        for length in LENGTHS:
            batch, num_blocks = make_batch(length, device)
            planes = make_planes(model, num_blocks, batch, device)
            own = [[plane[:, :, heads].contiguous() for plane in side] for side in planes]
            self.inputs.append((prepare_caches(self.weights.geometry, *own), batch))
            self.check(model, planes, own, heads, length)

    def check(self, model, planes, own, heads, length) -> None:
        """Compare with one GPU, with the oracle, and ranks with each other."""
        batch = self.inputs[-1][1]
        slots = layer_slots(model, batch)
        turn = model.weights.ropes[0][int(batch.positions[0])]
        layers = [
            model.dense(i) | {"keys": k.flatten(0, 1)[seen], "values": v.flatten(0, 1)[seen]}
            for i, ((seen, _), k, v) in enumerate(zip(slots, *planes, strict=True))
        ]
        expected, new = oracle.fused_decode_step(self.x[0], layers, turn, EPS, SCALE, rounds=True)
        found = self.run(len(self.inputs) - 1)
        alone = step(self.x, model, *planes, batch)
        errors = [relative_error(found[0], wanted.double()) for wanted in (expected, alone[0])]
        for i, (_, slot) in enumerate(slots):
            for side, wanted in zip(own, new[i], strict=True):
                errors.append(relative_error(side[i].flatten(0, 1)[slot], wanted[heads]))
        assert max(errors) < TOLERANCE * len(MASKS), (length, errors)
        every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(every, found)
        assert all(torch.equal(found, other) for other in every), length

    def run(self, index: int) -> Tensor:
        """A launch at one of `LENGTHS`."""
        caches, batch = self.inputs[index]
        return fused_decode_step(self.x, self.weights, caches, batch)


def count_wrong(decoder: Decoder, rank: int, launches: int) -> Tensor:
    """Launches with other bits than the first at their depth."""
    expected = [decoder.run(index) for index in range(len(LENGTHS))]
    wrong = torch.zeros((), dtype=torch.int64, device=decoder.x.device)
    chooser, lagging = random.Random(4), random.Random(rank)
    for _ in range(launches):
        index = chooser.randrange(len(LENGTHS))
        if lagging.random() < 0.02:
            torch.cuda._sleep(2_000_000)  # cycles, 1 ms
        wrong.add_((decoder.run(index) != expected[index]).any())
    graph = torch.cuda.CUDAGraph()
    order = [chooser.randrange(len(LENGTHS)) for _ in range(GRAPH_LAUNCHES)]
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [decoder.run(index) for index in order]
    for _ in range(launches // GRAPH_LAUNCHES):
        if lagging.random() < 0.1:
            torch.cuda._sleep(2_000_000)
        graph.replay()
        for index, result in zip(order, results, strict=True):
            wrong.add_((result != expected[index]).any())
    torch.cuda.synchronize()
    if rank == 0:
        time.sleep(LATE_S)
    wrong.add_((decoder.run(0) != expected[0]).any())
    return wrong


@torch.inference_mode()
def run_rank(rank: int, ranks: int, place: str, launches: int) -> None:
    _, device = join_ranks(rank, ranks, place)
    decoder = Decoder(rank, ranks, device)
    wrong = count_wrong(decoder, rank, launches).item()
    assert wrong == 0, wrong
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_on_gpus(__doc__, run_rank)
