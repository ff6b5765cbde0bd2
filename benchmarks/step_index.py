"""The indices of a step of DeepSeek-V4 against the bytes they take, beside PyTorch operators.

    python -m benchmarks.step_index --device cuda --out FILE.json

Floor: positions and slots are read once, indices are written once. For a decode step that is some
hundred bytes, so what counts is the time of one graph node.
"""

from collections.abc import Iterator

import torch

from benchmarks.op_timing import Case, main
from tiercel.batch import Batch
from tiercel.ops import step_index_torch as torch_ops
from tiercel.ops.prepare_step import SlotLayout, entry_slots
from tiercel.ops.step_index import step_index
from tiercel.ops.step_index_torch import CompressKind, StepIndex
from tiercel.reference import step_index as oracle

BLOCK, WINDOW, CONTEXT = 128, 128, 8192
KINDS = (CompressKind(4, True, 0, 3, 32), CompressKind(128, False, 1, 4, 128))
# The window's group is 2; the others are those of CSA and HCA.
LAYOUT = SlotLayout(BLOCK, (4, 128, 1, 1, 1), (32, 1, 128, 32, 128))
SHAPES = {"cuda": [(1, 1), (16, 1), (64, 1), (64, 4), (1, 4096)], "cpu": [(1, 1), (4, 3)]}


def make_batch(
    num_reqs: int, count: int, num_blocks: int, device: torch.device, seed: int, start: int = -1
) -> Batch:
    """A step of `count` tokens a request, from a random position on if `start` is negative.

    Blocks are 1 to `num_blocks` - 1, each once where there are enough.
    """
    generator = torch.Generator(device).manual_seed(seed)
    num_tokens = num_reqs * count
    starts = torch.randint(0, CONTEXT, (num_reqs,), generator=generator, device=device)
    starts = starts if start < 0 else torch.full_like(starts, start)
    positions = (starts[:, None] + torch.arange(count, device=device)).flatten()
    columns = (int(starts.max()) + count) // BLOCK + 1
    order = torch.randperm(num_blocks - 1, generator=generator, device=device)
    index = torch.arange(num_reqs * columns, device=device) % (num_blocks - 1)
    tables = (1 + order[index]).view(num_reqs, columns).int().expand(5, -1, -1).contiguous()
    rows = torch.randperm(num_reqs, generator=generator, device=device).int()
    of_tokens = rows.repeat_interleave(count)
    slots = entry_slots(tables, of_tokens, positions, LAYOUT)
    offset = torch.arange(count, device=device).repeat(num_reqs)
    is_taken = (offset + 32 < count) & (positions % BLOCK + 32 < BLOCK)
    slots[3][is_taken] = -1
    return Batch(
        input_ids=positions.int(),
        positions=positions.int(),
        cu_seqlens_q=torch.arange(0, num_tokens + 1, count, device=device).int(),
        seq_lens=(starts + count).int(),
        rows=rows,
        logits_rows=torch.zeros(1, dtype=torch.int32, device=device),
        slot_mapping=slots,
        block_tables=tables,
        query_lens=(count,) * num_reqs,
        context_lens=tuple((starts + count).tolist()),
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_query_len=count,
        max_seq_len=CONTEXT + count,
    )


def make_case(num_reqs: int, count: int, device: torch.device) -> Case:
    num_tokens = num_reqs * count

    def make(seed: int) -> Batch:
        return make_batch(num_reqs, count, 1 << 16, device, seed)

    def run(batch: Batch) -> StepIndex:
        return step_index(batch, BLOCK, WINDOW, 2, KINDS)

    def peer(batch: Batch) -> StepIndex:
        return torch_ops.index_step(batch, BLOCK, WINDOW, 2, KINDS)

    def check(batch: Batch) -> float:
        """0 where every index of terms is right, else infinity."""
        step, starts = run(batch), batch.positions[::count].tolist()
        is_right = True
        for kind in KINDS:
            blocks = batch.block_tables[kind.inputs][batch.rows.long()].tolist()
            sizes = (kind.ratio, kind.num_terms, BLOCK, kind.rows_per_block)
            slots = batch.slot_mapping[kind.entries].tolist()
            capacity = torch_ops.entry_capacity(batch, kind.ratio)
            lens = list(batch.query_lens)
            wanted = oracle.compressed(lens, starts, slots, blocks, sizes, capacity)
            terms = step.compressed[kind.ratio].terms
            found = (terms.entries, terms.fresh, terms.stored)
            is_right &= [t.tolist() for t in found] == [
                *(wanted.entries, wanted.fresh, wanted.stored)
            ]
        return 0.0 if is_right else float("inf")

    num_terms = sum((num_tokens // kind.ratio + num_reqs) * kind.num_terms for kind in KINDS)
    return Case(
        name=f"requests={num_reqs} new_tokens={count}",
        make=make,
        run=run,
        check=check,
        tolerance=0.0,
        num_bytes=num_tokens * (4 + 2 * 8 + 3 * 8 + 2 * 12) + 16 * num_terms,
        peer=peer,
        peer_name="PyTorch operators",
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per shape; bytes moved define the floor."""
    for shape in SHAPES[device.type]:
        yield make_case(*shape, device)


if __name__ == "__main__":
    main(__doc__, cases)
