"""The inputs of a step from persistent rows: its tokens, their positions and cache slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a model for a step with T new tokens of R requests and G cache groups.

    Attributes:
        input_ids: (T,) int32.
        positions: (T,) int32.
        seq_lens: (R,) int32, context including this step.
        slot_mapping: (G, T) int64, block * block_size + offset; -1 writes nothing.
    """

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True)
class StepDrafts:
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
    block_size: int,
    drafts: StepDrafts | None = None,
) -> StepInputs:
    """Take the next tokens of each row and count them as computed; lengths stay on the device.

    The last row is scratch, for positions of a batch that no request fills: its tokens are token 0
    at positions from 0 on, with slots of -1. So are padding positions after drafts.

    Args:
        token_ids: (S, max_model_len) int32, contiguous.
        num_computed: (S,) int32; raised by each row's new tokens, of scratch unchanged.
        block_tables: (G, S, max_blocks) int32, contiguous.
        rows: (R,) int32; none twice, but for scratch.
        cu_seqlens_q: (R + 1,) int32, index of the first token of each request.
        num_tokens: T, `cu_seqlens_q[R]` as the host knows it.
        block_size: tokens of a block.
        drafts: with them each request has one token of its row and then its draft tokens.

    Returns:
        New tensors.

    Raises:
        ArgumentError: shapes or dtypes disagree.
    """
    _check(token_ids, num_computed, block_tables, rows, cu_seqlens_q)
    if drafts is not None:
        _check_drafts(drafts, token_ids.shape[0], rows.shape[0])
    device, num_reqs = rows.device, rows.shape[0]
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
            block_size,
            out.input_ids,
            out.positions,
            out.seq_lens,
            out.slot_mapping,
            None if drafts is None else drafts.draft_ids,
            None if drafts is None else drafts.num_drafts,
        )
        return out
    _prepare(token_ids, num_computed, block_tables, rows, cu_seqlens_q, block_size, out, drafts)
    return out


def _prepare(
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    cu_seqlens_q: Tensor,
    block_size: int,
    out: StepInputs,
    drafts: StepDrafts | None,
) -> None:
    num_tokens, num_reqs = out.input_ids.shape[0], rows.shape[0]
    lengths = cu_seqlens_q.diff()
    is_real = rows < token_ids.shape[0] - 1
    start = num_computed.index_select(0, rows).masked_fill_(~is_real, 0)
    torch.add(start, lengths, out=out.seq_lens)
    row, position, real = rows, start, is_real
    if num_tokens != num_reqs or (num_tokens and int(lengths.max()) != 1):
        request = torch.repeat_interleave(torch.arange(num_reqs), lengths)
        position = (torch.arange(num_tokens) - cu_seqlens_q[request] + start[request]).int()
        row, real = rows[request], is_real[request]
    out.positions.copy_(position)
    if drafts is None:
        out.input_ids.copy_(token_ids[row, position])
    else:
        place = torch.arange(num_tokens) - cu_seqlens_q[:-1].repeat_interleave(lengths)
        column = place.clamp(max=drafts.draft_ids.shape[1] - 1)
        last = token_ids[row, start.repeat_interleave(lengths)]
        out.input_ids.copy_(torch.where(place == 0, last, drafts.draft_ids[row, column]))
        real = real & (place <= drafts.num_drafts.repeat_interleave(lengths))
    out.input_ids.masked_fill_(~real, 0)
    block = block_tables[:, row, position // block_size].long()
    torch.add(block * block_size, position % block_size, out=out.slot_mapping)
    out.slot_mapping.masked_fill_(~real, -1)
    num_computed.index_add_(0, rows, lengths.masked_fill_(~is_real, 0))


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
