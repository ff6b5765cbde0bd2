"""`/v1/completions`: prompts of every kind, echo, log-probabilities as lm-eval reads them."""

import threading
from operator import itemgetter

import pytest

from tests.serve.events import read_events, says
from tests.serve.fake_client import FakeClient, ask, fake_tokenizer
from tests.serve.generation.test_generation import answering
from tiercel.request.request import TokenLogprobs, TokenUpdate
from tiercel.serve.api import streaming_response
from tiercel.serve.api.openai import completions as openai_completions

PATH = "/v1/completions"
RAW = {"model": "tiny", "prompt": "ab"}
EOS = fake_tokenizer().eos_id


class ReadingClient(FakeClient):
    """Reads prompts: token i has the log-probability -i/1000; 97 (`a`) is always the best."""

    def submit(self, request):
        stream = super().submit(request)
        if request.params.prompt_logprobs is not None:
            stream.add_prompt_logprobs([scored(i) for i in request.prompt_token_ids[1:]])
        return stream


def scored(token_id):
    best = (97, -0.097)
    own = (token_id, -token_id / 1000)
    return TokenLogprobs(token_id, own[1], (best,) if token_id == 97 else (best, own))


def reading(*ids, reason="length"):
    """Answers with these ids; none: the prompt is only read."""
    client = ReadingClient()

    def script(request):
        entries = tuple(scored(i) for i in ids) if request.params.logprobs is not None else ()
        return [TokenUpdate(ids, entries, reason, None)]

    client.script = script
    return client


def post(body, client=None, **settings):
    return ask(("POST", PATH, {"json": {**RAW, **body}}), client=client, **settings)[0]


def refusal(body, **settings):
    client = FakeClient()
    response = post(body, client, **settings)
    assert response.status_code == 400, response.text
    assert client.submitted == []
    return response.json()["error"]


def read_stream(data):
    """Choices by index, each the pieces of its fields joined; the usage; all chunks."""
    events = read_events(data)
    assert events[-1] == ("", "[DONE]")
    chunks = [value for _, value in events[:-1]]
    choices = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined = choices.setdefault(
                choice["index"], {"text": "", "logprobs": None, "finish_reason": None}
            )
            joined["text"] += choice["text"]
            if choice["logprobs"] is not None:
                joined["logprobs"] = joined["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    joined["logprobs"][name] += values
            if choice["finish_reason"] is not None:
                assert joined["finish_reason"] is None
                joined["finish_reason"] = choice["finish_reason"]
    usage = chunks[-1].get("usage") if not chunks[-1]["choices"] else None
    return choices, usage, chunks


# Prompts


def test_prompts_of_every_kind():
    for prompt, ids in (
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ):
        client = FakeClient()
        assert post({"prompt": prompt}, client).status_code == 200
        texts = isinstance(prompt, str) or isinstance(prompt[0], str)
        bos = [269] if texts else []  # a text gets its BOS, ids stay as they are
        assert [r.prompt_token_ids for r in client.submitted] == [[*bos, *i] for i in ids]


def test_special_tokens_in_a_raw_prompt_are_parsed_unless_switched_off():
    for parse, count in ((True, 1), (False, 0)):
        client = FakeClient()
        post({"prompt": "a<|im_end|>"}, client, parse_special=parse)
        assert client.submitted[0].prompt_token_ids.count(EOS) == count


WRONG_PROMPTS = [
    [], [[]], ["a", [97]], [97, "a"], ["a", 97], [[97], "a"], [-1], [1.5], [True], [None], [[-1]],
    [[1.5]], [[True]], [["a"]], [[[97]]], 5, None, {}, [272], [[97], [272]], [2**31], [2**64],
]  # fmt: skip


@pytest.mark.reliability
@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=str)
def test_wrong_prompts_are_refused(prompt):
    """A19."""
    assert refusal({"prompt": prompt})["param"].startswith("prompt")


def test_choices_are_numbered_prompt_by_prompt():
    client = FakeClient()
    client.script = lambda r: says(f"{r.prompt_token_ids[-1]}.{r.stream}")(r)
    body = {"prompt": [[97], [98]], "n": 2, "max_tokens": 50}
    choices = post(body, client).json()["choices"]
    assert [c["text"] for c in choices] == ["97.0", "97.1", "98.0", "98.1"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    client = FakeClient()
    client.script = lambda r: says(f"{r.prompt_token_ids[-1]}.{r.stream}")(r)
    streamed, _, _ = read_stream(post({**body, "stream": True}, client).content)
    assert [streamed[i]["text"] for i in range(4)] == [c["text"] for c in choices]


def test_usage_counts_a_prompt_once():
    usage = post({"prompt": [[97], [98, 99]], "n": 3}, reading(120)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 6)


# Fields


def test_the_default_length_is_16():
    client = FakeClient()
    post({}, client)
    assert client.submitted[0].max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"stream_options": {}}, "stream_options"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_refusals_name_the_field(fields, param):
    """A27."""
    assert refusal(fields)["param"] == param


