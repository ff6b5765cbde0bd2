"""Lists of prompts that share a start: one pass over it, and the answers of one by one.

The engine runs in this process, in a thread, so that its steps can be counted.
"""

import asyncio
import contextlib
import threading
from dataclasses import dataclass

import httpx
import openai
import pytest

from tests.engine_process import make_client
from tests.gguf_files import tiny_model
from tests.patience import wait_for
from tests.serve.events import read_events
from tests.serve.fake_client import FakeClient
from tests.serve.thread_server import thread_server
from tests.tiny_llm import DATA, NAMES
from tiercel.config import LoadOptions
from tiercel.engine.load import load_model
from tiercel.ipc.asyncio_bridge import AsyncioBridge
from tiercel.ipc.startup import describe
from tiercel.params import Limits

TOLERANCE = 1e-4  # nats: float32 sums in another order
START = [(7 * i) % 250 for i in range(150)]
OWN = [[(3 * i + 5 * j) % 250 for j in range(1 + 5 * i % 17)] for i in range(12)]
LIST = [[*START, *own] for own in OWN]
ASK = {"model": "tiny", "max_tokens": 1, "logprobs": 5, "temperature": 0}


class LoadedClient(FakeClient):
    """Stands for `EngineClient`, around a real engine of this process.

    Attributes:
        num_computed: tokens of all steps.
        num_requests: that the engine got.
    """

    def __init__(self, model, **options):
        options = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 256} | options
        loaded = load_model(model, LoadOptions(**options), None)
        super().__init__(info=describe(loaded, 0.0))
        self.engine = loaded.engine
        self.bridge = AsyncioBridge(loaded.engine, loaded.faults)
        self.thread = threading.Thread(target=self.bridge.run, daemon=True)
        self.thread.start()
        self.num_computed = self.num_requests = 0
        launch = self.engine.runner.launch

        def counted(plan):
            self.num_computed += plan.num_tokens
            return launch(plan)

        self.engine.runner.launch = counted

    def submit(self, request):
        self.num_requests += 1
        return self.bridge.submit(request).stream

    def abort(self, request):
        self.bridge.abort(request)

    def stop(self, request, stop_string):
        self.bridge.stop(request, stop_string)

    def begin_anew(self):
        """Forget what was computed, and count from zero."""
        assert not self.engine.has_work
        self.engine.forget()
        self.num_computed = self.num_requests = 0

    def end(self):
        self.bridge.loop.shutdown()
        self.thread.join()


@dataclass
class Served:
    """A server around an engine of this process."""

    server: object
    client: LoadedClient

    def ask(self, prompt, status=200, **fields):
        response = self.server.post("/v1/completions", {**ASK, "prompt": prompt, **fields})
        assert response.status_code == status, response.text
        return response.json()

    def one_by_one(self, prompts, **fields):
        answers = []
        for index, prompt in enumerate(prompts):
            self.client.begin_anew()
            (choice,) = self.ask(prompt, **fields)["choices"]
            answers.append({**choice, "index": index})
        self.client.begin_anew()
        return answers


@contextlib.contextmanager
def served(model, *, limits=None, **options):
    client = LoadedClient(model, **options)
    try:
        with thread_server(client=client, limits=limits or Limits()) as server:
            yield Served(server, client)
            assert not client.engine.has_work
    finally:
        client.end()


@pytest.fixture(scope="module")
def tiny():
    with served(DATA / "llama-tiny.gguf") as running:
        yield running


@pytest.fixture(autouse=True)
def anew(request):
    if "tiny" in request.fixturenames:
        request.getfixturevalue("tiny").client.begin_anew()


def assert_equal(choices, expected):
    """Equal up to the rounding of log-probabilities."""
    assert len(choices) == len(expected)
    for choice, wanted in zip(choices, expected, strict=True):
        lists, wanted_lists = choice["logprobs"], wanted["logprobs"]
        assert {**choice, "logprobs": None} == {**wanted, "logprobs": None}
        if wanted_lists is None:
            assert lists is None
            continue
        for name in ("tokens", "text_offset"):
            assert lists[name] == wanted_lists[name]
        assert lists["token_logprobs"] == pytest.approx(
            wanted_lists["token_logprobs"], abs=TOLERANCE
        )
        for top, wanted_top in zip(
            lists["top_logprobs"], wanted_lists["top_logprobs"], strict=True
        ):
            assert list(top) == list(wanted_top)
            assert top == pytest.approx(wanted_top, abs=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_a_list_has_the_answers_of_one_by_one(name):
    """Each family; Gemma's windows are shorter than the shared start."""
    with served(DATA / f"{name}.gguf") as running:
        for fields in ({}, {"logprobs": 0}, {"logprobs": None}, {"return_token_ids": True}):
            expected = running.one_by_one(LIST, **fields)
            whole = running.ask(LIST, **fields)
            assert running.client.num_requests == 1
            assert_equal(whole["choices"], expected)
        assert len({choice["text"] for choice in expected}) > 3


SAMPLED = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 5, "seed": 4},
    {"temperature": 1.5, "top_p": 0.6, "seed": 5},
    {"temperature": 1.5, "min_p": 0.1, "seed": -6},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "seed": 7},
]


