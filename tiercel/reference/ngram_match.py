"""Oracle of n-gram drafting: rows one after the other, windows one after the other, plain lists."""

from collections.abc import Sequence
from typing import NamedTuple


class Hit(NamedTuple):
    """Where a draft is copied from: `tokens[start:]`, after a window of `size` tokens."""

    tokens: Sequence[int]
    start: int
    size: int


class Limits(NamedTuple):
    """Options that do not depend on the row; see `ops/ngram_match.py`."""

    max_ngram_size: int
    min_ngram_size: int
    threshold: int
    convention: str


def search(
    prompt: Sequence[int], generated: Sequence[int], query: Sequence[int], limits: Limits
) -> Hit | None:
    """The leftmost window with a follower: longest first, at equal length the prompt first.

    Args:
        prompt: P.
        generated: the committed tokens G[0..s-1].
        query: at least as many last tokens as a window may have, unless fewer exist.
        limits: sizes to try.
    """
    for size in range(limits.max_ngram_size, limits.min_ngram_size - 1, -1):
        if len(generated) < size:
            continue
        wanted = list(query[len(query) - size :])
        for tokens in (prompt, generated):
            for start in range(len(tokens) - size):
                if list(tokens[start : start + size]) == wanted:
                    return Hit(tokens, start + size, size)
    return None


def make_query(generated: Sequence[int], step: int, limits: Limits) -> list[int]:
    """The last tokens: up to G[s] in the "index" convention, up to G[s-1] in "count"."""
    end = step + 1 if limits.convention == "index" else step
    return list(generated[max(0, end - limits.max_ngram_size) : end])


class MatchRows(NamedTuple):
    """The arguments of the op, a number or a list per row; token_ids_all is not cut to its row."""

    input_ids: Sequence[Sequence[int]]
    input_ids_len: Sequence[int]
    token_ids_all: Sequence[Sequence[int]]
    prompt_lens: Sequence[int]
    step_idx: Sequence[int]
    draft_token_num: Sequence[int]
    draft_tokens: Sequence[Sequence[int]]
    seq_lens_this_time: Sequence[int]
    seq_lens_encoder: Sequence[int]
    seq_lens_decoder: Sequence[int]
    max_dec_len: Sequence[int]


def ngram_match(rows: MatchRows, limits: Limits) -> tuple[list[list[int]], list[int]]:
    """Draft for each row in turn; returns draft tokens and lengths, its arguments stay."""
    drafts, lens = [list(row) for row in rows.draft_tokens], list(rows.seq_lens_this_time)
    active = zip(rows.seq_lens_encoder, rows.seq_lens_decoder, strict=True)
    left = sum(encoder > 0 or decoder > 0 for encoder, decoder in active)
    for row, step in enumerate(rows.step_idx):
        if rows.seq_lens_encoder[row] > 0:
            continue
        if rows.seq_lens_decoder[row] == 0:
            lens[row] = 0
            continue
        lens[row] = 1
        left -= 1
        used = sum(lens[: row + 1])
        if used + left >= limits.threshold - 1:
            continue
        want = min(rows.draft_token_num[row], rows.max_dec_len[row] - step - 1)
        room = min(want, limits.threshold - used - left)
        if room <= 0:
            continue
        prompt = rows.input_ids[row][: rows.input_ids_len[row]]
        generated = rows.token_ids_all[row][rows.prompt_lens[row] :]
        query = make_query(generated, step, limits)
        hit = search(prompt, generated[:step], query, limits)
        if hit is not None:
            copied = list(hit.tokens[hit.start : hit.start + room])
            drafts[row][1 : 1 + len(copied)] = copied
            lens[row] = 1 + len(copied)
    return drafts, lens
