"""What the model and its cache can take: the last token passes, one beyond it does not."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from tests.serve.fake_client import (
    FakeClient,
    ask,
    fake_app,
    fake_info,
    fake_tokenizer,
    running,
)
from tests.serve.generation.tools.call_writers import Tool
from tests.serve.test_limits import quick_client, refusal_of, refused_param
from tiercel.errors import ArgumentError
from tiercel.ipc.messages import EngineStats
from tiercel.ipc.supervisor import EngineState
from tiercel.params import Limits
from tiercel.serve import server
from tiercel.serve.api.scoring import score_jobs as scoring
from tiercel.serve.generation.admission import check_capacity, check_queue
from tiercel.serve.generation.tools.parsers.format import check_parameters

pytestmark = pytest.mark.reliability


def model_of(**info):
    return SimpleNamespace(info=SimpleNamespace(**info), num_rows=info.get("max_num_seqs"))


def test_answers_to_one_prompt_share_its_blocks():
    """All shapes of a small cache, against the sum of what is held at the end."""
    for capacity, context in ((20, 12), (12, 12), (7, 12)):
        model = model_of(capacity_tokens=capacity, max_model_len=context)
        for num_prompt, n, max_tokens in itertools.product(range(1, 12), (1, 2, 3), range(1, 16)):
            answer = min(max_tokens, context - num_prompt)
            fits = num_prompt + n * answer <= capacity
            prompts = [[0], [0] * num_prompt]  # each prompt is looked at
            fits = fits and 1 + n * min(max_tokens, context - 1) <= capacity
            found = refused_param(check_capacity, model, prompts, n, max_tokens)
            assert found == (None if fits else "n" if n > 1 else "max_tokens")
        assert refused_param(check_capacity, model, [[0] * 11], 16, None) is None


def test_what_runs_and_waits_bounds_the_answers():
    model = model_of(max_num_seqs=3)
    for count in range(1, 12):
        found = refused_param(check_queue, model, count, Limits(max_waiting_requests=5))
        assert found == (None if count <= 8 else "n")


def test_a_list_to_score_fits_by_its_longest_prompt():
    model = model_of(capacity_tokens=10)
    for longest in (1, 10, 11):
        requests = [SimpleNamespace(prompt_token_ids=[0] * n) for n in (1, longest, 2)]
        found = refused_param(scoring.check_capacity, model, requests, "query")
        assert found == ("query" if longest > 10 else None)
    assert refused_param(scoring.check_capacity, model, [], "query") is None


def test_schemas_of_all_tools_are_counted_together():
    """Four times the values of one schema."""
    limits = Limits(max_schema_nodes=20)
    schema = {"properties": {str(i): {} for i in range(8)}}
    tools = [Tool(f"f{i}", schema) for i in range(20)]
    fits = [refusal_of(check_parameters, tools[:n], 256, limits) is None for n in range(20)]
    # How many values one schema has: the least bound that takes it.
    one = next(
        bound
        for bound in range(1, 30)
        if refusal_of(check_parameters, tools[:1], 256, Limits(max_schema_nodes=bound)) is None
    )
    assert one > 8
    assert sum(fits) - 1 == 80 // one
    error = refusal_of(check_parameters, tools, 256, limits)
    assert (error.param, error.code) == ("tools", "schema_too_complex")


RAW = {"model": "tiny", "max_tokens": 1}


def statuses(*bodies, path="/v1/completions", **info):
    client = quick_client()
    client.info = fake_info(**info)
    calls = [("POST", path, {"json": {**RAW, **body}}) for body in bodies]
    return [
        200 if response.status_code == 200 else response.json()["error"]["code"]
        for response in ask(*calls, client=client)
    ]


def test_token_ids_end_with_the_vocabulary():
    last = fake_tokenizer().vocab_size - 1
    prompts = [[0, last], [last + 1], [0, last + 1, 1], [-1], [[0], [last]], [[0], [last + 1]]]
    found = statuses(*({"prompt": prompt} for prompt in prompts))
    assert found == [200, *["invalid_request"] * 3, 200, "invalid_request"]


@pytest.mark.parametrize("context", [64, 100])
def test_a_prompt_leaves_a_place_for_one_token(context):
    prompts = [{"prompt": [97] * count} for count in (1, context - 1, context, context + 1)]
    found = statuses(*prompts, max_model_len=context)
    assert found == [200, 200, *["context_length_exceeded"] * 2]
    found = statuses(*({**body, "max_tokens": 0, "echo": True} for body in prompts),
                     max_model_len=context)  # fmt: skip
    assert found[:2] == [200, 200]
    assert found[-1] == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch):
    """64 bytes for each token of the context; a character may have several."""
    tokenized = []
    tokenizer = type(fake_tokenizer())
    original = tokenizer.encode

    def record(self, text, **options):
        tokenized.append(len(text))
        return original(self, text, **options)

    monkeypatch.setattr(tokenizer, "encode", record)
    for character, size in (("a", 64 * 20), ("é", 32 * 20)):
        for more in (0, 1):
            tokenized.clear()
            (found,) = statuses({"prompt": character * (size + more)}, max_model_len=20)
            assert found == "context_length_exceeded"
            assert (size + more in tokenized) == (more == 0)


def test_what_is_left_of_the_context_bounds_an_answer():
    client = FakeClient()
    bodies = [{"prompt": [97] * 60, "max_tokens": m} for m in (1, 3, 4, 5, 1000)]
    client.info = fake_info(max_model_len=64)
    ask(*[("POST", "/v1/completions", {"json": {**RAW, **body}}) for body in bodies], client=client)
    assert [request.max_tokens for request in client.submitted] == [1, 3, 4, 4, 4]


def test_the_page_is_sent_anew_for_another_tag():
    (page,) = ask(("GET", "/"))
    for tag, status in ((page.headers["etag"], 304), ('"other"', 200), ("*x", 200)):
        (again,) = ask(("GET", "/", {"headers": {"if-none-match": tag}}))
        assert again.status_code == status
        assert again.content == (b"" if status == 304 else page.content)


def test_an_engine_that_was_started_again_says_anew_what_it_holds():
    """Its cache may have another size, and it counts from zero."""
    client = quick_client()
    app = fake_app(client)
    state = app.state.server

    async def run():
        async with running(app) as http:
            client.stats = EngineStats(num_steps=5, num_prompt_tokens=100)
            state.metrics.take_stats(client.stats)
            first = state.model
            client.num_restarts = 1
            for engine_state, info in (
                (EngineState.RESTARTING, fake_info(num_blocks=33)),
                (EngineState.READY, None),
            ):
                client.state, client.info = engine_state, info
                app.state.engine_monitor._renew()
                assert state.model is first
            client.state, client.info = EngineState.READY, fake_info(num_blocks=33)
            app.state.engine_monitor._renew()
            assert state.model.info is client.info
            assert state.model.tokenizer is first.tokenizer
            state.metrics.take_stats(EngineStats(num_steps=9, num_prompt_tokens=7))
            return (await http.get("/metrics")).text

    text = asyncio.run(run())
    assert 'num_gpu_blocks="33"' in text
    assert 'tiercel:prompt_tokens_total{engine="0",model_name="tiny"} 107.0' in text


class Descriptors:
    """How many files a process may open, as `resource` tells and sets it."""

    RLIMIT_NOFILE, RLIM_INFINITY = 7, -1

    def __init__(self, soft, hard, *, may_raise=True):
        self.soft, self.hard, self.may_raise = soft, hard, may_raise

    def getrlimit(self, kind):
        assert kind == self.RLIMIT_NOFILE
        return self.soft, self.hard

    def setrlimit(self, kind, values):
        if not self.may_raise:
            raise ValueError("not allowed")
        assert self.hard == self.RLIM_INFINITY or values[0] <= self.hard
        self.soft, self.hard = values


@pytest.mark.parametrize("may_raise", [True, False])
def test_connections_fit_what_the_process_may_open(may_raise, monkeypatch):
    """The soft limit is raised as far as is needed and allowed; what is left bounds connections."""
    own = server.OWN_DESCRIPTORS + server.EXTRA_CONNECTIONS
    for wanted in (1, 50):
        needed = wanted + own
        for soft in (-1, own, own + 1, needed - 1, needed, needed + 9):
            for hard in (-1, own, needed - 1, needed, needed + 9):
                if hard != -1 and not 0 <= soft <= hard:
                    continue
                found = Descriptors(soft, hard, may_raise=may_raise)
                monkeypatch.setattr(server, "resource", found)
                is_enough = soft == -1 or soft >= needed
                after = soft
                if not is_enough and may_raise:
                    after = needed if hard == -1 else min(hard, needed)
                room = wanted if is_enough else after - own
                limits = Limits(max_connections=wanted)
                if room < 1:
                    with pytest.raises(ArgumentError, match="may open"):
                        server.fit_descriptors(limits)
                else:
                    assert server.fit_descriptors(limits).max_connections == min(wanted, room)
                assert found.soft == after
