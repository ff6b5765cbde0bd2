"""Verification: the oracle's tokens and counts, beside any other rows; and the distribution.

`run` is the kernel, in the interpreter or on a GPU, or the op of the device.
"""

from collections import Counter

import pytest
import torch

from tiercel.config import RETRY_STEPS
from tiercel.errors import ArgumentError
from tiercel.kernels.speculation import verify_accept as kernel
from tiercel.ops.sample_tokens import NO_TOKEN, NONFINITE, OK, SampleRows, sample_tokens
from tiercel.ops.verify_accept import (
    UNSOUND_DRAFT,
    DraftRows,
    Verified,
    make_scratch,
    verify_accept,
)
from tiercel.reference import verify_accept as oracle
from tiercel.seeds import mix_key

ROOM = 40


def run_kernel(logits, starts, rows, used, state, drafts, banned, theta, sound=None, probs=None):
    """The kernels alone, into poisoned outputs."""
    width = drafts.draft_ids.shape[1]
    table = torch.full((rows.shape[0], width + 3), -9, dtype=torch.int32, device=logits.device)
    scratch = make_scratch(logits, rows.shape[0] * width, has_probs=probs is not None)
    for tensor in scratch:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -9)
    kernel.launch_verify_accept(
        logits, starts, rows, used,
        (state.token_ids, state.num_tokens, state.temperature, state.key),
        (drafts.draft_ids, drafts.num_computed, drafts.draft_limit, drafts.num_wanted,
         drafts.acceptance, drafts.num_idle),
        banned, theta, sound, probs, table, scratch,
    )  # fmt: skip
    return Verified(table)


RUNS = pytest.mark.parametrize("run", [run_kernel, verify_accept], ids=["kernel", "op"])


