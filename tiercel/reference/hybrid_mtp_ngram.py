"""Oracle of n-gram drafts after those of an MTP head: rows one after the other, plain lists."""

from collections.abc import Sequence
from typing import NamedTuple

from tiercel.reference.ngram_match import Limits, make_query, search


class HybridRows(NamedTuple):
    """The arguments of the op that count, a number or a list per row."""

    input_ids: Sequence[Sequence[int]]
    input_ids_len: Sequence[int]
    pre_ids: Sequence[Sequence[int]]
    step_idx: Sequence[int]
    draft_tokens: Sequence[Sequence[int]]
    seq_lens_this_time: Sequence[int]
    seq_lens_decoder: Sequence[int]
    max_dec_len: Sequence[int]


def hybrid_mtp_ngram(
    rows: HybridRows, max_draft_tokens: int, limits: Limits
) -> tuple[list[list[int]], list[int]]:
    """Extend each row's drafts in turn; returns draft tokens and lengths, its arguments stay."""
    drafts, lens = [list(row) for row in rows.draft_tokens], list(rows.seq_lens_this_time)
    left = sum(decoder > 0 for decoder in rows.seq_lens_decoder)
    for row, step in enumerate(rows.step_idx):
        ready = lens[row]
        want = min(max_draft_tokens - ready + 1, rows.max_dec_len[row] - step - 1)
        if ready == 0 or want <= 0:
            continue
        left -= 1
        used = sum(lens[: row + 1])
        if used + left >= limits.threshold - 1:
            continue
        room = min(want, limits.threshold - used - left)
        prompt = rows.input_ids[row][: rows.input_ids_len[row]]
        query = make_query(rows.pre_ids[row], step, limits)
        hit = search(prompt, rows.pre_ids[row][:step], query, limits)
        if hit is not None:
            copied = list(hit.tokens[hit.start : hit.start + room])
            drafts[row][ready : ready + len(copied)] = copied
            lens[row] = ready + len(copied)
    return drafts, lens
