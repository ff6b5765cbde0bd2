"""Sampling of the next token from each logits row, with counter-based noise, appended to its row.

A greedy row takes the largest logit. Another row takes the largest of logit / temperature + Gumbel
noise, which samples exactly from the softmax. Of equal ones the lowest id wins. Noise is a function
of the row's key, its length and the token id (`tiercel/seeds.py`), so other rows of a batch change
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiercel.errors import ArgumentError
from tiercel.seeds import GAMMA, MIX_1, MIX_2, signed

OK, NONFINITE, NO_TOKEN = 0, 1, 2
"""Problems of a row: none, logits that are NaN or infinite, every token banned."""


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Persistent rows that sampling reads and extends; S rows, the last of them scratch.

    Attributes:
        token_ids: (S, max_model_len) int32; a token is written at `num_tokens`.
        num_tokens: (S,) int32; raised by 1, of scratch unchanged.
        temperature: (S,) float32, 0 for greedy.
        key: (S,) int64, mixed from seed and stream.
    """

    token_ids: Tensor
    num_tokens: Tensor
    temperature: Tensor
    key: Tensor


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    state: SampleRows,
    is_banned: Tensor,
    is_sound: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per logits row and append it.

    Args:
        logits: (L, vocab_size) float32, contiguous; -inf bans a token.
        rows: (L,) int32, the engine row of each; none twice but for scratch.
        state: mutated.
        is_banned: (vocab_size,) uint8, 1 for tokens that no answer may hold.
        is_sound: (L,) uint8, 0 for rows whose raw logits were not finite; None if `logits` are the
            raw ones, to find that out here.

    Returns:
        (L,) int32 token ids, 0 where there is a problem, and (L,) uint8 problems: `OK`,
        `NONFINITE` or `NO_TOKEN`.

    Raises:
        ArgumentError: shapes or dtypes disagree.

    Sources: Gumbel-max: "A* Sampling", arXiv 1411.0030; noise: SplitMix64, doi
    10.1145/2714064.2660195.
    """
    num_rows, vocab_size = logits.shape
    if (
        rows.shape != (num_rows,)
        or is_banned.shape != (vocab_size,)
        or logits.dtype != torch.float32
        or not logits.is_contiguous()
    ):
        raise ArgumentError(
            f"sample_tokens: logits {logits.dtype} {tuple(logits.shape)}, rows "
            f"{tuple(rows.shape)} and bans {tuple(is_banned.shape)} do not fit.",
            hint="Pass contiguous float32 logits, a row for each and a ban for each column.",
        )
    if logits.is_cuda:
        from tiercel.kernels.sampling.sample_tokens import launch_sample_tokens, num_parts

        token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        problems = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
        parts = (num_rows, num_parts(vocab_size))
        launch_sample_tokens(
            logits,
            rows,
            state.token_ids,
            state.num_tokens,
            state.temperature,
            state.key,
            is_banned,
            is_sound,
            torch.empty(parts, dtype=torch.float64, device=logits.device),
            torch.empty(parts, dtype=torch.int32, device=logits.device),
            token_ids,
            problems,
        )
        return token_ids, problems
    sampled = _take_largest(logits, rows, state, is_banned, is_sound)
    return _sample(logits, rows, state, is_banned, is_sound) if sampled is None else sampled


def _take_largest(
    logits: Tensor, rows: Tensor, state: SampleRows, is_banned: Tensor, is_sound: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """The samples of greedy rows on a CPU, if they are without problems; None for any other.

    NumPy computes them in one thread: PyTorch gives half a vocabulary to another one, and waits
    for it longer than the work takes.
    """
    numbers, temperature = rows.tolist(), state.temperature.numpy()
    is_greedy = not any(temperature.item(row) for row in numbers)
    if not is_greedy or not (is_sound is None or is_sound.all()):
        return None
    values, bans = logits.numpy(), is_banned.numpy()
    found = values.argmax(axis=1)  # of equal ones the first; NaN is largest
    for index, token_id in enumerate(found.tolist()):
        if bans.item(token_id) or not math.isfinite(values.item(index, token_id)):
            return None
    if is_sound is None and values.min(initial=0) == -np.inf:
        return None
    tokens, num_tokens = state.token_ids.numpy(), state.num_tokens.numpy()
    for row, token_id in zip(numbers, found.tolist(), strict=True):
        if row < len(num_tokens) - 1:
            tokens[row, num_tokens[row]] = token_id
            num_tokens[row] += 1
    problems = np.zeros(len(values), np.uint8)
    return torch.from_numpy(found.astype(np.int32)), torch.from_numpy(problems)


def _sample(
    logits: Tensor, rows: Tensor, state: SampleRows, is_banned: Tensor, is_sound: Tensor | None
) -> tuple[Tensor, Tensor]:
    length = state.num_tokens.index_select(0, rows)
    token_ids, problems = draw_torch(logits, rows, length, state, is_banned, is_sound)
    is_real = rows < state.token_ids.shape[0] - 1
    real = rows[is_real].long()
    state.token_ids[real, length[is_real].long()] = token_ids[is_real]
    state.num_tokens[real] += 1
    return token_ids, problems


def draw_torch(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SampleRows,
    is_banned: Tensor,
    is_sound: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The samples of `sample_tokens` on a CPU, without appending them.

    Args:
        logits: as in `sample_tokens`.
        rows: as in `sample_tokens`, but a row may come more than once.
        positions: (L,) int32, the position in its row of each sampled token.
        state: of the rows, only read.
        is_banned: as in `sample_tokens`.
        is_sound: as in `sample_tokens`.

    Returns:
        As `sample_tokens`.
    """
    if is_sound is None:
        low, high = logits.aminmax(dim=1)  # NaN where there is one
        sound = low.isfinite() & high.isfinite()
    else:
        sound = is_sound != 0
    allowed = logits.masked_fill(is_banned.view(torch.bool), float("-inf"))
    temperature = state.temperature.index_select(0, rows)
    token_ids = allowed.argmax(dim=1)
    is_possible = allowed.gather(1, token_ids.unsqueeze(1)).squeeze(1) > float("-inf")
    sampled = (temperature > 0).nonzero().squeeze(1)
    if sampled.numel():
        scaled = allowed[sampled] / temperature[sampled].unsqueeze(1)
        keys = step_keys(state.key[rows[sampled]], positions[sampled])
        gumbel = uniform_noise(keys, logits.shape[1]).log_().neg_().log_().neg_()
        token_ids[sampled] = (scaled + gumbel).argmax(dim=1)
    problems = torch.where(is_possible, OK, NO_TOKEN)
    problems = torch.where(sound, problems, NONFINITE).to(torch.uint8)
    return torch.where(problems == OK, token_ids, 0).int(), problems


def step_keys(keys: Tensor, part: Tensor | int) -> Tensor:
    """Keys stepped by one part each; see `tiercel/seeds.py`."""
    return _finalise((keys ^ part) + signed(GAMMA))


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _finalise(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * signed(MIX_1)  # int64 wraps like the unsigned product
    value = (value ^ _shift(value, 27)) * signed(MIX_2)
    return value ^ _shift(value, 31)


def uniform_noise(keys: Tensor, count: int) -> Tensor:
    """Uniform numbers in (0, 1).

    Args:
        keys: (rows,) int64.
        count: columns; column j steps the sequence j + 1 times.

    Returns:
        (rows, count) float64, multiples of 2^-52 plus 2^-53: one bit more, and the largest would
        round to 1.
    """
    steps = torch.arange(1, count + 1, dtype=torch.int64, device=keys.device)
    value = _finalise(keys.unsqueeze(1) + steps * signed(GAMMA))
    return (_shift(value, 12).double() + 0.5) * 2.0**-52
