"""What belongs to a request and what to its computation."""

import dataclasses

from tiercel.grammar.spec import GrammarSpec
from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status
from tiercel.request.score_task import ScoreTask

INPUTS = {
    "request_id": "a",
    "prompt_token_ids": [1, 2],
    "params": SamplingParams(n=3),
    "seed": 5,
    "stream": 2,
    "stop_ids": frozenset({7}),
    "max_tokens": 9,
    "wants_logits": True,
    "priority": -1,
    "client": "b",
    "grammar": GrammarSpec("start: /a/"),
    "pooling": "mean",
    "score": ScoreTask(((1,),), ()),
    "matcher": object(),
}


def test_the_clone_for_the_engine_has_the_inputs_and_no_progress():
    request = Request(**INPUTS)
    request.status, request.row, request.num_computed, request.finish_reason = (
        Status.FINISHED, 3, 2, "stop",
    )  # fmt: skip
    request.output_token_ids.append(4)
    clone, new = request.clone_for_engine(), Request(**INPUTS)
    for field in dataclasses.fields(Request):
        ours, expected = getattr(clone, field.name), getattr(new, field.name)
        if field.name in INPUTS:
            assert ours is INPUTS[field.name], field.name
        elif field.name == "scores":
            assert ours.shape == (0,)
        else:
            assert ours == expected, field.name
    clone.output_token_ids.append(5)
    assert request.output_token_ids == [4], "no list is shared"
