"""DeepSeek-V4 on a GPU: what a token's bits and a greedy answer may not depend on."""

import pytest

from tests.small_v4 import SMALL, text_ids, text_prompts
from tests.step_trace import TracedText
from tests.tiny_llm import greedy, ids_of, open_on_gpu
from tiercel.models.deepseek_v4_model import DeepseekV4

pytestmark = pytest.mark.gpu
PROMPTS = text_prompts(8, 130)
ANSWER = greedy(120)


@pytest.fixture(scope="module")
def traced():
    with open_on_gpu(SMALL, max_num_seqs=1, spec="mtp") as llm:
        model = llm._engine.runner.model
    return TracedText(model, text_ids()[: 380 + 48], 380, "cuda")


@pytest.mark.parametrize("num_tokens", range(1, 1 + (DeepseekV4.exact_tokens or 0)))
def test_no_operator_gives_a_token_other_bits_in_a_larger_step(traced, num_tokens):
    assert traced.differences(num_tokens) == {}


@pytest.fixture(scope="module")
def plain():
    """Greedy answers one after the other."""
    with without_prefixes(max_num_seqs=1) as llm:
        return [ids_of(llm.generate(prompt, ANSWER)) for prompt in PROMPTS]


def without_prefixes(**options):
    """The small model; a prompt after a hit is computed in other products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERCEL_PREFIX_CACHE", "0")
        llm = open_on_gpu(SMALL, **options)
    if llm._engine.scheduler.policy is not None:
        llm._engine.scheduler.policy.costs = ()  # drafts are verified whether they pay or not
    return llm


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", ["mtp", "ngram", "hybrid"])
def test_drafts_change_no_answer(plain, spec, count):
    with without_prefixes(max_num_seqs=1, spec=spec, num_spec_tokens=count) as llm:
        assert [ids_of(llm.generate(prompt, ANSWER)) for prompt in PROMPTS] == plain


def test_an_eager_step_changes_no_answer(plain, monkeypatch):
    monkeypatch.setenv("TIERCEL_CUDA_GRAPH", "0")
    with without_prefixes(max_num_seqs=1) as llm:
        assert [ids_of(llm.generate(prompt, ANSWER)) for prompt in PROMPTS] == plain
