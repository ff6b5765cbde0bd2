"""Drafts of a head, and those of the text after them: of rows in all states, step after step."""

from functools import partial

import pytest
import torch

from tests.draft_world import BLOCK, World
from tests.ngram_brute_force import best_place
from tiercel.config import SpecConfig
from tiercel.ops.prepare_step import SlotLayout
from tiercel.runner.step_inputs import make_draft_batch
from tiercel.spec.hybrid import HybridProposer
from tiercel.spec.mtp import MtpProposer


def make_proposer(world, count):
    layout = SlotLayout(BLOCK, (1,), (BLOCK,))
    make_batch = partial(make_draft_batch, world.tables, layout, 80)
    return MtpProposer(world.texts, world.head, world.is_banned, count, make_batch)


def check_cache(world, states, rows, count):
    """The head wrote the places whose next token is known, then those of its own drafts."""
    head, texts = world.head, world.texts
    followed, *drafted = head.written
    assert sorted(followed) == sorted(world.known(states))
    assert len(drafted) == (count - 1 if len(rows) else 0)
    for number, written in enumerate(drafted):
        wanted = []
        for row in rows.tolist():
            place = world.length(row) - 1 + number
            end = world.prompts[row] + world.answers[row]
            if row < world.num_rows and texts.drafts.draft_limit[row] > 0 and place < end:
                block = int(world.tables[0, row, place // BLOCK])
                wanted.append((row, place, block * BLOCK + place % BLOCK))
        assert written == wanted
    for row in range(world.num_rows):
        if world.computed[row]:
            entries = world.entries(row)
            places = torch.arange(len(entries))
            slots = world.tables[0, row].long()[places // BLOCK] * BLOCK + places % BLOCK
            torch.testing.assert_close(head.cache[slots], entries)
    for block in (0, world.guard):
        assert head.cache[block * BLOCK :][:BLOCK].isnan().all()
    head.written.clear()


def wanted_of_head(world, row, count):
    """As many drafts as the row wants and its answer has room for."""
    left = world.prompts[row] + world.answers[row] - world.length(row) - 1
    count = max(0, min(int(world.texts.drafts.num_wanted[row]), count, left))
    return world.greedy_drafts(row, count)


def wanted_of_both(world, row, config):
    """The head's first draft, and what followed the text's end with it where it first came up."""
    drafts = wanted_of_head(world, row, 1)
    prompt = world.texts.sampling.token_ids[row, : world.prompts[row]].tolist()
    answer = world.texts.sampling.token_ids[row, world.prompts[row] : world.length(row)].tolist()
    answer += drafts
    found = best_place(prompt, answer, answer, (config.min_ngram, config.max_ngram))
    left = world.answers[row] - len(answer) - 1
    room = max(0, min(config.max_drafts - len(drafts), left))
    return [*drafts, *found[:room]][: int(world.texts.drafts.num_wanted[row])]


def check_step(world, proposer, count, wanted_of, *, is_padded):
    """One step; returns how many drafts it made."""
    states, rows = world.step(is_padded=is_padded)
    ids = world.texts.drafts.draft_ids
    ids[:, 1:][rows.long()] = -9
    wants = world.texts.drafts.num_wanted
    wants.copy_(torch.where(torch.rand(len(wants)) < 0.2, 0, world.texts.drafts.draft_limit))
    before, num_tokens = ids.clone(), world.texts.sampling.num_tokens.clone()
    committed = [
        world.texts.sampling.token_ids[row, : world.length(row)].tolist()
        for row in range(world.num_rows)
    ]
    if len(rows):
        proposer.propose(rows, states)
    else:
        proposer.update_cache(states)
    check_cache(world, states, rows, count)
    assert torch.equal(world.texts.sampling.num_tokens, num_tokens)
    made = 0
    for row in range(world.num_rows):
        tokens = world.texts.sampling.token_ids[row, : world.length(row)].tolist()
        assert tokens == committed[row]
        if row not in rows.tolist():
            assert torch.equal(ids[row], before[row])
            continue
        expected = wanted_of(world, row)
        assert ids[row, 0] == len(expected)
        assert ids[row, 1 : 1 + len(expected)].tolist() == expected
        made += len(expected)
    return made


@pytest.mark.parametrize("count", [1, 2, 5])
def test_drafts_are_those_of_the_head_step_by_step(count):
    """Prompts in chunks, drafts accepted or not, rows that do not draft, and ends of answers."""
    made = 0
    for seed in range(4):
        torch.manual_seed(seed)
        world = World(5, count)
        proposer = make_proposer(world, count)
        for step in range(25):
            made += check_step(
                world,
                proposer,
                count,
                lambda world, row: wanted_of_head(world, row, count),
                is_padded=step % 3 == 2,
            )
    assert made > 60


@pytest.mark.parametrize("config", [SpecConfig("hybrid", 5), SpecConfig("hybrid", 3, 1, 2)])
def test_what_followed_the_head_s_draft_comes_after_it(config):
    """Texts of four tokens, so that most ends have come up before."""
    made = 0
    for seed in range(6):
        torch.manual_seed(seed)
        world = World(5, config.max_drafts)
        proposer = HybridProposer(world.texts, make_proposer(world, 1), config)
        for step in range(25):
            made += check_step(
                world,
                proposer,
                1,
                lambda world, row: wanted_of_both(world, row, config),
                is_padded=step % 3 == 2,
            )
    assert made > 60
