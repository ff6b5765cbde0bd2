"""`/v1/chat/completions`: every field is honoured or refused by name, plain and streamed alike."""

from dataclasses import replace

import pytest

from tests.serve.events import read_chat, read_events, says
from tests.serve.fake_client import (
    CHAT_TEMPLATE,
    FakeClient,
    ask,
    fake_info,
    fake_tokenizer,
)
from tiercel.params import Limits, SamplingDefaults, SamplingParams
from tiercel.request.request import TokenLogprobs, TokenUpdate

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CHAT = {"model": "tiny", "messages": [USER]}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "tin"}
ARGUMENTS = '{"word": "a \\"b\\"\\n{c} </tool_call> \\u00e9 é"}'
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking }}"
THINKING += "{# reads until </think> #}"


def post(body, client=None, **settings):
    return ask(("POST", PATH, {"json": body}), client=client, **settings)[0]


def answering(text, *, template=CHAT_TEMPLATE, **options):
    client = roomy(template)
    client.script = says(text, **options)
    return client


def roomy(template=CHAT_TEMPLATE):
    """A client with room for the text that tells of tools."""
    return FakeClient(info=fake_info(chat_template=template, max_model_len=1024))


def prompt_of(client):
    ids = client.submitted[0].prompt_token_ids
    return fake_tokenizer().decode(ids, skip_special_tokens=False)


def refusal(body, status=400, **settings):
    """The error of a request that must be refused before the engine hears of it."""
    client = FakeClient()
    response = post(body, client, **settings)
    assert response.status_code == status, response.text
    assert client.submitted == []
    return response.json()["error"]


# Fields


def test_every_sampling_field_reaches_the_engine():
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": -(2**63),
        "stop": ["x", "y"],
        "stop_token_ids": [97, 98],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [97, 98, 99],
        "bad_words": ["no"],
        "logit_bias": {"97": -100, "98": 0.5},
        "prompt_logprobs": 3,
        "num_spec_tokens": 2,
    }
    client = FakeClient()
    client.script = lambda request: [TokenUpdate((97, 98), (), "length", None)]
    body = {**CHAT, **fields, "max_tokens": 9}
    assert post(body, client).status_code == 200
    params = client.submitted[0].params
    for name, value in fields.items():
        if name == "logit_bias":
            value = {97: -100, 98: 0.5}
        found = getattr(params, name)
        assert (list(found) if isinstance(found, tuple) else found) == value, name
    assert client.submitted[0].max_tokens == params.max_tokens == 9


def test_what_is_left_out_has_the_defaults_of_the_api():
    client = FakeClient()
    assert post(CHAT, client).status_code == 200
    request = client.submitted[0]
    assert request.params == SamplingParams(max_tokens=None)
    assert request.max_tokens == 256 - len(request.prompt_token_ids)  # the rest of the context


def test_what_is_left_out_has_the_defaults_of_the_server():
    """A value of the request wins, also one that switches something off."""
    defaults = {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "max_tokens": 5}
    defaults["repetition_penalty"] = 1.2
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "max_tokens": 9}
    given["repetition_penalty"] = 1
    client = FakeClient()
    for body in (CHAT, {**CHAT, **given}):
        assert post(body, client, sampling=SamplingDefaults(**defaults)).status_code == 200
    first, second = (request.params for request in client.submitted)
    assert first == SamplingParams(**defaults)
    assert second == SamplingParams(**given)


MODEL_DEFAULTS = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.2}
MODEL_DEFAULTS["repetition_penalty"] = 1.1


