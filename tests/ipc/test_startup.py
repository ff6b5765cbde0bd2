"""What an engine process does between loading and its first request."""

from pathlib import Path

import pytest

from tiercel.config import LoadOptions
from tiercel.engine.load import load_model
from tiercel.ipc import startup
from tiercel.ipc.messages import Outputs, Ready, Refused, Scores
from tiercel.ipc.session import EngineSession
from tiercel.ipc.startup import rehearse, start_session
from tiercel.models.source import open_source

LLAMA = Path(__file__).parents[1] / "data/gguf/llama-tiny.gguf"


@pytest.fixture
def sent(monkeypatch):
    """What sessions of the rehearsal send."""
    messages = []
    real = EngineSession.__init__

    def watched(self, loaded, send):
        def both(message):
            messages.append(message)
            send(message)

        real(self, loaded, both)

    monkeypatch.setattr(EngineSession, "__init__", watched)
    return messages


def test_answers_and_scores_are_rehearsed_and_leave_no_trace(sent):
    loaded = load_model(LLAMA, LoadOptions(device="cpu"), None)
    heard = []
    rehearse(loaded, lambda *step: heard.append(step))
    assert heard == [("Rehearsing", done, 3) for done in range(4)]
    deltas = [d for m in sent if isinstance(m, Outputs) for d in m.deltas]
    reasons = [d.finish_reason for d in deltas if d.finish_reason]
    assert reasons == ["length"] * 3  # an answer, one with log-probabilities, a list
    assert any(d.logprobs for d in deltas)
    assert sum(isinstance(message, Scores) for message in sent) == 1
    assert not any(isinstance(message, Refused) for message in sent)
    engine = loaded.engine
    assert not engine.has_work
    assert engine.scheduler.prefix_queries == 0
    assert all(allocator.num_idle == 0 for allocator in engine.scheduler.cache.allocators)


def test_a_context_without_room_is_not_rehearsed(sent):
    loaded = load_model(LLAMA, LoadOptions(device="cpu", max_model_len=3), None)
    rehearse(loaded, lambda *_: None)
    assert not sent


@pytest.mark.parametrize("has_faults", [False, True])
def test_an_engine_is_ready_behind_its_rehearsal(monkeypatch, has_faults):
    order = []
    monkeypatch.setattr(startup, "rehearse", lambda *_: order.append("rehearse"))
    options = LoadOptions(device="cpu", enable_fault_injection=has_faults)
    start_session(open_source(LLAMA), options, lambda *_: None, lambda m: order.append(type(m)))
    assert order == ([Ready] if has_faults else ["rehearse", Ready])