@pytest.mark.parametrize("fields", SAMPLED, ids=lambda fields: " ".join(fields))
def test_sampled_tokens_are_those_of_one_by_one(tiny, fields):
    expected = tiny.one_by_one(LIST, **fields)
    whole = tiny.ask(LIST, **fields)
    assert tiny.client.num_requests == 1
    assert_equal(whole["choices"], expected)
    best = [max(c["logprobs"]["top_logprobs"][0].values()) for c in expected]
    chosen = [c["logprobs"]["token_logprobs"][0] for c in expected]
    assert best != chosen, "nothing was sampled"


def test_ends_of_answers(tiny):
    """Stop tokens and stop strings of some answers."""
    plain = tiny.ask(LIST, return_token_ids=True)["choices"]
    ids = [choice["token_ids"][0] for choice in plain]
    stop_id = next(i for i in ids if ids.count(i) < len(ids))
    text = next(choice["text"] for choice in plain if choice["text"].strip())
    for fields in ({"stop_token_ids": [stop_id]}, {"stop": [text]}):
        expected = tiny.one_by_one(LIST, **fields)
        assert_equal(tiny.ask(LIST, **fields)["choices"], expected)
        assert tiny.client.num_requests == 1
        assert {choice["finish_reason"] for choice in expected} == {"stop", "length"}


FALLBACKS = [
    {"max_tokens": 2},
    {"n": 2, "temperature": 1.0, "seed": 1},
    {"echo": True},
    {"prompt_logprobs": 1},
    {"logit_bias": {"97": 100}},
    {"presence_penalty": 1.0},
    {"repetition_penalty": 1.5},
    {"allowed_token_ids": [97, 98]},
    {"bad_words": ["a"]},
    {"min_tokens": 1},
    {"guided_choice": ["yes", "no"]},
]


@pytest.mark.parametrize("fields", FALLBACKS, ids=lambda fields: " ".join(fields))
def test_what_no_item_can_do_runs_one_by_one(tiny, fields):
    expected = []
    for prompt in LIST[:4]:
        tiny.client.begin_anew()
        for choice in tiny.ask(prompt, **fields)["choices"]:
            expected.append({**choice, "index": len(expected)})
    tiny.client.begin_anew()
    whole = tiny.ask(LIST[:4], **fields)
    assert tiny.client.num_requests == 4 * fields.get("n", 1)
    assert [c["text"] for c in whole["choices"]] == [c["text"] for c in expected]
    assert [c["finish_reason"] for c in whole["choices"]] == [c["finish_reason"] for c in expected]


ODD_LISTS = {
    "one a start of the others": [START, [*START, 5], [*START, 5, 6, 7]],
    "duplicates": [[*START, 5], [*START, 6], [*START, 5]],
    "all the same": [START, START],
    "one token each": [[5], [6], [5]],
    "nothing shared": [[1, *START], [2, *START], [3, *START]],
    "a little shared": [[*START[:5], 1], [*START[:5], 2]],
    "an outlier": [[9] * 20, *LIST[:3]],
    "two families": [*LIST[:2], *([9, *prompt] for prompt in LIST[2:5]), LIST[5]],
    "an item longer than a step": [*LIST[:3], [*START, *[8] * 300]],
    "one prompt": LIST[:1],
}


@pytest.mark.parametrize("prompts", ODD_LISTS.values(), ids=ODD_LISTS)
def test_lists_of_all_kinds(tiny, prompts):
    expected = tiny.one_by_one(prompts)
    whole = tiny.ask(prompts)
    assert_equal(whole["choices"], expected)
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_texts(tiny):
    start = "the thin man ran in 2024 and they ran and ran on "
    prompts = [start + word for word in ("x", "the man", "in 2024 é", "😀", "")]
    expected = tiny.one_by_one(prompts)
    assert_equal(tiny.ask(prompts)["choices"], expected)
    assert tiny.client.num_requests == 1


def test_a_shared_start_is_computed_once(tmp_path):
    """64 prompts that share 2,000 tokens."""
    start = [(11 * i) % 250 for i in range(2000)]
    prompts = [[*start, i, *[(i * j) % 250 for j in range(3 + i % 9)]] for i in range(64)]
    own = sum(map(len, prompts)) - 64 * len(start)
    model = tiny_model(tmp_path / "long.gguf", context=4096)
    with served(model) as running:
        usage = running.ask(prompts)["usage"]
        assert running.client.num_computed == len(start) + own
        assert usage["prompt_tokens"] == 64 * len(start) + own
        assert usage["prompt_tokens_details"]["cached_tokens"] == 63 * len(start)
        running.ask(prompts)
        again = running.client.num_computed - len(start) - own
        assert again < own + 64, "the start was not found in the prefix cache"
        running.client.begin_anew()
        usage = running.ask(prompts, logit_bias={"97": 1})["usage"]  # one by one
        size = running.client.info.block_size
        assert running.client.num_computed < len(start) + own + 65 * size
        assert running.client.num_computed == (
            usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        )


