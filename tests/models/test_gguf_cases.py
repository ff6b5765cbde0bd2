"""Three tiny GGUF files against logits that were computed in float64 from their decoded weights."""

import numpy as np
import pytest

from tests.tiny_llm import DATA, NAMES, open_on_gpu, open_tiny
from tiercel.params import SamplingParams

OPEN = {"cpu": open_tiny, "cuda": open_on_gpu}
# Per dtype: NMSE of all logits, and the lead of the best logit from which a greedy token must
# agree.
BOUNDS = {"float32": (1e-9, 1e-3), "float16": (5e-5, 0.1), "bfloat16": (2e-3, 0.5)}


def nmse(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(
        ((actual - expected.astype(np.float64)) ** 2).sum()
        / (expected.astype(np.float64) ** 2).sum()
    )


PLACES = [
    ("cpu", "float32"),
    ("cpu", "bfloat16"),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in BOUNDS),
]


@pytest.fixture(params=NAMES)
def case(request):
    return DATA / f"{request.param}.gguf", np.load(DATA / f"{request.param}.npz")


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("chunk", [7, 64], ids=["chunks of 7", "whole"])
def test_logits_match_the_float64_forward(case, device, dtype, chunk):
    path, expected = case
    with OPEN[device](path, dtype=dtype, max_num_seqs=4, max_num_batched_tokens=chunk) as llm:
        logits = llm.logits(expected["tokens"].tolist())
    assert logits.shape == expected["logits"].shape
    assert nmse(logits, expected["logits"]) <= BOUNDS[dtype][0]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_greedy_tokens_match_up_to_the_first_near_tie(case, device, dtype):
    path, expected = case
    greedy, leads = expected["greedy"].tolist(), expected["greedy_lead"]
    params = SamplingParams(temperature=0, max_tokens=len(greedy), ignore_eos=True)
    with OPEN[device](path, dtype=dtype, max_num_seqs=4) as llm:
        ids = llm.generate({"prompt_token_ids": expected["greedy_prompt"].tolist()}, params)
    near_ties = np.flatnonzero(leads < BOUNDS[dtype][1])
    stop = int(near_ties[0]) if near_ties.size else len(greedy)
    assert ids[0].outputs[0].token_ids[:stop] == greedy[:stop]
    if dtype == "float32":
        assert stop == len(greedy), "in float32 every step is decided"
