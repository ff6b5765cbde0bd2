"""Results of a rank's requests reach the loops of all other ranks as they are."""

import copy

import numpy as np
import torch

from tests.ipc.lockstep_world import FakeMatcher
from tiercel.params import SamplingParams
from tiercel.request.request import Request, TokenLogprobs
from tiercel.runner.joint_results import pack_results, take_results
from tiercel.runner.joint_step import make_scratch_parts
from tiercel.runner.prompt_readback import PromptReadback
from tiercel.runner.sampler_output import SampledTokens, TopLogprobs
from tiercel.runner.score_readback import ItemTokensReadback, ScoreReadback

VALUES = ("prompt_logprobs", "scores", "item_tokens", "embedding", "is_unsound")


def make_request(rank, pooling=None):
    params = SamplingParams(logprobs=2, prompt_logprobs=1)
    request = Request("r", [3, 4], params, 0, 0, frozenset(), 5, pooling=pooling)
    request.rank = rank
    return request


def tops(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return TopLogprobs(
        torch.arange(count, dtype=torch.int32), torch.rand(count, generator=generator),
        torch.arange(count * 2).view(count, 2), torch.rand(count, 2, generator=generator),
    )  # fmt: skip


def test_every_kind_of_value_arrives():
    """Of the rank's own requests alone, and nothing of its scratch row."""
    requests = [make_request(0), make_request(1), make_request(1, "mean"), make_request(1)]
    requests[3].matcher = FakeMatcher()
    others = copy.deepcopy(requests)
    requests[3].matcher.error, requests[3].matcher.is_late = "schema_too_complex", True
    pooled = torch.tensor([0.25, float("nan")])
    readbacks = [
        PromptReadback(requests[1], tops(3, 1)),
        PromptReadback(requests[2], pooled),
        ScoreReadback(requests[1], 0, torch.tensor([1.5, float("inf")])),
        ItemTokensReadback(requests[3], 0, torch.tensor([0, 2], dtype=torch.uint8), tops(2, 3)),
    ]
    entry = TokenLogprobs(7, -0.5, ((7, -0.5), (2, -1.5)))
    sampled = {
        requests[1]: SampledTokens((7, 2), None, (entry, entry), 1, (5, 6), has_unsound_draft=True),
        requests[3]: SampledTokens((0,), "nonfinite_logits"),
        make_scratch_parts(4).answer.request: SampledTokens((9,)),
    }
    for readback in readbacks:
        readback.deliver()
    found = take_results(others, pack_results(requests, 1, sampled, readbacks))
    assert {others.index(request): tokens for request, tokens in found.items()} == {
        1: sampled[requests[1]], 3: sampled[requests[3]],
    }  # fmt: skip
    for mine, theirs in zip(requests, others, strict=True):
        for name in VALUES:
            np.testing.assert_equal(getattr(theirs, name), getattr(mine, name))
    matcher = others[3].matcher
    assert (matcher.error, matcher.is_late) == ("schema_too_complex", True)


def test_logits_of_a_prompt_arrive():
    request = Request("r", [3, 4], SamplingParams(), 0, 0, frozenset(), 0, wants_logits=True)
    other, logits = copy.deepcopy(request), torch.randn(2, 5)
    take_results([other], pack_results([request], 0, {}, [PromptReadback(request, logits)]))
    assert np.array_equal(other.prompt_logits[0], logits.numpy())