def test_in_16_bits_a_list_shares_its_start_by_the_prefix_cache():
    """Packed items would be rounded in another order than prompts of their own."""
    with served(DATA / "llama-tiny.gguf", dtype="bfloat16") as running:
        expected = running.one_by_one(LIST)
        whole = running.ask(LIST)
        assert running.client.num_requests == len(LIST)
        size = running.client.info.block_size
        cached = len(START) // size * size * (len(LIST) - 1)
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert [c["text"] for c in whole["choices"]] == [c["text"] for c in expected]


def test_families_of_prompts_share_their_own_starts(tiny):
    """Two queries after one instruction, each with documents."""
    starts = [[*START[:64], *[50 + query] * 100] for query in range(2)]
    prompts = [[*starts[n % 2], 5, n] for n in range(10)]
    expected = tiny.one_by_one(prompts)
    whole = tiny.ask(prompts)
    assert tiny.client.num_requests == 2
    assert tiny.client.num_computed <= sum(map(len, starts)) + 2 * len(prompts)
    assert_equal(whole["choices"], expected)


def test_a_list_counts_as_few_requests_for_the_queue():
    """12 prompts take one place."""
    with served(DATA / "llama-tiny.gguf", limits=Limits(max_waiting_requests=12)) as running:
        running.client.max_waiting = 1
        assert len(running.ask(LIST)["choices"]) == 12


def test_lists_over_the_limits(tiny):
    assert tiny.ask([[5]] * 257, 400)["error"]["param"] == "prompt"
    long = [*START, *[5] * tiny.client.info.max_model_len]
    assert tiny.ask([LIST[0], long], 400)["error"]["code"] == "context_length_exceeded"
    assert tiny.client.num_requests == 0


def test_a_stream_of_a_list_has_the_same_answers(tiny):
    expected = tiny.ask(LIST)["choices"]
    tiny.client.begin_anew()
    body = {**ASK, "prompt": LIST, "stream": True, "return_progress": True}
    events = read_events(tiny.server.post("/v1/completions", body).content)
    chunks = [value for _, value in events if value != "[DONE]"]
    answers = {c["choices"][0]["index"]: c["choices"][0] for c in chunks}
    assert_equal([answers[i] for i in range(len(LIST))], expected)
    last = {
        c["choices"][0]["index"]: c["prompt_progress"] for c in chunks if "prompt_progress" in c
    }
    assert [last[i]["processed"] for i in range(len(LIST))] == [len(prompt) for prompt in LIST]
    assert [last[i]["cache"] for i in range(len(LIST))] == [0, *[len(START)] * (len(LIST) - 1)]


def test_a_list_that_ends_early(monkeypatch):
    """NaN after one item: the list fails as it does one by one."""
    with served(DATA / "llama-tiny.gguf") as running:
        sampler = running.client.engine.runner.sampler
        sample = sampler.sample

        def spoilt(logits, *arguments):
            logits[3] = float("nan")
            return sample(logits, *arguments)

        monkeypatch.setattr(sampler, "sample", spoilt)
        assert running.ask(LIST, 500)["error"]["code"] == "nonfinite_logits"
        monkeypatch.setattr(sampler, "sample", sample)
        assert len(running.ask(LIST)["choices"]) == len(LIST)


def test_a_client_that_leaves_ends_the_shared_request():
    body = {**ASK, "prompt": LIST[:3], "stream": True}

    class Waiting(FakeClient):
        async def _play(self, request, stream):
            await asyncio.sleep(60)

    client = Waiting()
    with thread_server(client=client) as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            assert response.status_code == 200
            assert len(client.submitted) == 1
        wait_for(lambda: client.aborted)
    assert client.aborted == client.submitted


@pytest.mark.usefixtures("forked_engines")
def test_the_official_client_with_an_engine_process():
    with (
        thread_server(client=make_client(max_num_batched_tokens=256)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        fields = {"model": "tiny", "max_tokens": 1, "logprobs": 5, "temperature": 0}
        whole = client.completions.create(prompt=LIST, **fields)
        details = whole.usage.prompt_tokens_details
        assert details.cached_tokens == len(START) * (len(LIST) - 1)
        for choice, prompt in zip(whole.choices, LIST, strict=True):
            (alone,) = client.completions.create(prompt=prompt, **fields).choices
            assert choice.text == alone.text
            for top, wanted in zip(
                choice.logprobs.top_logprobs, alone.logprobs.top_logprobs, strict=True
            ):
                assert top == pytest.approx(wanted, abs=TOLERANCE)