def test_best_of_may_say_what_n_says():
    assert post({"best_of": 2, "n": 2}).status_code == 200


def test_a_text_may_go_without_bos():
    prompts = {}
    for adds in (None, True, False):
        client = FakeClient()
        assert post({"prompt": "a", "add_special_tokens": adds}, client).status_code == 200
        prompts[adds] = client.submitted[0].prompt_token_ids
    assert prompts == {None: [269, 97], True: [269, 97], False: [97]}


def test_a_suffix_needs_the_marks_of_a_model_that_fills_in(monkeypatch):
    marks = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    monkeypatch.setattr(openai_completions, "FIM_MARKS", (("<no such>",) * 3, marks))
    client = FakeClient()
    assert post({"prompt": "a", "suffix": "b"}, client).status_code == 200
    assert client.submitted[0].prompt_token_ids == [269, 270, 97, 271, 98, 269]
    assert refusal({"prompt": [97], "suffix": "b"})["param"] == "suffix"
    assert refusal({"suffix": "b", "echo": True})["param"] == "suffix"


def test_forms_reach_the_engine():
    for fields in (
        {"guided_choice": ["a", "b"]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": {"type": "integer"}}},
    ):
        client = FakeClient()
        assert post(fields, client).status_code == 200
        assert client.submitted[0].grammar is not None
    assert refusal({"guided_regex": "(a"})["param"] == "guided_regex"


# Log-probabilities and echo


def test_log_probabilities_of_the_answer():
    lists = post({"logprobs": 2}, reading(120, 97, EOS, reason="stop")).json()["choices"][0][
        "logprobs"
    ]
    assert lists == {
        "tokens": ["x", "a", fake_tokenizer().token_text(EOS)],
        "token_logprobs": [-0.12, -0.097, -0.271],
        "top_logprobs": [
            {"a": -0.097, "x": -0.12},
            {"a": -0.097},
            {"a": -0.097, fake_tokenizer().token_text(EOS): -0.271},
        ],
        "text_offset": [0, 1, 2],
    }


def test_logprobs_0_shows_the_token_alone():
    lists = post({"logprobs": 0}, reading(120)).json()["choices"][0]["logprobs"]
    assert lists["top_logprobs"] == [{"x": -0.12}]


def test_of_tokens_with_one_text_the_most_likely_counts():
    client = FakeClient()
    # 195 and 240 are first bytes of characters: alone, both show as U+FFFD.
    entry = TokenLogprobs(240, -2.0, ((195, -1.0), (240, -2.0)))
    client.script = lambda request: [TokenUpdate((240,), (entry,), "length", None)]
    lists = post({"logprobs": 2}, client).json()["choices"][0]["logprobs"]
    assert lists["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -1.0}]
    assert lists["token_logprobs"] == [-2.0]  # so it does not count as the best


def test_infinite_log_probabilities_are_numbers():
    client = FakeClient()
    entry = TokenLogprobs(120, float("-inf"), ((120, float("-inf")),))
    client.script = lambda request: [TokenUpdate((120,), (entry,), "length", None)]
    lists = post({"logprobs": 1}, client).json()["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == [-9999.0]
    assert lists["top_logprobs"] == [{"x": -9999.0}]


ECHOES = [("ab", "ab"), ([97, 98], "ab"), ("é😀", "é😀"), ([97, EOS, 98], "ab")]


@pytest.mark.parametrize(("prompt", "text"), ECHOES, ids=str)
@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_puts_the_prompt_in_front(prompt, text, is_stream):
    body = {"prompt": prompt, "echo": True, "stream": is_stream}
    response = post(body, reading(120, 121))
    choice = read_stream(response.content)[0][0] if is_stream else response.json()["choices"][0]
    assert choice["text"] == text + "xy"
    assert choice["logprobs"] is None


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_log_probabilities(is_stream, n, max_tokens):
    ids = [104, 97, 116]
    client = reading(*[120, 121][:max_tokens])
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": n}
    response = post({**body, "stream": is_stream}, client)
    assert response.status_code == 200, response.text
    if is_stream:
        choices = read_stream(response.content)[0]
    else:
        choices = {choice["index"]: choice for choice in response.json()["choices"]}
    assert sorted(choices) == list(range(n))
    for choice in choices.values():
        lists = choice["logprobs"]
        assert choice["text"] == "hat" + "xy"[:max_tokens]
        assert lists["tokens"] == list("hat" + "xy"[:max_tokens])
        assert lists["text_offset"] == list(range(3 + max_tokens))
        assert lists["token_logprobs"][:3] == [None, -0.097, -0.116]
        assert lists["top_logprobs"][:3] == [None, {"a": -0.097}, {"a": -0.097, "t": -0.116}]
        assert choice["finish_reason"] == "length"
    assert client.submitted[0].max_tokens == max_tokens


@pytest.mark.parametrize("front", ["", "BOS"])
def test_offsets_of_an_echoed_text_count_the_names_of_its_control_tokens(front):
    tokenizer = fake_tokenizer()
    bos, eos = tokenizer.token_text(tokenizer.bos_id), tokenizer.token_text(EOS)
    prompt = f"{bos if front else ''}x{eos}y{eos}"
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2}
    choice = post(body, reading(120, 121)).json()["choices"][0]
    lists = choice["logprobs"]
    assert choice["text"] == f"{prompt}xy"
    assert lists["tokens"] == [bos, "x", eos, "y", eos, "x", "y"]
    first = len(bos) if front else 0
    assert lists["text_offset"][:2] == [0, first]
    for token, place in zip(lists["tokens"][1:], lists["text_offset"][1:], strict=True):
        assert choice["text"][place:].startswith(token)


@pytest.mark.reliability
def test_echo_of_half_characters():
    """A29: ids that are half of a character, lists of equal lengths."""
    ids = [240, 159, 97, 195]
    body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    choice = post(body, reading()).json()["choices"][0]
    lists = choice["logprobs"]
    assert {len(values) for values in lists.values()} == {4}
    assert choice["text"] == "\N{REPLACEMENT CHARACTER}a\N{REPLACEMENT CHARACTER}"
    # The first two are one broken character, which shows when the `a` ends it.
    assert lists["text_offset"] == [0, 0, 0, 2]


def test_prompt_log_probabilities_and_token_ids():
    body = {"prompt": [[104, 97], [120]], "prompt_logprobs": 1, "return_token_ids": True}
    choices = post(body, reading(121)).json()["choices"]
    assert choices[0]["prompt_logprobs"][0] is None
    assert choices[0]["prompt_logprobs"][1]["97"]["logprob"] == -0.097
    assert [len(c["prompt_logprobs"]) for c in choices] == [2, 1]
    assert [c["prompt_token_ids"] for c in choices] == [[104, 97], [120]]
    assert [c["token_ids"] for c in choices] == [[121], [121]]
    assert choices[0]["logprobs"] is None


def test_streamed_log_probabilities_are_those_of_the_plain_answer():
    body = {"logprobs": 1, "stream_options": {"include_usage": True}, "stream": True}
    streamed, usage, chunks = read_stream(post(body, answering("é a", group=1)).content)
    plain = post({"logprobs": 1}, answering("é a", group=1)).json()
    assert streamed[0]["logprobs"] == plain["choices"][0]["logprobs"]
    assert streamed[0]["text"] == plain["choices"][0]["text"] == "é a"
    assert usage == plain["usage"]
    assert len(chunks) == usage["completion_tokens"] + 1  # held back text still shows its tokens


@pytest.mark.parametrize("is_stream", [False, True])
def test_many_log_probabilities_are_written_off_the_loop(is_stream, monkeypatch):
    monkeypatch.setattr(streaming_response, "MAX_LOOP_LOGPROBS", 3)
    threads = set()
    original = openai_completions.completion_top

    def watched(*arguments):
        threads.add(threading.current_thread().name)
        return original(*arguments)

    monkeypatch.setattr(openai_completions, "completion_top", watched)
    body = {"prompt": [104, 97, 116], "echo": True, "logprobs": 1, "max_tokens": 2}
    response = post({**body, "stream": is_stream}, reading(120, 121))
    choice = read_stream(response.content)[0][0] if is_stream else response.json()["choices"][0]
    assert choice["logprobs"]["tokens"] == list("hatxy")
    assert all(name.startswith("tiercel-serve") for name in threads)


# lm-eval


def parse_as_lm_eval(outputs, context_lengths):
    """What lm-eval 0.4.13 makes of an answer: sums and whether the continuation is greedy.

    Written from the behaviour of its `local-completions` model.
    """
    results = []
    choices = sorted(outputs["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, context_lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        best = choice["logprobs"]["top_logprobs"][length:-1]
        pairs = zip(values, best, strict=True)
        results.append((sum(values), all(value == max(top.values()) for value, top in pairs)))
    return results


@pytest.mark.parametrize("generated", [(120,), (EOS,)], ids=["a token", "the end"])
def test_the_request_of_lm_eval(generated):
    """Exactly one generated token follows, even if it is the end of the text."""
    body = {
        "prompt": [[104, 105, 97, 97], [104, 97, 98]],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 0,
        "seed": 1234,
    }
    reason = "stop" if generated == (EOS,) else "length"
    whole = post(body, reading(*generated, reason=reason)).json()
    assert [len(c["logprobs"]["tokens"]) for c in whole["choices"]] == [5, 4]
    sums = parse_as_lm_eval(whole, [2, 1])
    assert sums == [(-0.097 * 2, True), (-0.097 - 0.098, False)]
