"""Names of llama-server, vLLM and others: honoured, refused by name, or named as ignored."""

import json
import re
from pathlib import Path

import pytest

from tests.serve.fake_client import FakeClient, ask, fake_info
from tiercel.params import SamplingDefaults, SamplingParams, StructuredOutputs
from tiercel.serve.api.anthropic.messages_types import MessagesRequest
from tiercel.serve.api.compat_fields import IDLE, IGNORED, NEUTRAL
from tiercel.serve.http.ignored_fields import MAX_NAMES

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "a"},
    "/v1/responses": {"model": "tiny", "input": "a"},
}
BOUNDS = {"/v1/chat/completions": None, "/v1/completions": 16, "/v1/responses": None}
DOCS = (Path(__file__).parents[3] / "docs/http_api.md").read_text()
# What llama-server's page and its older clients send with every request.
LLAMA_SERVER = {
    "stream": False, "cache_prompt": True, "samplers": None, "temperature": 0.8, "top_k": 40,
    "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0,
    "xtc_threshold": 0.1, "dynatemp_range": 0, "dynatemp_exponent": 1.0, "repeat_last_n": 64,
    "repeat_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0, "dry_multiplier": 0.0,
    "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "mirostat": 0,
    "mirostat_tau": 5, "mirostat_eta": 0.1, "min_keep": 0, "n_probs": 0, "n_keep": 0,
    "id_slot": -1, "n_predict": -1, "grammar": "", "reasoning_format": "auto",
    "timings_per_token": True, "speculative.n_max": 16,
}  # fmt: skip


def post(path, fields, client=None, **settings):
    return ask(("POST", path, {"json": {**BODIES[path], **fields}}), client=client, **settings)[0]


def params_of(path, fields, **settings):
    client = FakeClient()
    response = post(path, fields, client, **settings)
    assert response.status_code == 200, response.text
    return client.submitted[0].params


def refusal(path, fields):
    client = FakeClient()
    response = post(path, fields, client)
    assert response.status_code == 400, response.text
    assert client.submitted == []
    return response.json()["error"]


@pytest.mark.parametrize("path", BODIES)
def test_the_fields_of_llama_server_are_all_known(path):
    client = FakeClient()
    response = post(path, LLAMA_SERVER, client, is_strict=True)
    assert response.status_code == 200, response.text
    assert response.headers["x-tiercel-ignored"] == (
        "cache_prompt, id_slot, n_keep, timings_per_token, speculative.n_max"
    )
    expected = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, max_tokens=None)
    assert client.submitted[0].params == expected


@pytest.mark.parametrize("path", BODIES)
def test_fields_without_effect_here_are_refused_unless_neutral(path):
    def call(name, value):
        return ("POST", path, {"json": {**BODIES[path], name: value}})

    sound = []
    for name, own in NEUTRAL.items():
        floats = [float(v) for v in own if isinstance(v, int) and not isinstance(v, bool)]
        sound += [(name, value) for value in (None, *own, *floats)]
    answers = ask(*(call(*field) for field in sound), is_strict=True)
    for field, response in zip(sound, answers, strict=True):
        assert response.status_code == 200, (field, response.text)
        assert "x-tiercel-ignored" not in response.headers, field
    client = FakeClient()
    refused = ask(*(call(name, 0.25) for name in NEUTRAL), client=client)
    for name, response in zip(NEUTRAL, refused, strict=True):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert not client.submitted


def test_numbers_and_booleans_are_not_each_other():
    path = "/v1/completions"
    assert refusal(path, {"dry_multiplier": False})["param"] == "dry_multiplier"
    assert refusal(path, {"use_beam_search": 0})["param"] == "use_beam_search"
    assert refusal(path, {"typical_p": True})["param"] == "typical_p"


def test_a_refusal_says_what_would_be_right():
    messages = {
        "dry_multiplier": (0.8, "dry_multiplier is 0.8, which is not supported here; leave it out"
                           " or set it to 0."),
        "samplers": (["top_k"], "samplers is not supported: the order is penalties, temperature,"
                     " top_k, top_p, min_p."),
        "grammar": ('root ::= "x"', "grammar holds GBNF, which is not supported; write Lark into"
                    " structured_outputs.grammar."),
    }  # fmt: skip
    for name, (value, message) in messages.items():
        assert refusal("/v1/completions", {name: value})["message"] == message


@pytest.mark.parametrize("path", BODIES)
def test_ignored_fields_are_named_in_a_header(path):
    fields = dict.fromkeys(IGNORED, 1) | dict.fromkeys(IDLE, 5)
    response = post(path, fields, is_strict=True)
    assert response.status_code == 200, response.text
    assert response.headers["x-tiercel-ignored"].split(", ") == list(IGNORED)
    assert "x-tiercel-ignored" not in post(path, {"keep_alive": None, "dry_base": 2}).headers
    assert post(path, {"stream": True, "rid": "x"}).headers["x-tiercel-ignored"] == "rid"