class Case:
    """R requests on rows in no order, the last one on scratch; every third is greedy."""

    def __init__(self, num_reqs, most, vocab, device, *, has_probs=False, is_ragged=False):
        size = num_reqs + 2
        self.vocab, self.most, self.device = vocab, most, device
        temperature = torch.rand(size) + 0.3
        temperature[::3] = 0.0
        self.state = SampleRows(
            torch.full((size, ROOM), -1, dtype=torch.int32, device=device),
            torch.randint(0, ROOM - most - 1, (size,), dtype=torch.int32, device=device),
            temperature.to(device),
            torch.tensor([mix_key(i, 7) for i in range(size)], device=device),
        )
        self.drafts = DraftRows(
            torch.randint(0, vocab, (size, 1 + most), dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.randint(0, most + 1, (size,), dtype=torch.int32, device=device),
            torch.full((size,), -5, dtype=torch.int32, device=device),
            torch.rand(size, device=device),
            torch.randint(0, RETRY_STEPS + 2, (size,), dtype=torch.int32, device=device),
        )
        self.rows = torch.randperm(size - 1)[:num_reqs].int().to(device)
        self.rows[-1] = size - 1 if num_reqs > 1 else self.rows[-1]
        self.used = torch.randint(0, most + 1, (num_reqs,), dtype=torch.int32, device=device)
        widths = self.used + 1 if is_ragged else torch.full_like(self.used, 1 + most)
        self.starts = torch.cat((widths.new_zeros(1), widths.cumsum(0).int()))
        self.logits = torch.randn((int(self.starts[-1]), vocab), device=device)
        self.banned = (torch.rand(vocab, device=device) < 0.1).to(torch.uint8)
        self.theta = torch.full((1,), 0.2, device=device)
        self.probs = None
        if has_probs:
            self.probs = torch.randn((num_reqs, most, vocab), device=device).softmax(dim=2)
        self.favour_drafts()

    def favour_drafts(self):
        """Make most drafts the likeliest token of their logits row, so that many are accepted."""
        for r, row in enumerate(self.rows.tolist()):
            for i in range(int(self.used[r])):
                if torch.rand(()) < 0.8:
                    token = int(self.drafts.draft_ids[row, 1 + i])
                    self.logits[int(self.starts[r]) + i, token] += 9.0

    def expected(self):
        """The oracle's result for each request."""
        results = []
        for r, row in enumerate(self.rows.tolist()):
            count, start = int(self.used[r]), int(self.starts[r])
            results.append(
                oracle.Row(
                    self.logits[start : start + 1 + count].tolist(),
                    self.drafts.draft_ids[row, 1 : 1 + count].tolist(),
                    float(self.state.temperature[row]),
                    int(self.state.key[row]),
                    int(self.state.num_tokens[row]),
                    None if self.probs is None else self.probs[r, :count].tolist(),
                )
            )
        return results

    def __call__(self, run, sound=None):
        return run(
            self.logits, self.starts, self.rows, self.used, self.state, self.drafts, self.banned,
            self.theta, sound, self.probs,
        )  # fmt: skip


@RUNS
@pytest.mark.parametrize("has_probs", [False, True], ids=["equal", "rejection"])
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize(("num_reqs", "most", "vocab"), [(1, 1, 7), (6, 5, 61), (9, 3, 2500)])
def test_matches_oracle(num_reqs, most, vocab, is_ragged, has_probs, run, device):
    case = Case(num_reqs, most, vocab, device, has_probs=has_probs, is_ragged=is_ragged)
    rows, scratch = case.expected(), case.state.token_ids.shape[0] - 1
    before = case.state.num_tokens.clone()
    texts = case.state.token_ids.clone()
    chances, idle = case.drafts.acceptance.tolist(), case.drafts.num_idle.tolist()
    banned = set(case.banned.nonzero().flatten().tolist())
    result = case(run)
    for r, (row, engine_row) in enumerate(zip(rows, case.rows.tolist(), strict=True)):
        tokens, problem = oracle.verify_accept(row, banned)
        count = int(result.num_new[r])
        assert result.token_ids[r, :count].tolist() == tokens
        assert int(result.problems[r]) == problem
        assert int(result.num_drafts[r]) == len(row.drafts)
        if engine_row == scratch:
            continue
        length = int(before[engine_row])
        texts[engine_row, length : length + count] = result.token_ids[r, :count]
        assert case.state.num_tokens[engine_row] == length + count
        assert case.drafts.num_computed[engine_row] == length + count - 1
        chance = oracle.learned(chances[engine_row], len(row.drafts), count - 1)
        assert float(case.drafts.acceptance[engine_row]) == pytest.approx(chance, abs=1e-5)
        limit = int(case.drafts.draft_limit[engine_row])
        wanted = oracle.wanted(chance, 0.2, limit)
        is_retry = wanted == 0 and limit and not row.drafts and idle[engine_row] + 1 >= RETRY_STEPS
        assert case.drafts.num_wanted[engine_row] == (1 if is_retry else wanted)
        rests = 0 if row.drafts or is_retry else idle[engine_row] + 1
        assert case.drafts.num_idle[engine_row] == rests
    assert torch.equal(case.state.token_ids, texts), "only new tokens are written"


@RUNS
def test_without_drafts_it_is_sample_tokens(run, device):
    case = Case(8, 4, 300, device)
    case.used.zero_()
    plain = SampleRows(
        case.state.token_ids.clone(), case.state.num_tokens.clone(), case.state.temperature,
        case.state.key,
    )  # fmt: skip
    lines = case.logits.index_select(0, case.starts[:-1])
    expected, problems = sample_tokens(lines, case.rows, plain, case.banned)
    result = case(run)
    assert torch.equal(result.token_ids[:, 0], expected)
    assert result.num_new.tolist() == [1] * 8
    assert torch.equal(result.problems, problems.int())
    assert torch.equal(case.state.token_ids, plain.token_ids)
    assert torch.equal(case.state.num_tokens, plain.num_tokens)


@RUNS
def test_drafts_change_speed_and_not_tokens(run, device):
    """The choice at a place is the same whether a draft stood there or not."""
    texts = []
    for is_right in (False, True):
        torch.manual_seed(5)
        case = Case(4, 3, 97, device)
        case.rows.copy_(torch.arange(4))  # no scratch
        case.used.fill_(3)
        one = Case(4, 3, 97, device)
        one.rows.copy_(case.rows)
        one.state, one.drafts, one.logits, one.banned = (
            case.state, case.drafts, case.logits, case.banned,
        )  # fmt: skip
        start = case.state.num_tokens.clone()
        if is_right:  # drafts from a run of one token after the other
            for r, row in enumerate(case.rows.tolist()):
                case.drafts.draft_ids[row, 1:] = texts[0][r][:3]
            case(run)
        else:
            for i in range(4):
                one.used.zero_()
                one.starts = case.starts + i
                one(run)
        texts.append(
            [
                case.state.token_ids[row, int(start[row]) : int(start[row]) + 4].clone()
                for row in case.rows.tolist()
            ]
        )
    for alone, together in zip(*texts, strict=True):
        assert torch.equal(alone, together)


@RUNS
def test_what_is_not_finite_ends_a_row_where_it_comes_up(run, device):
    case = Case(4, 3, 50, device)
    case.state.temperature.zero_()
    case.banned.zero_()
    case.used.fill_(3)
    case.rows.copy_(torch.arange(4))
    for r in range(4):
        for i in range(3):
            case.logits[4 * r + i, case.drafts.draft_ids[r, 1 + i]] = 99.0
    case.logits[0, 7] = float("nan")  # its own token
    case.logits[4 + 2, 7] = float("nan")  # after two right drafts
    case.logits[8, 0] = case.logits[8, case.drafts.draft_ids[2, 1]] + 1  # a wrong first draft
    case.drafts.draft_ids[2, 1] = 1
    case.logits[8 + 3, 7] = float("inf")  # ... and after it, unread
    result = case(run)
    assert result.problems.tolist() == [NONFINITE, UNSOUND_DRAFT, UNSOUND_DRAFT, OK]
    assert result.num_new.tolist() == [1, 2, 1, 4]


@RUNS
def test_processed_logits_may_ban_by_infinity(run, device):
    case = Case(3, 2, 40, device)
    case.state.temperature.zero_()
    case.banned.zero_()
    case.used.fill_(2)
    case.rows.copy_(torch.arange(3))
    for r in range(3):
        for i in range(2):
            case.logits[3 * r + i, case.drafts.draft_ids[r, 1 + i]] = 99.0
    case.logits[0] = float("-inf")
    case.logits[3 + 1] = float("-inf")
    result = case(run, torch.ones(9, dtype=torch.uint8, device=device))
    assert result.problems.tolist() == [NO_TOKEN, OK, OK]
    assert result.num_new.tolist() == [1, 1, 3]


@RUNS
def test_a_row_is_the_same_beside_others(run, device):
    torch.manual_seed(3)
    together = Case(6, 4, 2100, device)
    expected = together(run).table.clone()
    for r in range(6):
        torch.manual_seed(3)
        alone = Case(6, 4, 2100, device)
        alone.rows, alone.used = alone.rows[r : r + 1], alone.used[r : r + 1]
        alone.starts = alone.starts[r : r + 2]
        assert torch.equal(alone(run).table[0], expected[r])


def chi_square(counts, probs, draws):
    return sum((counts.get(i, 0) - draws * p) ** 2 / (draws * p) for i, p in enumerate(probs))


def draw_many(rule, device, draws, *, spoil=None):
    """First tokens of many rows whose draft is sampled from q, by one rule; and p.

    spoil: changes the probabilities that the op is told.
    """
    vocab = 6
    logits = torch.tensor([0.3, -1.0, 0.9, 0.0, 1.4, -0.4], device=device)
    other = torch.tensor([1.0, 0.2, -0.5, 0.4, 0.1, 0.0], device=device)
    q = (other / 0.7).softmax(dim=0)
    size = draws + 1
    ints = {"dtype": torch.int32, "device": device}
    state = SampleRows(
        torch.zeros((size, 3), **ints), torch.zeros(size, **ints),
        torch.full((size,), 0.7, device=device),
        torch.tensor([mix_key(3, i) for i in range(size)], device=device),
    )  # fmt: skip
    ids = torch.zeros((size, 2), **ints)
    if rule == "match":
        ids[:, 1] = int(q.argmax())
    else:  # coupled: the row's own noise; rejection: another's
        keys = state.key if rule == "coupled" else torch.tensor(
            [mix_key(11, i) for i in range(size)], device=device
        )  # fmt: skip
        own = SampleRows(torch.zeros((size, 3), **ints), torch.zeros(size, **ints),
                         state.temperature, keys)  # fmt: skip
        clean = torch.zeros(vocab, dtype=torch.uint8, device=device)
        rows = torch.arange(draws, **ints)
        ids[:-1, 1], _ = sample_tokens(other.repeat(draws, 1), rows, own, clean)
    zeros = torch.zeros(size, **ints)
    drafts = DraftRows(ids, zeros.clone(), zeros, zeros.clone(), zeros.float(), zeros.clone())
    told = q if spoil is None else spoil(q)
    probs = told.expand(draws, 1, vocab).contiguous() if rule == "rejection" else None
    result = verify_accept(
        logits.repeat(2 * draws, 1),
        torch.arange(draws + 1, **ints) * 2,
        torch.arange(draws, **ints),
        torch.ones(draws, **ints),
        state,
        drafts,
        torch.zeros(vocab, dtype=torch.uint8, device=device),
        torch.zeros(1, device=device),
        None,
        probs,
    )
    p = (logits.double() / 0.7).softmax(dim=0).tolist()
    accepted = (result.num_new == 2).double().mean().item()
    return Counter(result.token_ids[:, 0].tolist()), p, q.tolist(), accepted


DRAWS = 10_000
LIMIT = 20.5  # chi-square of 5 degrees: passed by chance once in a thousand


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
def test_tokens_follow_the_model_whatever_was_drafted(rule, device):
    counts, p, q, accepted = draw_many(rule, device, DRAWS)
    assert chi_square(counts, p, DRAWS) < LIMIT
    overlap = sum(map(min, p, q))
    if rule == "match":
        assert accepted == pytest.approx(p[q.index(max(q))], abs=0.015)
    elif rule == "rejection":
        assert accepted == pytest.approx(overlap, abs=0.015)
    else:
        assert accepted >= overlap / (2 - overlap) - 0.015


def test_the_test_of_the_law_finds_a_broken_rule(device):
    """In a fifth of the samples the op gets other probabilities than those of the drafts."""
    draws = DRAWS // 5
    counts, p, _, _ = draw_many("rejection", device, draws, spoil=lambda q: q.flip(0))
    assert chi_square(counts, p, draws) > 3 * LIMIT
    # ... and a rule that takes every draft gives the law of the drafts.
    counts, p, _, _ = draw_many("rejection", device, draws, spoil=lambda q: q * 0)
    assert chi_square(counts, p, draws) > 3 * LIMIT


@RUNS
def test_a_row_that_is_always_wrong_stops_and_tries_again(run, device):
    case = Case(2, 4, 30, device)
    case.rows.copy_(torch.tensor([0, 1]))
    case.state.temperature.zero_()
    case.state.num_tokens.zero_()
    case.banned.zero_()
    case.drafts.draft_limit.fill_(4)
    case.drafts.acceptance.fill_(0.6)
    case.drafts.num_idle.zero_()
    case.logits.zero_()
    case.logits[:5, 1] = 1.0
    case.logits[5:, 2] = 1.0
    case.drafts.draft_ids[0, 1:], case.drafts.draft_ids[1, 1:] = 0, 2  # wrong, and right
    wanted = []
    for _ in range(60):
        case.used.copy_(case.drafts.num_wanted[:2].clamp(0, 4) if wanted else case.used * 0 + 4)
        case(run)
        wanted.append(case.drafts.num_wanted[:2].tolist())
        case.state.num_tokens.zero_()
    wrong, right = zip(*wanted, strict=True)
    first = wrong.index(0)
    assert 0 < first < 20
    assert sum(wrong[first:]) in (1, 2), "one draft in 32 steps"
    assert set(right) == {4}


@RUNS
def test_drafts_are_planned_as_the_oracle_says(run, device):
    """Chances, limits, thresholds and rests; a chance equal to `theta` is not taken."""
    size, most, retries = 30, 4, 0
    case = Case(size, most, 11, device)
    case.rows = torch.arange(size, dtype=torch.int32, device=device)  # none is scratch
    case.state.temperature.zero_()
    for theta in (0.0, 0.25, 0.9):
        case.theta.fill_(theta)
        case.used.copy_(torch.arange(size) % (most + 1) * (torch.rand(size) < 0.6))
        chances = torch.rand(size + 2).round(decimals=1)
        chances[::4] = 0.25
        case.drafts.acceptance.copy_(chances)
        idle = RETRY_STEPS - 2 + torch.arange(size + 2) % 4
        case.drafts.num_idle.copy_(idle)
        case.drafts.draft_limit.copy_(torch.randint(0, most + 1, (size + 2,)))
        case.state.num_tokens.fill_(1)
        result = case(run)
        for row in range(size):
            count, limit = int(case.used[row]), int(case.drafts.draft_limit[row])
            chance = oracle.learned(float(chances[row]), count, int(result.num_new[row]) - 1)
            wanted = oracle.wanted(chance, theta, limit)
            rests = 0 if count else int(idle[row]) + 1
            if wanted == 0 and limit and rests >= RETRY_STEPS:
                wanted, rests, retries = 1, 0, retries + 1
            assert float(case.drafts.acceptance[row]) == pytest.approx(chance, abs=1e-6)
            assert int(case.drafts.num_wanted[row]) == wanted
            assert int(case.drafts.num_idle[row]) == rests
    assert retries > 5


def test_wrong_shapes_are_named(device):
    case = Case(3, 2, 10, device)
    case.starts = case.starts[:-1]
    with pytest.raises(ArgumentError, match="do not fit"):
        case(verify_accept)
    case = Case(3, 2, 10, device)
    case.logits = case.logits.half()
    with pytest.raises(ArgumentError, match="float16"):
        case(verify_accept)
