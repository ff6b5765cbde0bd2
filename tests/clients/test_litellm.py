"""litellm, which still needs an older client of OpenAI's."""

import json

import pytest

from tests.clients.conftest import HERE
from tests.patience import wait_for

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def found(run_client, server):
    return json.loads(run_client(HERE / "use_litellm.py", server.url).splitlines()[-1])


def test_answers_and_streams(found):
    assert found["text"]
    assert found["num_tokens"] == 12
    assert "".join(found["pieces"]) == found["text"]
    assert len(found["pieces"]) > 4
    first, second = found["answers"]
    assert first != second
    stop, stopped = found["stopped"]
    assert stopped == found["text"].partition(stop)[0]


def test_log_probabilities(found):
    assert len(found["logprobs"]) == 4
    assert found["text"].startswith("".join(token for token, _, _ in found["logprobs"]))
    assert all(logprob <= 0 and num_top == 2 for _, logprob, num_top in found["logprobs"])


def test_tools_and_forms(found):
    reason, name, arguments = found["call"]
    assert (reason, name) == ("tool_calls", "get_weather")
    assert set(json.loads(arguments)) == {"city"}
    reason, text = found["form"]
    assert reason == "stop"
    assert json.loads(text)["age"] <= 99


def test_the_other_routes(found):
    assert found["raw"].strip()
    assert found["anthropic"] == found["text"]
    assert "temperature" in found["error"]


def test_a_cancelled_call_gives_its_place_back(found, server):
    line = 'tiercel:num_requests_running{engine="0",model_name="tiny"} 0.0'
    wait_for(lambda: line in server.get("/metrics").text)
    assert 'finished_reason="abort"' in server.get("/metrics").text