@pytest.mark.parametrize(
    ("path", "body", "max_tokens"),
    [
        ("/v1/chat/completions", {**CHAT}, None),
        ("/v1/completions", {"model": "tiny", "prompt": "a"}, 16),
        ("/v1/responses", {"model": "tiny", "input": "a"}, None),
        ("/v1/messages", {**CHAT, "max_tokens": 4}, 4),
    ],
)
def test_the_file_of_the_model_sets_defaults(path, body, max_tokens):
    """Request over option of the server over the model's file over the API."""
    client = FakeClient(info=fake_info(sampling_defaults=SamplingDefaults(**MODEL_DEFAULTS)))
    calls = [("POST", path, {"json": sent}) for sent in (body, {**body, "top_k": 0})]
    first, _ = ask(*calls, client=client)
    assert first.status_code == 200, first.text
    ask(calls[0], client=client, sampling=SamplingDefaults(temperature=0.0))
    ask(calls[0], client=client, has_model_defaults=False)
    expected = SamplingParams(**MODEL_DEFAULTS, max_tokens=max_tokens)
    assert [request.params for request in client.submitted] == [
        expected,
        replace(expected, top_k=0),
        replace(expected, temperature=0.0),
        SamplingParams(max_tokens=max_tokens),
    ]


def test_null_is_left_out():
    names = ["n", "temperature", "stop", "seed", "logit_bias", "tools", "stream", "max_tokens"]
    assert post({**CHAT, **dict.fromkeys(names)}).status_code == 200


def test_the_newer_name_of_max_tokens_wins():
    client = FakeClient()
    post({**CHAT, "max_tokens": 5, "max_completion_tokens": 7}, client)
    assert client.submitted[0].max_tokens == 7


def test_an_answer_longer_than_the_context_is_cut_to_it():
    client = FakeClient()
    assert post({**CHAT, "max_tokens": 2**31 - 1}, client).status_code == 200
    assert client.submitted[0].max_tokens == 256 - len(client.submitted[0].prompt_token_ids)


NUMBERS = {
    # field: the values of A8 that have a documented meaning
    "n": (1,),
    "max_tokens": (-1, 2**31 - 1),
    "max_completion_tokens": (-1, 2**31 - 1),
    "temperature": (0, 1.5),
    "top_p": (),
    "top_k": (-1, 0, 2**31 - 1),
    "min_p": (0,),
    "repetition_penalty": (1.5,),
    "presence_penalty": (-1, 0, 1.5),
    "frequency_penalty": (-1, 0, 1.5),
    "min_tokens": (0, 2**31 - 1),
    "seed": (-1, 0, 2**31, 2**31 - 1, 2**63 - 1),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "num_spec_tokens": (0, 2**31 - 1),
}
VALUES = [
    -1, 0, 1.5, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, "1", True, [], {},
]  # fmt: skip


@pytest.mark.reliability
@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_out_of_range_name_their_field(field):
    """A8."""
    wrong = [v for v in VALUES if not any(v == ok and type(v) is type(ok) for ok in NUMBERS[field])]
    body = {**CHAT, "logprobs": True}
    calls = [("POST", PATH, {"json": {**body, field: value}}) for value in wrong]
    for value, response in zip(wrong, ask(*calls), strict=True):
        if field == "n" and value == 1.5:
            assert response.status_code == 400
        assert response.status_code == 400, (field, value, response.text)
        assert response.json()["error"]["param"] == field
    right = NUMBERS[field]
    calls = [("POST", PATH, {"json": {**body, field: value}}) for value in right]
    for response in ask(*calls) if calls else ():
        assert response.status_code == 200, response.text


