"""The inputs of a step from persistent rows: its tokens, their positions and cache slots."""

from __future__ import annotations

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from tiercel.errors import ArgumentError


class StepInputs(Struct, frozen=True):
    """Inputs of a model for a step with T new tokens of R requests and G cache groups.

    Attributes:
        input_ids: (T,) int32.
        positions: (T,) int32.
        seq_lens: (R,) int32, context including this step.
        slot_mapping: (G, T) int64, block * entries_per_block + entry of the block; -1 writes
            nothing.
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor


class SlotLayout(Struct, frozen=True):
    """Where the entries of tokens are in a block of each cache group.

    A token has the slot of an entry that it completes. The entry of position p is p % block_size //
    tokens_per_entry % entries_per_block of its block.

    Attributes:
        block_size: tokens of a block, in every group.
        tokens_per_entry: of each group; divides the block size.
        entries_per_block: of each group; divides the entries that the tokens of a block complete.
    """

    block_size: int
    tokens_per_entry: tuple[int, ...]
    entries_per_block: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether each token of every group has an entry of its own."""
        size = self.block_size
        return all(
            per == 1 and entries == size
            for per, entries in zip(self.tokens_per_entry, self.entries_per_block, strict=True)
        )


def entry_slots(
    block_tables: Tensor, rows: Tensor, positions: Tensor, layout: SlotLayout
) -> Tensor:
    """Slots of the entries that tokens complete, without host sync.

    Args:
        block_tables: (G, S, max_blocks) int32.
        rows: (T,) int32 or int64 of the tokens.
        positions: (T,) int32 or int64, >= 0.
        layout: of the groups.

    Returns:
        (G, T) int64; -1 for a token that completes no entry.
    """
    size, offset = layout.block_size, positions % layout.block_size
    blocks = block_tables[:, rows.long(), positions.long() // size].long()
    if layout.is_dense:
        return blocks * size + offset
    slots = []
    groups = zip(blocks, layout.tokens_per_entry, layout.entries_per_block, strict=True)
    for block, per_entry, entries in groups:
        slot = block * entries + offset // per_entry % entries
        slots.append(torch.where((offset + 1) % per_entry == 0, slot, -1))
    return torch.stack(slots)


class StepDrafts(Struct, frozen=True):
    """Draft tokens that follow the last token of each request in a step that verifies them.

    Attributes:
        draft_ids: (S, width) int32, contiguous; the drafts of a row are in its columns 1, 2, ...
        num_drafts: (R,) int32, drafts of each request in the step; positions after them are
            padding.
    """

    draft_ids: Tensor
    num_drafts: Tensor


def prepare_step(
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
    num_tokens: int,
    layout: SlotLayout,
    drafts: StepDrafts | None = None,
) -> StepInputs:
    """Take the next tokens of each row and count them as computed; lengths stay on the device.

    The last row is scratch, for positions of a batch that no request fills: its tokens are token 0
    at positions from 0 on, with slots of -1. So are padding positions after drafts. Where a later
    token of the same request takes the same slot in this step, the earlier one has -1: no slot
    occurs twice.

    Args:
        token_ids: (S, max_model_len) int32, contiguous.
        num_computed: (S,) int32; raised by each row's new tokens, of scratch unchanged.
        block_tables: (G, S, max_blocks) int32, contiguous.
        rows: (R,) int32; none twice, but for scratch.
        cu_seqlens_q: (R + 1,) int32, index of the first token of each request.
        num_tokens: T, `cu_seqlens_q[R]` as the host knows it.
        layout: of the cache groups.
        drafts: with them each request has one token of its row and then its draft tokens.

    Returns:
        New tensors.

    Raises:
        ArgumentError: shapes or dtypes disagree.
    """
    _check(token_ids, num_computed, block_tables, rows, cu_seqlens_q)
    _check_layout(layout, block_tables.shape[0])
    if drafts is not None:
        _check_drafts(drafts, token_ids.shape[0], rows.shape[0])
    device, num_reqs = rows.device, rows.shape[0]
    if device.type == "cpu" and drafts is None and layout.is_dense and num_tokens == num_reqs:
        single = _prepare_single(token_ids, num_computed, block_tables, rows, cu_seqlens_q, layout)
        if single is not None:
            return single
    out = StepInputs(
        torch.empty(num_tokens, dtype=torch.int32, device=device),
        torch.empty(num_tokens, dtype=torch.int32, device=device),
        torch.empty(num_reqs, dtype=torch.int32, device=device),
        torch.empty((block_tables.shape[0], num_tokens), dtype=torch.int64, device=device),
    )
    if rows.is_cuda:
        from tiercel.kernels.sampling.prepare_step import launch_prepare_step

        launch_prepare_step(
            token_ids,
            num_computed,
            block_tables,
            rows,
            cu_seqlens_q,
            (layout.block_size, layout.tokens_per_entry, layout.entries_per_block),
            out.input_ids,
            out.positions,
            out.seq_lens,
            out.slot_mapping,
            None if drafts is None else drafts.draft_ids,
            None if drafts is None else drafts.num_drafts,
        )
        return out
    _prepare(token_ids, num_computed, block_tables, rows, cu_seqlens_q, layout, out, drafts)
    return out


def _prepare_single(
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
    layout: SlotLayout,
) -> StepInputs | None:
    """The inputs of a step of one token each on a CPU; None for any other step.

    They are a dozen numbers for a request: NumPy takes as long for an array of them as Python for
    twenty, and operators of PyTorch ten times as long.
    """
    numbers, computed, size = rows.tolist(), num_computed.numpy(), layout.block_size
    if cu_seqlens_q.tolist() != list(range(len(numbers) + 1)) or len(computed) - 1 in numbers:
        return None
    tokens, tables = token_ids.numpy(), block_tables.numpy()
    positions = [computed.item(row) for row in numbers]
    places = list(zip(numbers, positions, strict=True))
    for row, position in places:
        computed[row] = position + 1
    return StepInputs(
        _from_list([tokens.item(row, position) for row, position in places]),
        _from_list(positions),
        _from_list([position + 1 for position in positions]),
        torch.from_numpy(
            np.array(
                [
                    [table.item(row, at // size) * size + at % size for row, at in places]
                    for table in tables
                ],
                np.int64,
            ).reshape(len(tables), len(places))
        ),
    )


def _from_list(values: list[int]) -> Tensor:
    """An int32 tensor in a third of the time of `torch.tensor`."""
    return torch.from_numpy(np.array(values, np.int32))


def _prepare(
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
    layout: SlotLayout,
    out: StepInputs,
    drafts: StepDrafts | None,
) -> None:
    num_tokens, num_reqs = out.input_ids.shape[0], rows.shape[0]
    lengths = cu_seqlens_q.diff()
    is_real = rows < token_ids.shape[0] - 1
    start = num_computed.index_select(0, rows).masked_fill_(~is_real, 0)
    torch.add(start, lengths, out=out.seq_lens)
    row, position, real, stop = rows, start, is_real, out.seq_lens
    if num_tokens != num_reqs or (num_tokens and int(lengths.max()) != 1):
        request = torch.repeat_interleave(torch.arange(num_reqs), lengths)
        position = (torch.arange(num_tokens) - cu_seqlens_q[request] + start[request]).int()
        row, real, stop = rows[request], is_real[request], out.seq_lens[request]
    out.positions.copy_(position)
    if drafts is None:
        out.input_ids.copy_(token_ids[row, position])
    else:
        place = torch.arange(num_tokens) - cu_seqlens_q[:-1].repeat_interleave(lengths)
        column = place.clamp(max=drafts.draft_ids.shape[1] - 1)
        last = token_ids[row, start.repeat_interleave(lengths)]
        out.input_ids.copy_(torch.where(place == 0, last, drafts.draft_ids[row, column]))
        counts = drafts.num_drafts.repeat_interleave(lengths)
        real = real & (place <= counts)
        stop = torch.minimum(stop, position - place + 1 + counts)
    out.input_ids.masked_fill_(~real, 0)
    out.slot_mapping.copy_(entry_slots(block_tables, row, position, layout))
    out.slot_mapping.masked_fill_(~real, -1)
    if not layout.is_dense:
        _drop_overwritten(out.slot_mapping, position, stop, layout)
    num_computed.index_add_(0, rows, lengths.masked_fill_(~is_real, 0))


def _drop_overwritten(slots: Tensor, position: Tensor, stop: Tensor, layout: SlotLayout) -> None:
    """Clear slots that a later token of the request takes, before its position `stop`."""
    size = layout.block_size
    groups = zip(slots, layout.tokens_per_entry, layout.entries_per_block, strict=True)
    for group, per_entry, entries in groups:
        turn = per_entry * entries  # tokens from one use of a slot to the next
        group.masked_fill_((position % size + turn < size) & (position + turn < stop), -1)


def _check_layout(layout: SlotLayout, num_groups: int) -> None:
    size, sizes = layout.block_size, (layout.tokens_per_entry, layout.entries_per_block)
    is_sound = all(len(each) == num_groups and min(each, default=1) > 0 for each in sizes)
    if not is_sound or any(size % (per * entries) for per, entries in zip(*sizes, strict=True)):
        raise ArgumentError(
            f"prepare_step: {layout} does not fit {num_groups} cache groups.",
            hint="Pass two numbers for each group, whose product divides the block size.",
        )


def _check_drafts(drafts: StepDrafts, num_rows: int, num_reqs: int) -> None:
    ids, counts = drafts.draft_ids, drafts.num_drafts
    fits = ids.dim() == 2 and ids.shape[0] == num_rows and counts.shape == (num_reqs,)
    if not fits or any(t.dtype != torch.int32 or not t.is_contiguous() for t in (ids, counts)):
        raise ArgumentError(
            f"prepare_step: drafts {ids.dtype} {tuple(ids.shape)} and counts {counts.dtype} "
            f"{tuple(counts.shape)} do not fit {num_rows} rows and {num_reqs} requests.",
            hint="Pass contiguous int32: one row of drafts for each row, a count for each request.",
        )


def _check(
    token_ids: Tensor, num_computed: Tensor, block_tables: Tensor, rows: Tensor, cu_seqlens: Tensor
) -> None:
    num_rows = token_ids.shape[0]
    fits = (
        num_computed.shape == (num_rows,)
        and block_tables.dim() == 3
        and block_tables.shape[1] == num_rows
        and cu_seqlens.shape == (rows.shape[0] + 1,)
    )
    tensors = (token_ids, num_computed, block_tables, rows, cu_seqlens)
    is_plain = all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
    if not fits or not is_plain:
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in tensors)
        raise ArgumentError(
            f"prepare_step: {shapes} do not fit.",
            hint="Pass contiguous int32 with one row each for tokens, counts and tables.",
        )
