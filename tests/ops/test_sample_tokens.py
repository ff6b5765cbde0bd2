"""Sampling and appending: the oracle's token, whatever other rows are in the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.errors import ArgumentError
from tiercel.kernels.sampling import sample_tokens as kernel
from tiercel.ops.sample_tokens import (
    NO_TOKEN,
    NONFINITE,
    OK,
    SampleRows,
    sample_tokens,
    step_keys,
    uniform_noise,
)
from tiercel.reference import sample_tokens as oracle
from tiercel.seeds import mix_key

SHAPES = [(1, 1), (3, 7), (5, 2048), (4, 5003), (9, 4097)]  # rows, vocabulary


def make_state(num_rows, device):
    """Rows of several lengths, temperatures and keys; every third is greedy."""
    temperature = torch.rand(num_rows) + 0.3
    temperature[::3] = 0.0
    return SampleRows(
        token_ids=torch.full((num_rows, 20), -1, dtype=torch.int32, device=device),
        num_tokens=torch.randint(0, 19, (num_rows,), dtype=torch.int32, device=device),
        temperature=temperature.to(device),
        key=torch.tensor([mix_key(i, 7) for i in range(num_rows)], device=device),
    )


def run_kernel(logits, rows, state, is_banned, is_sound=None):
    """The kernels alone, into poisoned outputs."""
    device, (lines, vocab_size) = logits.device, logits.shape
    parts = (lines, kernel.num_parts(vocab_size))
    out = torch.full((lines,), -9, dtype=torch.int32, device=device)
    problems = torch.full((lines,), 99, dtype=torch.uint8, device=device)
    kernel.launch_sample_tokens(
        logits, rows, state.token_ids, state.num_tokens, state.temperature, state.key,
        is_banned, is_sound, torch.full(parts, torch.nan, dtype=torch.float64, device=device),
        torch.full(parts, -9, dtype=torch.int32, device=device), out, problems,
    )  # fmt: skip
    return out, problems


RUNS = pytest.mark.parametrize("run", [run_kernel, sample_tokens], ids=["kernel", "op"])


@RUNS
@pytest.mark.parametrize(("lines", "vocab_size"), SHAPES)
def test_matches_oracle(lines, vocab_size, run, device):
    state = make_state(lines + 3, device)
    logits = torch.randn(lines, vocab_size, device=device) * 3
    rows = torch.randperm(lines + 2)[:lines].int().to(device)
    is_banned = (torch.rand(vocab_size, device=device) < 0.2).to(torch.uint8)
    lengths = state.num_tokens.clone()
    expected = oracle.sample_tokens(
        logits.cpu(),
        state.temperature[rows].tolist(),
        state.key[rows].tolist(),
        lengths[rows].tolist(),
        set(is_banned.nonzero().flatten().tolist()),
    )
    token_ids, problems = run(logits, rows, state, is_banned)
    assert list(zip(token_ids.tolist(), problems.tolist(), strict=True)) == expected
    for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
        assert state.token_ids[row, lengths[row]] == token_id
        assert state.num_tokens[row] == lengths[row] + 1
    assert (state.token_ids >= 0).sum() == lines, "one token a row"


@RUNS
def test_equal_logits_give_the_lowest_id(run, device):
    state = make_state(4, device)
    state.temperature.zero_()
    logits = torch.zeros(3, 5000, device=device)
    logits[1, 4990] = logits[1, 2049] = 1.0
    logits[2] = -1e30
    is_banned = torch.zeros(5000, dtype=torch.uint8, device=device)
    is_banned[0] = 1
    token_ids, _ = run(logits, torch.arange(3, device=device).int(), state, is_banned)
    assert token_ids.tolist() == [1, 2049, 1]


@RUNS
@pytest.mark.parametrize("vocab_size", [2048, 4096, 4098])
def test_every_token_may_be_the_best(vocab_size, run, device):
    """The first and the last ones of all parts of a row."""
    places = [p for end in range(0, vocab_size + 1, 2048) for p in range(end - 2, end + 2)]
    places = [place for place in [*places, vocab_size - 1] if 0 <= place < vocab_size]
    state = make_state(len(places) + 1, device)
    logits = torch.randn(len(places), vocab_size, device=device)
    logits[range(len(places)), places] = 60.0
    clean = torch.zeros(vocab_size, dtype=torch.uint8, device=device)
    rows = torch.arange(len(places), device=device).int()
    assert run(logits, rows, state, clean)[0].tolist() == places


@RUNS
@pytest.mark.parametrize("kind", ["undone noise", "beyond noise", "far apart"])
def test_a_draw_is_decided_in_float64(kind, run, device):
    """Scores that are equal in float32, logits that leave no room for noise, and large ones."""
    state, vocab_size = make_state(6, device), 2500 if kind == "far apart" else 150
    state.temperature.fill_(0.5 if kind == "far apart" else 1.0)
    rows = torch.arange(5, device=device).int()
    logits = torch.full((5, vocab_size), 1e20, device=device)
    if kind == "far apart":
        logits = torch.randn(5, vocab_size, device=device) * 1e4
    if kind == "undone noise":
        keys = step_keys(state.key[:5].cpu(), state.num_tokens[:5].cpu().long())
        noise = uniform_noise(keys, vocab_size).log().neg().log().neg()
        logits = (5.0 - noise).float().to(device)
    expected = oracle.sample_tokens(
        logits.cpu(), state.temperature.tolist()[:5], state.key.tolist()[:5],
        state.num_tokens.tolist()[:5], {0, 3},
    )  # fmt: skip
    is_banned = torch.zeros(vocab_size, dtype=torch.uint8, device=device)
    is_banned[[0, 3]] = 1
    token_ids, problems = run(logits, rows, state, is_banned)
    assert list(zip(token_ids.tolist(), problems.tolist(), strict=True)) == expected
    assert (len(set(token_ids.tolist())) == 1) == (kind == "beyond noise")


@RUNS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_told_of_its_own_row_only(value, run, device):
    state = make_state(5, device)
    logits = torch.randn(4, 3000, device=device)
    logits[1, 2999] = value
    clean = torch.zeros(3000, dtype=torch.uint8, device=device)
    token_ids, problems = run(logits, torch.arange(4, device=device).int(), state, clean)
    assert problems.tolist() == [OK, NONFINITE, OK, OK]
    assert token_ids[1] == 0


@RUNS
def test_processed_logits_may_ban_by_infinity(run, device):
    state = make_state(4, device)
    logits = torch.randn(3, 100, device=device)
    logits[0, 5:] = float("-inf")
    logits[1] = float("-inf")
    is_sound = torch.tensor([1, 1, 0], dtype=torch.uint8, device=device)
    clean = torch.zeros(100, dtype=torch.uint8, device=device)
    token_ids, problems = run(logits, torch.arange(3, device=device).int(), state, clean, is_sound)
    assert problems.tolist() == [OK, NO_TOKEN, NONFINITE]
    assert token_ids[0] < 5


@RUNS
def test_a_row_draws_the_same_beside_others(run, device):
    state = make_state(9, device)
    before = [t.clone() for t in (state.token_ids, state.num_tokens)]
    logits = torch.randn(8, 4097, device=device)
    clean = torch.zeros(4097, dtype=torch.uint8, device=device)
    rows = torch.arange(8, device=device).int()
    together, _ = run(logits, rows, state, clean)
    for i in range(8):
        state.token_ids.copy_(before[0])
        state.num_tokens.copy_(before[1])
        alone, _ = run(logits[i : i + 1].contiguous(), rows[i : i + 1], state, clean)
        assert alone[0] == together[i]


@RUNS
def test_scratch_rows_change_nothing(run, device):
    state = make_state(4, device)
    before = [t.clone() for t in (state.token_ids, state.num_tokens)]
    logits = torch.randn(5, 50, device=device)
    clean = torch.zeros(50, dtype=torch.uint8, device=device)
    run(logits, torch.full((5,), 3, dtype=torch.int32, device=device), state, clean)
    assert torch.equal(state.token_ids, before[0])
    assert torch.equal(state.num_tokens, before[1])


def test_draws_follow_the_softmax(device):
    """Chi-square over 5 tokens; 18.5 is passed by chance once in a thousand (4 degrees)."""
    draws = 4000
    state = SampleRows(
        torch.zeros((draws + 1, 2), dtype=torch.int32, device=device),
        torch.zeros(draws + 1, dtype=torch.int32, device=device),
        torch.full((draws + 1,), 0.7, device=device),
        torch.tensor([mix_key(3, i) for i in range(draws + 1)], device=device),
    )
    logits = torch.tensor([0.3, -1.0, 0.9, 0.0, 1.4], device=device)
    clean = torch.zeros(5, dtype=torch.uint8, device=device)
    rows = torch.arange(draws, device=device).int()
    token_ids, _ = sample_tokens(logits.repeat(draws, 1), rows, state, clean)
    counts = torch.bincount(token_ids.cpu(), minlength=5).double()
    expected = (logits.cpu().double() / 0.7).softmax(0) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 18.5


@settings(max_examples=50, deadline=None)
@given(key=st.integers(-(2**63), 2**63 - 1), length=st.integers(0, 2**20))
def test_noise_is_splitmix64(key, length):
    """The op's noise from the oracle's integers: only the logarithm differs."""
    state = oracle._finalise((key & oracle._MASK ^ length) + oracle._GAMMA)
    expected = [
        ((oracle._finalise(state + (j + 1) * oracle._GAMMA) >> 12) + 0.5) * 2.0**-52
        for j in range(5)
    ]
    signed = state - 2**64 if state >= 2**63 else state
    assert uniform_noise(torch.tensor([signed]), 5)[0].tolist() == expected
    assert all(0.0 < value < 1.0 for value in expected)


def test_wrong_shapes_are_named(device):
    state = make_state(3, device)
    rows = torch.zeros(2, dtype=torch.int32, device=device)
    clean = torch.zeros(9, dtype=torch.uint8, device=device)
    with pytest.raises(ArgumentError, match="do not fit"):
        sample_tokens(torch.zeros(2, 8, device=device), rows, state, clean)
    with pytest.raises(ArgumentError, match="float16"):
        sample_tokens(torch.zeros(2, 9, device=device).half(), rows, state, clean)


@pytest.mark.parametrize(
    ("change", "has_sound"),
    [("none", False), ("none", True), ("tie", False), ("banned", False), ("banned", True),
     ("nan", False), ("inf", False), ("-inf", False), ("-inf", True), ("unsound", True),
     ("all banned", False)],
)  # fmt: skip
def test_greedy_rows_match_the_oracle(change, has_sound):
    """Rows that all take the largest logit have a path of their own on a CPU."""
    state = make_state(5, "cpu")
    state.temperature.zero_()
    logits = torch.randn(4, 5003)
    rows = torch.tensor([2, 0, 4, 3], dtype=torch.int32)  # 4 is scratch
    is_banned = torch.zeros(5003, dtype=torch.uint8)
    is_sound = torch.ones(4, dtype=torch.uint8) if has_sound else None
    best = int(logits[1].argmax())
    if change == "tie":
        logits[1, [best, 17, 4000]] = 9.0
    elif change == "banned":
        is_banned[best] = 1
    elif change == "all banned":
        is_banned[:] = 1
    elif change == "unsound":
        is_sound[1] = 0
    elif change != "none":
        logits[1, 70] = float(change)
    banned = set(is_banned.nonzero().flatten().tolist())
    # With `is_sound` an infinite logit is a ban.
    raw = logits.masked_fill(logits == -torch.inf, -1e30) if has_sound else logits
    expected = oracle.sample_tokens(raw, [0.0] * 4, [0] * 4, [0] * 4, banned)
    if change == "unsound":
        expected[1] = (0, NONFINITE)
    before = state.num_tokens.clone()
    token_ids, problems = sample_tokens(logits, rows, state, is_banned, is_sound)
    assert list(zip(token_ids.tolist(), problems.tolist(), strict=True)) == expected
    assert (state.num_tokens - before).tolist() == [1, 0, 1, 1, 0]
    for token_id, row in zip(token_ids.tolist()[:2], (2, 0), strict=True):
        assert state.token_ids[row, before[row]] == token_id