REFUSED = {
    "functions": [{"name": "x"}],
    "function_call": "auto",
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "web_search_options": {},
    "moderation": {"model": "x"},
    "typical_p": 0.5,
    "chat_template": "{{ 1 }}",
    "priority": 1,
    "use_beam_search": True,
    "truncate_prompt_tokens": 5,
    "logits_processors": ["x"],
    "documents": [{"text": "x"}],
    "grammar": 'root ::= "x"',
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_honoured_is_refused_by_name(field):
    error = refusal({**CHAT, field: REFUSED[field]})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"


def test_what_changes_nothing_is_taken():
    body = {
        **CHAT,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "service_tier": "auto",
        "modalities": ["text"],
        "typical_p": 1,
        "parallel_tool_calls": True,
        "no_such_field": {"deep": [1]},
    }
    assert post(body).status_code == 200
    assert post(body, is_strict=True).json()["error"]["param"] == "no_such_field"
    del body["no_such_field"]
    assert post(body, is_strict=True).status_code == 200


CONTRADICTIONS = [
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True}, "messages"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stop_token_ids": [272]}, "stop_token_ids"),
    ({"allowed_token_ids": [272]}, "allowed_token_ids"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
]


@pytest.mark.reliability
@pytest.mark.parametrize(("fields", "param"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_contradictions_name_a_field(fields, param):
    """A21, A22, A24, A26, A27."""
    assert refusal({**CHAT, **fields})["param"] == param


def test_a_server_may_have_lower_bounds():
    limits = Limits(max_n=2, max_logprobs=1, max_stop_strings=1, max_stop_chars=2, max_tools=0)
    for fields, param in (
        ({"n": 3}, "n"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"stop": ["a", "b"]}, "stop"),
        ({"stop": "abc"}, "stop"),
        ({"tools": [TOOL]}, "tools"),
    ):
        assert refusal({**CHAT, **fields}, limits=limits)["param"] == param


@pytest.mark.parametrize(
    ("limit", "fields", "param"),
    [
        ({"max_schema_bytes": 9}, {"guided_json": {"type": "null"}}, "guided_json"),
        ({"max_schema_bytes": 3}, {"guided_choice": ["ab", "cd"]}, "guided_choice"),
        ({"max_schema_nodes": 1}, {"guided_json": {"type": "null"}}, "guided_json"),
        ({"max_schema_nodes": 1}, {"guided_choice": ["ab", "cd"]}, "guided_choice"),
        ({"max_schema_depth": 1}, {"guided_json": {"type": "null"}}, "guided_json"),
        ({"max_regex_bytes": 1}, {"guided_regex": "ab"}, "guided_regex"),
        ({"max_regex_bytes": 1}, {"guided_json": {"pattern": "ab"}}, "guided_json"),
        ({"max_grammar_bytes": 9}, {"guided_grammar": 'start: "a"'}, "guided_grammar"),
        ({"max_schema_nodes": 1}, {"tools": [TOOL]}, "tools[0].function.parameters"),
        ({"max_schema_depth": 1}, {"tools": [TOOL]}, "tools[0].function.parameters"),
    ],
    ids=str,
)
def test_a_server_may_take_smaller_forms(limit, fields, param):
    error = refusal({**CHAT, **fields}, limits=Limits(**limit))
    assert (error["param"], error["code"]) == (param, "schema_too_complex")


def test_a_server_may_take_shorter_names_of_tools():
    error = refusal({**CHAT, "tools": [TOOL]}, limits=Limits(max_tool_name_chars=6))
    assert error["param"] == "tools[0]"
    body = {**CHAT, "tools": [TOOL], "tool_choice": "none"}
    assert post(body, roomy(), limits=Limits(max_tool_name_chars=7)).status_code == 200


@pytest.mark.reliability
def test_another_model_is_404_and_never_a_path():
    """A16."""
    names = [
        "../../etc/passwd",
        "/etc/passwd",
        "https://example.org/x",
        "a" * 10**6,
        "tiny\0",
        "%2e",
    ]
    for name in names:
        error = refusal({**CHAT, "model": name}, 404)
        assert error["code"] == "model_not_found"
        assert len(error["message"]) < 1000


# Answers


def test_the_shape_of_an_answer():
    whole = post(CHAT, answering("xy")).json()
    assert whole["id"].startswith("chatcmpl-")
    assert whole["object"] == "chat.completion"
    assert whole["model"] == "tiny"
    assert whole["system_fingerprint"].startswith("fp_")
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "xy", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert whole["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": 3,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stop_token_that_was_asked_for_is_told():
    body = {**CHAT, "stop_token_ids": [122]}
    choice = post(body, answering("xy", end_id=122)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 122)
    assert choice["message"]["content"] == "xy"


def test_usage_in_a_stream():
    body = {**CHAT, "stream": True, "n": 2}
    _, usage, chunks = read_chat(post(body, answering("xy")).content)
    assert usage is None
    assert all("usage" not in chunk for chunk in chunks)
    body["stream_options"] = {"include_usage": True}
    _, usage, chunks = read_chat(post(body, answering("xy")).content)
    assert usage["completion_tokens"] == 6
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    body["stream_options"]["continuous_usage_stats"] = True
    _, usage, chunks = read_chat(post(body, answering("xy")).content)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 6
    assert 0 < counts[0] < 6


def test_log_probabilities_and_their_bytes():
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    client = answering("é", end_id=fake_tokenizer().eos_id)
    content = post(body, client).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], None]
    assert [entry["token"] for entry in content[:2]] == ["\N{REPLACEMENT CHARACTER}"] * 2
    assert content[2]["token"] == fake_tokenizer().token_text(fake_tokenizer().eos_id)
    assert content[0]["logprob"] == -1.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert content[0]["top_logprobs"][0] == {"token": "a", "logprob": -0.5, "bytes": [97]}
    joined = read_chat(post({**body, "stream": True}, answering("é")).content)[0][0]
    assert joined.logprobs == content
    assert (
        post({**body, "top_logprobs": 0}, client).json()["choices"][0]["logprobs"]["content"][0][
            "top_logprobs"
        ]
        == []
    )


def test_log_probabilities_need_no_number_of_alternatives():
    client = answering("xy")
    for fields, expected in (
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False}, None),
        ({}, None),
    ):
        assert post({**CHAT, **fields}, client).status_code == 200
        assert client.submitted[-1].params.logprobs == expected


