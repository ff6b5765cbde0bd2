"""The inputs of a step from persistent rows, against the bytes they take, beside PyTorch operators.

    python -m benchmarks.prepare_step --device cuda --out benchmarks/results/prepare_step_h200.json

Floor: each token id is read once; ids, places and slots are written once. For a decode step that is
some hundred bytes, so what counts is the time of one graph node.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.op_timing import Case, main
from tiercel.ops.prepare_step import SlotLayout, prepare_step
from tiercel.reference import prepare_step as oracle

LENGTH = 4096
# (tokens per entry, entries per block) of the groups of models; blocks of 64 or 128 tokens.
DENSE, HYBRID = ((1, 64),), ((1, 64), (1, 64))
DEEPSEEK_V4 = ((4, 32), (128, 1), (1, 128), (1, 32), (1, 128))
# (requests, new tokens of each, cache groups)
SHAPES = {
    "cuda": [
        (1, 1, DENSE), (64, 1, DENSE), (256, 1, HYBRID), (1, 2048, DENSE), (4, 2048, HYBRID),
        (1, 1, DEEPSEEK_V4), (64, 1, DEEPSEEK_V4), (4, 2048, DEEPSEEK_V4),
    ],
    "cpu": [(1, 1, DENSE), (16, 1, DENSE), (1, 512, DENSE), (16, 1, DEEPSEEK_V4)],
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Rows and a step of them."""

    token_ids: Tensor
    num_computed: Tensor
    block_tables: Tensor
    rows: Tensor
    starts: Tensor
    num_tokens: int
    kinds: tuple[tuple[int, int], ...]

    @property
    def layout(self) -> SlotLayout:
        per_entry, entries = zip(*self.kinds, strict=True)
        return SlotLayout(per_entry[0] * entries[0], per_entry, entries)


def run(inputs: Inputs) -> None:
    inputs.num_computed.fill_(64)  # as it stood: the op raises it
    prepare_step(
        inputs.token_ids,
        inputs.num_computed,
        inputs.block_tables,
        inputs.rows,
        inputs.starts,
        inputs.num_tokens,
        inputs.layout,
    )


def gathers(inputs: Inputs) -> None:
    """The step of dense groups by PyTorch operators, for equal query lengths, without scratch."""
    inputs.num_computed.fill_(64)
    count = inputs.num_tokens // inputs.rows.shape[0]
    rows = inputs.rows.long()
    start = inputs.num_computed[rows]
    positions = start[:, None] + torch.arange(count, device=rows.device)
    inputs.token_ids[rows].gather(1, positions)
    size = inputs.layout.block_size
    blocks = inputs.block_tables[:, rows].gather(
        2, (positions // size).expand(inputs.block_tables.shape[0], -1, -1)
    )
    blocks.long() * size + positions % size
    inputs.num_computed.index_add_(0, rows, inputs.starts.diff())


def check(inputs: Inputs) -> float:
    """0 where every number is right, else infinity."""
    inputs.num_computed.fill_(64)
    tables = [t.cpu() for t in (inputs.token_ids, inputs.num_computed, inputs.block_tables)]
    step = (*tables, inputs.rows.cpu(), inputs.starts.cpu())
    expected = oracle.prepare_step(*step, inputs.layout.block_size, inputs.kinds)
    result = prepare_step(
        inputs.token_ids,
        inputs.num_computed,
        inputs.block_tables,
        inputs.rows,
        inputs.starts,
        inputs.num_tokens,
        inputs.layout,
    )
    found = (result.input_ids, result.positions, result.seq_lens, result.slot_mapping)
    is_right = [t.tolist() for t in found] == list(expected[:4])
    return 0.0 if is_right and inputs.num_computed.tolist() == expected[4] else float("inf")


def make_case(
    requests: int, count: int, kinds: tuple[tuple[int, int], ...], device: torch.device
) -> Case:
    groups, block_size = len(kinds), kinds[0][0] * kinds[0][1]

    def make(seed: int) -> Inputs:
        generator = torch.Generator(device).manual_seed(seed)

        def integers(high: int, *shape: int) -> Tensor:
            values = torch.randint(1, high, shape, generator=generator, device=device)
            return values.int()

        return Inputs(
            integers(50_000, requests + 1, LENGTH),
            torch.full((requests + 1,), 64, dtype=torch.int32, device=device),
            integers(9_999, groups, requests + 1, LENGTH // block_size),
            torch.randperm(requests, generator=generator, device=device).int(),
            torch.arange(0, requests * count + 1, count, dtype=torch.int32, device=device),
            requests * count,
            kinds,
        )

    return Case(
        name=f"requests={requests} new_tokens={count} groups={groups}",
        make=make,
        run=run,
        check=check,
        tolerance=0.0,
        num_bytes=requests * count * (4 + 4 + 4 + 8 * groups) + 20 * requests,
        peer=gathers,
        peer_name="PyTorch gathers",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
