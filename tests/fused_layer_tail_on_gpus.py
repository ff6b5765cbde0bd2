"""Checks the fused layer tail of several GPUs, a process each; ends with 0 if all is right.

    python -m tests.fused_layer_tail_on_gpus --ranks 2 --launches 2000

A layer of Qwen3-8B, of which each rank has its columns, for 1 to 16 tokens: against the oracle of
all columns; then launches of changing numbers of tokens, eager ones and in a graph, with a rank
that lags. All of them must have the bits of the first, on all ranks.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.all_reduce import join_ranks
from tests.fused_layer_tail_model import EPS, Model, make_model
from tests.launches_on_gpus import run_on_gpus
from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape
from tiercel.ops.fused_layer_tail import Refusal, fused_layer_tail, share_memory
from tiercel.reference import fused_layer_tail as oracle

TOKENS = (1, 2, 7, 8, 9, 16)
GRAPH_LAUNCHES = 12
TOLERANCE = 1e-3


class Layer:
    """A layer of all ranks, each of which computes it for itself from one seed."""

    def __init__(self, rank: int, ranks: int, device: torch.device, is_last: bool) -> None:
        self.ranks = ranks
        shape = ChainShape(4096, 4096 // ranks, 12288 // ranks, 5120 // ranks, 1024 // ranks)
        assert dist.group.WORLD is not None
        memory = share_memory(shape.hidden, dist.group.WORLD, device, None)
        assert not isinstance(memory, Refusal), memory.reason
        six = ("down", "v")
        models = [
            make_model(six, shape, device, seed, is_last=is_last, memory=memory)
            for seed in range(ranks)
        ]
        norms = {name: getattr(models[0].weights, name) for name in ("mlp_norm", "next_norm")}
        self.own = models[rank]
        self.own.weights = replace(self.own.weights, **norms)
        generator = torch.Generator(device).manual_seed(9)
        size = (ranks, 16, shape.attended)
        every = torch.randn(size, device=device, generator=generator).half()
        self.attended = every[rank].clone()
        self.x = torch.randn(16, shape.hidden, device=device, generator=generator)
        self.check(rank, models, every)

    def check(self, rank: int, models: list[Model], attended: Tensor) -> None:
        """Compare with the oracle, and ranks with each other."""
        layers = [model.dense() for model in models]
        joined = {name: torch.cat([layer[name] for layer in layers], 1) for name in ("o", "down")}
        joined |= {n: torch.cat([layer[n] for layer in layers]) for n in ("gate", "up", "qkv")}
        joined |= {name: self.own.dense()[name] for name in ("mlp_norm", "next_norm")}
        expected, heads = oracle.fused_layer_tail(torch.cat(list(attended), 1), self.x, joined, EPS)
        for tokens in TOKENS:
            x, found = self.run(tokens)
            added = expected[:tokens] - self.x[:tokens].double()
            error = (x - self.x[:tokens] - added).norm() / added.norm()
            assert error < TOLERANCE, (tokens, error)
            if found is not None:
                wanted = heads[:tokens].chunk(self.ranks, dim=1)[rank]
                assert (found - wanted).norm() / wanted.norm() < TOLERANCE, tokens
            every = [torch.empty_like(x) for _ in range(self.ranks)]
            dist.all_gather(every, x)
            assert all(torch.equal(x, other) for other in every), tokens

    def run(self, tokens: int) -> tuple[Tensor, Tensor | None]:
        """A launch: the residual and this rank's heads."""
        x = self.x[:tokens].clone()
        weights, exchange = self.own.weights, self.own.exchange
        heads = fused_layer_tail(self.attended[:tokens], x, weights, exchange, is_dependent=True)
        return x, heads


def count_wrong(layer: Layer, rank: int, launches: int) -> Tensor:
    """Launches with other bits than the first."""
    whole, heads = layer.run(16)
    wrong = torch.zeros((), dtype=torch.int64, device=whole.device)
    chooser, lagging = random.Random(4), random.Random(rank)

    def compare(tokens: int, x: Tensor, found: Tensor | None) -> None:
        wrong.add_((x != whole[:tokens]).any())
        if found is not None and heads is not None:
            wrong.add_((found != heads[:tokens]).any())

    for _ in range(launches):
        tokens = chooser.choice(TOKENS)
        if lagging.random() < 0.01:
            torch.cuda._sleep(2_000_000)  # cycles, 1 ms
        compare(tokens, *layer.run(tokens))
    graph = torch.cuda.CUDAGraph()
    sizes = [chooser.choice(TOKENS) for _ in range(GRAPH_LAUNCHES)]
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [layer.run(tokens) for tokens in sizes]
    for _ in range(launches // GRAPH_LAUNCHES):
        graph.replay()
        for tokens, result in zip(sizes, results, strict=True):
            compare(tokens, *result)
    return wrong


def run_rank(rank: int, ranks: int, place: str, launches: int) -> None:
    _, device = join_ranks(rank, ranks, place)
    for is_last in (False, True):
        layer = Layer(rank, ranks, device, is_last)
        assert count_wrong(layer, rank, launches).item() == 0
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_on_gpus(__doc__, run_rank)