def test_unknown_fields_are_named_too_as_far_as_a_header_can():
    fields = {"no_such": 1, "x\r\nset-cookie: a": 1, "é": 1, "": 1, "a b": 1, "n" * 101: 1}
    response = post("/v1/completions", fields)
    assert response.headers["x-tiercel-ignored"] == "no_such"
    assert "set-cookie" not in response.headers
    many = {f"f{number:03}": 1 for number in range(MAX_NAMES + 5)}
    names = post("/v1/completions", many).headers["x-tiercel-ignored"].split(", ")
    assert names == [*list(many)[:MAX_NAMES], "..."]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["n_predict", "max_tokens", "max_new_tokens"])
def test_minus_one_token_is_no_bound(name, path):
    defaults = {"sampling": SamplingDefaults(max_tokens=5)}
    assert params_of(path, {name: 7}, **defaults).max_tokens == 7
    assert params_of(path, {name: -1}, **defaults).max_tokens is None
    assert params_of(path, {}, **defaults).max_tokens == 5
    assert params_of(path, {name: None}).max_tokens == BOUNDS[path]
    for value in (0, -2):
        assert refusal(path, {name: value})["param"] in (
            name,
            "max_tokens",
            "max_output_tokens",
        )


def test_no_bound_in_the_newer_fields():
    assert params_of("/v1/chat/completions", {"max_completion_tokens": -1}).max_tokens is None
    client = FakeClient()
    whole = post("/v1/responses", {"max_output_tokens": -1}, client).json()
    assert whole["max_output_tokens"] is client.submitted[0].params.max_tokens is None


@pytest.mark.parametrize("path", BODIES)
def test_other_names_mean_the_same(path):
    assert params_of(path, {"repeat_penalty": 1.3}).repetition_penalty == 1.3
    both = {"repeat_penalty": 1.3, "repetition_penalty": 1.3}
    assert params_of(path, both).repetition_penalty == 1.3
    assert refusal(path, both | {"repetition_penalty": 1.2})["param"] == "repeat_penalty"
    assert refusal(path, {"repeat_penalty": 0})["param"] == "repeat_penalty"
    assert params_of(path, {"stop": "x", "no_stop_trim": True}).include_stop_str_in_output
    assert params_of(path, {"n_probs": 2}).logprobs == 2
    assert params_of(path, {"n_probs": 0}).logprobs is None


@pytest.mark.parametrize("name", ["repeat_last_n", "penalty_last_n"])
@pytest.mark.parametrize("path", BODIES)
def test_a_window_of_the_penalties_is_everything(path, name):
    for penalty in ("repeat_penalty", "frequency_penalty", "presence_penalty"):
        assert params_of(path, {penalty: 1.1, name: -1}).has_penalties
        assert refusal(path, {penalty: 1.1, name: 64})["param"] == name
    client = FakeClient(info=fake_info(sampling_defaults=SamplingDefaults(repetition_penalty=1.1)))
    assert post(path, {name: 64}, client).json()["error"]["param"] == name
    assert not params_of(path, {name: 64}).has_penalties


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_forms_under_other_names(path):
    schema = {"type": "integer"}
    assert params_of(path, {"json_schema": schema}).structured_outputs == StructuredOutputs(schema)
    text = json.dumps(schema)
    assert params_of(path, {"json_schema": text}).structured_outputs == StructuredOutputs(text)
    assert params_of(path, {"regex": "a+"}).structured_outputs == StructuredOutputs(regex="a+")
    assert refusal(path, {"json_schema": {"type": "no"}})["param"] == "json_schema"
    assert refusal(path, {"regex": "a+", "json_schema": schema})["param"] == "regex"


@pytest.mark.parametrize(
    "fields",
    [{"guided_json": {}}, {"json_schema": {}}, {"regex": "a"}, {"guided_choice": ["a"]},
     {"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}},
     {"n": 2}, {"logprobs": True}, {"no_such_field": 1}],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_responses_have_elsewhere_is_refused_by_name(fields):
    name = next(iter(fields))
    if name == "no_such_field":
        assert post("/v1/responses", fields).headers["x-tiercel-ignored"] == name
    else:
        assert refusal("/v1/responses", fields)["param"] == name


def test_what_saves_time_or_tone_is_ignored():
    fields = {"store": True, "verbosity": "high", "prediction": {"type": "content", "content": "x"}}
    response = post("/v1/chat/completions", fields)
    assert response.status_code == 200
    assert response.headers["x-tiercel-ignored"] == "store, prediction, verbosity"


def test_the_page_lists_every_name():
    words = set(re.findall(r"[a-z_0-9.]*[a-z_0-9]", DOCS))
    assert not {*NEUTRAL, *IDLE, *IGNORED} - words


def test_no_name_is_in_two_tables():
    names = [*NEUTRAL, *IDLE, *IGNORED]
    assert len(set(names)) == len(names)
    assert not set(names) & set(MessagesRequest.__struct_fields__)
