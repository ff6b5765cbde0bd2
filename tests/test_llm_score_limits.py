"""Items that are too long, and vocabulary ids that are not tokens."""

import numpy as np
import pytest

from tests.gguf_files import tiny_model
from tests.test_llm_score import IDS, ITEMS, QUERY, assert_near
from tests.tiny_llm import assert_idle, open_tiny
from tiercel.errors import ContextLengthError


def test_lengths_count_as_if_each_item_were_alone():
    """The packed length may exceed the context by far; an item after the query may not."""
    with open_tiny(max_model_len=40) as llm:
        query = QUERY[:30]
        fits = [[1] * 10] * 20
        assert np.isfinite(llm.score(query, fits, label_token_ids=IDS).logprobs).all()
        with pytest.raises(ContextLengthError, match=r"items\[1\] has 11 tokens.* of 30") as error:
            llm.score(query, [[1], [1] * 11], label_token_ids=IDS)
        assert error.value.param == "items[1]"
        with pytest.raises(ContextLengthError, match=r"items\[0\] has 10 .* 1 of suffix and label"):
            llm.score("x" * 29, ["x" * 10], ["xa"])
        with pytest.raises(ContextLengthError, match=r"query has 40 tokens .* holds 40"):
            llm.score(QUERY[:40], [[1]], label_token_ids=IDS)
        with pytest.raises(ContextLengthError, match="query has 999999 characters"):
            llm.score("x" * 999999, ["a"], ["a"])
        assert_idle(llm)


def test_one_overlong_item_never_fails_the_list():
    with open_tiny(max_model_len=40) as llm:
        query, items = QUERY[:30], [[1, 2], [*range(25)], [3]]
        expected = llm.score(query, [items[0], items[1][:10], items[2]], label_token_ids=IDS)
        skipped = llm.score(query, items, label_token_ids=IDS, long_items="skip")
        cut = llm.score(query, items, label_token_ids=IDS, long_items="cut")
    assert_near(cut.logprobs, expected.logprobs)
    assert not cut.errors
    assert_near(skipped.logprobs[[0, 2]], expected.logprobs[[0, 2]])
    assert np.isnan(skipped.logprobs[1]).all()
    assert list(skipped.errors) == [1]
    assert "items[1] has 25 tokens" in skipped.errors[1]


def test_ids_that_are_no_tokens_take_no_probability(tmp_path):
    """A vocabulary is padded in the file: the padding is left out of the sum."""
    path = tiny_model(tmp_path / "m.gguf")
    with open_tiny(path) as llm:
        every = list(range(llm.tokenizer.vocab_size))
        padding = set(llm.tokenizer.unused_ids)
        real = [i for i in every if i not in padding]
        output = llm.score(QUERY, ITEMS[:3], label_token_ids=real)
        llm._engine.runner.sampler.is_banned[real[:50]] = 1
        fewer = llm.score(QUERY, ITEMS[:3], label_token_ids=real[50:])
    assert_near(output.probs.sum(axis=1), np.ones(3), 1e-5)
    assert_near(fewer.probs.sum(axis=1), np.ones(3), 1e-5)
