"""What an engine process says while a step is under way."""

from pathlib import Path

import pytest

from tests.tiny_llm import greedy
from tiercel.config import LoadOptions
from tiercel.engine.load import load_model
from tiercel.ipc.messages import Advanced, NewRequest, Stats
from tiercel.ipc.pulse import MESSAGE_SECONDS, Pulse
from tiercel.ipc.session import EngineSession

LLAMA = Path(__file__).parents[1] / "data/gguf/llama-tiny.gguf"


def test_the_longest_pause_is_told_and_forgotten():
    now, sent = [0.0], []
    pulse = Pulse(sent.append, lambda: now[0])
    pulse()
    assert sent == [Advanced(0.0)], "the first sign comes at once"
    for pause in (0.01, 0.1, 0.02, 0.08, 0.05, 0.3):
        now[0] += pause
        pulse()
    assert sent[1:] == [Advanced(0.1), Advanced(pytest.approx(0.3))]
    sent.clear()
    now[0] += 1.0
    pulse.rest()
    now[0] += 100.0
    pulse()
    assert sent == [Advanced(0.0)], "idle time is no pause of a step"


def test_signs_come_at_most_five_times_a_second():
    now, sent = [0.0], []
    pulse = Pulse(sent.append, lambda: now[0])
    for _ in range(1001):
        pulse()
        now[0] += 0.01
    assert 40 <= len(sent) <= 1 + 10.0 / MESSAGE_SECONDS


@pytest.fixture(scope="module")
def loaded():
    return load_model(LLAMA, LoadOptions(device="cpu", dtype="float32"), None)


def test_layers_and_the_head_give_signs_within_a_step(loaded):
    """Of a prompt's step each of 2 layers and the head, and of every step its end.

    A step of one token is one call of the native library, where there is one.
    """
    session = EngineSession(loaded, lambda _: None)
    heard = []
    loaded.engine.runner.watch(lambda: heard.append(1))
    session._pulse = lambda: heard.append("step")
    session.on_idle = session.loop.shutdown
    request = loaded.inputs().request([9] * 100, greedy(3), 0)
    session.handle(NewRequest.of(1, request))
    session.loop.run()
    layers = [1, 1] if loaded.engine.runner.model.native_layers is None else []
    assert heard == [1, 1, 1, "step"] + [*layers, 1, "step"] * 2


def test_an_idle_engine_gives_no_sign_and_its_rest_is_no_pause(loaded):
    now, sent = [0.0], []
    session = EngineSession(loaded, sent.append)
    session._pulse = Pulse(sent.append, lambda: now[0])
    session._pulse()
    session.on_idle()
    now[0] += 50.0
    session._pulse()
    told = [message for message in sent if not isinstance(message, Stats)]
    assert told == [Advanced(0.0), Advanced(0.0)]
