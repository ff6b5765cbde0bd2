"""Which attention a step takes: few new tokens of each request, or a prompt."""

import pytest

from tests.tiny_llm import open_tiny
from tiercel.config import MAX_DECODE_QUERIES
from tiercel.layers import attention

FEW, PROMPT = "decode_attention", "prefill_attention"


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, FEW), (MAX_DECODE_QUERIES, FEW), (MAX_DECODE_QUERIES + 1, PROMPT), (40, PROMPT)],
)
def test_up_to_sixteen_new_tokens_are_few(num_tokens, expected, monkeypatch):
    seen = set()
    for name in (FEW, PROMPT):
        original = getattr(attention, name)

        def record(*args, _name=name, _original=original, **kwargs):
            seen.add(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(attention, name, record)
    with open_tiny() as llm:
        seen.clear()
        llm.logits(list(range(40, 40 + num_tokens)))
    assert seen == {expected}
