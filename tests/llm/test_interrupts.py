"""An interrupted, failed or closed `LLM` leaves nothing behind."""

import signal

import pytest

from tests.tiny_llm import PROMPTS, assert_idle, greedy, ids_of, joined, open_tiny
from tiercel.errors import InvalidRequestError


def test_a_closed_model_says_so():
    with open_tiny() as llm:
        stream = llm.stream("a", greedy(9))
        next(stream)
    for call in (
        lambda: next(stream),
        lambda: llm.generate("a"),
        lambda: next(llm.stream("a")),
        lambda: llm.logits([5]),
    ):
        with pytest.raises(InvalidRequestError, match="closed"):
            call()
    llm.close()
    stream.close()
    assert not llm._takers
    assert llm.decode(llm.encode("still text")) == "still text"


@pytest.mark.reliability
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_step_frees_everything(llm, monkeypatch, where, kind):
    expected = ids_of(llm.generate(PROMPTS, greedy(8)))
    original, left = getattr(llm._engine.runner, where), [4]

    def interrupted(step):
        left[0] -= 1
        if left[0] == 0:
            raise kind
        return original(step)

    monkeypatch.setattr(llm._engine.runner, where, interrupted)
    with pytest.raises(kind):
        llm.generate(PROMPTS, greedy(8))
    assert_idle(llm)
    left[0] = 4
    with pytest.raises(kind):
        list(llm.stream("a", greedy(8)))
    assert_idle(llm)
    assert ids_of(llm.generate(PROMPTS, greedy(8))) == expected


@pytest.mark.reliability
@pytest.mark.parametrize("where", ["submit", "schedule", "_enter", "commit", "_release"])
def test_ctrl_c_amid_bookkeeping_frees_everything(llm, monkeypatch, where):
    """Ctrl-C waits until the bookkeeping is complete; another call's stream misses no token."""
    expected = ids_of(llm.generate(PROMPTS, greedy(8)))
    whole = llm.generate("a", greedy(30))[0].outputs[0].token_ids
    owner = llm._engine if where == "submit" else llm._engine.scheduler
    original, left = getattr(owner, where), 0

    def interrupted(*args, **options):
        nonlocal left
        left -= 1
        result = original(*args, **options)
        if left == 0:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, where, interrupted)
    for count in (1, 4):
        stream = llm.stream("a", greedy(30))
        deltas = [next(stream)]
        left = count
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(8))
        assert joined([*deltas, *stream], "token_ids") == whole
        assert_idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ids_of(llm.generate(PROMPTS, greedy(8))) == expected
