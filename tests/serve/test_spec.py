"""A server that speculates says what one without says: forms, reasoning, streams, stops, tools."""

from __future__ import annotations

import re
from contextlib import ExitStack
from time import sleep

import pytest

from tests.patience import wait_for
from tests.serve.events import read_chat
from tests.serve.generation.test_structured_output import CASES, DRAWS, FORMS, STOPS, TEMPLATES
from tests.serve.harness import start_server
from tiercel.bench.drafts import read_metrics


@pytest.fixture(scope="module")
def servers(tiny, tmp_path_factory):
    """One without drafts, one with."""
    folder = tmp_path_factory.mktemp("log")
    options = {"off": (), "ngram": ("--spec", "ngram", "--num-spec-tokens", "4")}
    with ExitStack() as stack:
        yield {
            spec: stack.enter_context(
                start_server(
                    tiny,
                    "--trust-request-chat-template",
                    "--dtype",
                    "float32",
                    *more,
                    log_path=folder / f"{spec}.log",
                )
            )
            for spec, more in options.items()
        }


def answer(server, body):
    """A plain answer and its stream, without what differs from request to request."""
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    plain = response.json()
    (choice,) = plain["choices"]
    for call in choice["message"].get("tool_calls", ()):
        del call["id"]
    plain["usage"].pop("prompt_tokens_details")
    streamed = server.post("/v1/chat/completions", body | {"stream": True})
    choices, _, _ = read_chat(streamed.content)
    joined = choices[0]
    calls = [(name, arguments) for _, name, arguments in joined.calls]
    stream = (joined.content, joined.reasoning, calls, joined.finish_reasons, joined.stop_reason)
    return choice, plain["usage"], stream


# Each draw with and without a stop string would show nothing more; by default one of the two pairs
# with each form and template.
PAIRS = [("greedy", "stop"), ("seeded", "no stop")]
FEW_CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (number % 4 not in (0, 3)))
    for number, case in enumerate(case for case in CASES if case[2:] in PAIRS)
]


@pytest.mark.parametrize(("form", "template", "draw", "stop"), FEW_CASES)
def test_the_answer_is_the_same(servers, form, template, draw, stop):
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi hi hi hi hi hi"}],
        "max_tokens": 60,
        "chat_template": TEMPLATES[template],
        "logprobs": True,
        **FORMS[form],
        **DRAWS[draw],
        **STOPS[stop],
    }
    plain, drafted = (answer(servers[spec], body) for spec in ("off", "ngram"))
    entries, alone = ((a[0].pop("logprobs") or {}).get("content") or [] for a in (drafted, plain))
    assert drafted == plain
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in alone]
    assert [e["logprob"] for e in entries] == pytest.approx([e["logprob"] for e in alone], abs=1e-3)


def test_guesses_are_counted_and_may_be_switched_off(servers):
    body = {
        "model": "tiny", "prompt": [7, 8, 9, 10] * 12, "max_tokens": 80, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    server = servers["ngram"]

    def num_made():
        pattern = r"^tiercel:generation_tokens_total{.*} (\S+)$"
        return float(re.search(pattern, server.get("/metrics").text, re.MULTILINE)[1])

    def figures(**fields):
        """The metrics once the counters of the last step of a request are in them."""
        enough = num_made() + 80
        server.post("/v1/completions", body | fields)
        wait_for(lambda: num_made() >= enough)
        return read_metrics(server.get("/metrics").text)

    sleep(0.3)  # counters come up to 0.1 s late, those of the tests before too
    before = figures()
    off = figures(num_spec_tokens=0)
    on = figures()
    assert off == before
    assert on.num_draft_tokens > off.num_draft_tokens
    assert read_metrics(servers["off"].get("/metrics").text).num_draft_tokens == 0
