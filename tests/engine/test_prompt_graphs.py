"""Padded prompts on the host: which steps they are, and what their graph is given."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.ops.test_multi_item_attention import SCALE, make_case, triton_config
from tests.tiny_llm import open_tiny
from tiercel.engine import prompt_graphs
from tiercel.engine.prompt_graphs import MOST_PROMPTS, PLACES, PromptSteps
from tiercel.kernels.attention_tiles import make_padded_tiles
from tiercel.kernels.multi_item_attention import (
    launch_multi_item_attention,
    select_multi_item_attention,
)

GROUP = 4
SCRATCH = 30


class FakeAttention:
    """Plans tiles as an attention layer on a GPU does."""

    kind = ("shape", 0)

    def prompt_tiles(self, query_lens, context_lens, *, longest, spare):
        capability = (9, 0)
        config = select_multi_item_attention(torch.float16, 128, GROUP, 64, 0, longest, capability)
        return make_padded_tiles(config, query_lens, context_lens, GROUP, spare)


def make_steps(max_model_len=4096, max_num_batched_tokens=8192, prompt_graphs=True):
    with open_tiny() as llm:
        config = dataclasses.replace(
            llm.config,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            prompt_graphs=prompt_graphs,
        )
    model = SimpleNamespace(layers=[SimpleNamespace(attention=FakeAttention())] * 3)
    steps = PromptSteps(model, SimpleNamespace(scratch=SCRATCH), config)
    steps.ran = []
    steps._run = lambda pieces, step: steps.ran.append((pieces, step)) or step
    return steps


def test_sizes_fit_the_context_and_the_step():
    assert make_steps().sizes == list(prompt_graphs.SIZES)
    assert make_steps(max_model_len=200).sizes == [32, 64, 96, 128, 160, 192]
    assert make_steps(max_num_batched_tokens=64).sizes == [32, 64]
    assert make_steps(prompt_graphs=False).sizes == []


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "size"),
    [
        ([17], [17], 32),
        ([32], [32], 32),
        ([300], [300], 320),
        ([5, 1, 200], [905, 77, 200], 224),
        ([20] * MOST_PROMPTS, [20] * MOST_PROMPTS, 160),
        ([1024], [1500], 1024),
    ],
)
def test_every_token_is_computed_once_and_padding_is_scratch(query_lens, context_lens, size):
    steps = make_steps()
    rows = list(range(3, 3 + len(query_lens)))
    step = steps(rows, query_lens, context_lens)
    assert step.size == size
    (pieces, _) = steps.ran[0]
    assert all(len(piece) % 4 == 0 for piece in step.lists)  # aligned for the kernels
    assert pieces[0][:PLACES].tolist() == rows + [SCRATCH] * (PLACES - len(rows))
    starts = pieces[1][: PLACES + 1].tolist()
    assert np.diff(starts)[: len(rows)].tolist() == query_lens
    assert starts[-1] == size == max(starts)
    table = pieces[2].view(-1, 8)
    model = steps._model_step(size)
    assert table.shape == model.tiles[FakeAttention.kind].table.shape  # of every step of this size
    seen = {}
    for first, tokens, index, request, prefix, *_ in table.tolist():
        for place in range(tokens):
            value = (index + place, request, prefix)
            assert seen.setdefault(first + place, value) == value  # a copy says the same
    expected, lengths = {}, [*zip(query_lens, context_lens, strict=True)]
    rest = size - sum(query_lens)
    for request, (new, context) in enumerate(lengths + ([(rest, rest)] if rest else [])):
        for place in range(new):
            expected[starts[request] + place] = (context - new + place, request, context)
    assert seen == expected


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([16, 16], [16, 900]),  # kernels whose rows are invariant
        ([1] * 40, [50] * 40),
        ([20] * (MOST_PROMPTS + 1), [20] * (MOST_PROMPTS + 1)),
        ([1025], [1025]),
        ([100], [2100]),  # another kernel than the one that was captured
    ],
)
def test_other_steps_are_left_alone(query_lens, context_lens):
    steps = make_steps()
    assert steps(list(range(len(query_lens))), query_lens, context_lens) is None
    assert not steps.ran


def test_copies_of_a_tile_change_no_bit(device):
    """A table filled up, at a fixed place on the device, against the plan of the step alone."""
    requests = [(0, 23, []), (37, 60, []), (0, 7, [])]
    case = make_case(requests, (4, 2, 32), 16, torch.float32, device)
    config = triton_config()
    expected = case.launch(config)
    tiles = make_padded_tiles(config, case.query_lens, case.context_lens, 2, PLACES)
    assert len(tiles.table) == 53 // 8 + PLACES
    table = torch.from_numpy(tiles.table).to(device)
    out = torch.full(case.q.shape, float("nan"), device=device)
    tensors = (case.q, case.k_cache, case.v_cache, case.tables, case.k_new, case.v_new, out)
    launch_multi_item_attention(*tensors, tiles.plan(table, 53), SCALE, 0)
    assert torch.equal(out.flatten(1), expected)