def test_a_chosen_token_need_not_be_among_the_best():
    client = FakeClient()
    entry = TokenLogprobs(120, -9.0, ((97, -0.5),))
    client.script = lambda request: [TokenUpdate((120,), (entry,), "length", None)]
    content = post({**CHAT, "logprobs": True, "top_logprobs": 1}, client).json()["choices"][0][
        "logprobs"
    ]["content"]
    assert (content[0]["token"], content[0]["logprob"]) == ("x", -9.0)
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a"]


def test_token_ids_and_prompt_log_probabilities():
    class Client(FakeClient):
        def submit(self, request):
            stream = super().submit(request)
            ids = request.prompt_token_ids[1:]
            stream.add_prompt_logprobs([TokenLogprobs(i, -1.0, ((97, -0.5),)) for i in ids])
            return stream

    def client():
        made = Client()
        made.script = says("xy")
        return made

    body = {**CHAT, "return_token_ids": True, "prompt_logprobs": 1}
    plain = post(body, client()).json()
    ids = plain["prompt_token_ids"]
    assert plain["choices"][0]["token_ids"] == [120, 121, fake_tokenizer().eos_id]
    assert plain["prompt_logprobs"][0] is None
    assert len(plain["prompt_logprobs"]) == len(ids)
    place = ids.index(104)
    assert plain["prompt_logprobs"][place] == {
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "104": {"logprob": -1.0, "rank": None, "decoded_token": "h"},
    }
    choices, _, chunks = read_chat(post({**body, "stream": True}, client()).content)
    assert choices[0].token_ids == plain["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == ids
    assert chunks[0]["prompt_logprobs"] == plain["prompt_logprobs"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


def test_one_answer_reads_the_prompt_for_all():
    client = FakeClient()
    post({**CHAT, "n": 3, "prompt_logprobs": 1}, client)
    assert [r.params.prompt_logprobs for r in client.submitted] == [1, None, None]


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_said_of_the_prompt_is_said_once(n):
    """In the first chunk of the first answer, where it was asked for; nowhere else."""
    for fields, names in (
        ({}, set()),
        ({"return_token_ids": True}, {"prompt_token_ids"}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs"}),
        ({"return_token_ids": True, "prompt_logprobs": 0}, {"prompt_token_ids", "prompt_logprobs"}),
    ):
        body = {**CHAT, **fields, "n": n, "stream": True}
        events = [value for _, value in read_events(post(body, answering("xy")).content)]
        chunks = [value for value in events if isinstance(value, dict)]
        said = [set(chunk) & {"prompt_token_ids", "prompt_logprobs"} for chunk in chunks]
        assert said[0] == names
        assert not any(said[1:])
        roles = [c["index"] for v in chunks for c in v["choices"] if "role" in c["delta"]]
        assert sorted(roles) == list(range(n))
        has_ids = [c for v in chunks for c in v["choices"] if "token_ids" in c]
        assert bool(has_ids) == ("return_token_ids" in fields)
