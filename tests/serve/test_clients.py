"""The official clients against a real server with the default model, as their users call them."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.patience import wait_for
from tests.serve.events import says
from tests.serve.fake_client import FakeClient, fake_info
from tests.serve.thread_server import thread_server

MODEL = "tiny"  # the name that the server was given
USER = [{"role": "user", "content": "Why is the sky blue?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    """A form for an answer; small enough for a small model's patience."""

    is_adult: bool
    age: int


@pytest.fixture(scope="module")
def client(default_server):
    with openai.OpenAI(
        base_url=f"{default_server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


@pytest.fixture(scope="module")
def claude(default_server):
    with anthropic.Anthropic(
        base_url=default_server.url, api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


def chat(client, **fields):
    fields = {"messages": USER, "max_tokens": 16, "temperature": 0, **fields}
    return client.chat.completions.create(model=MODEL, **fields)


def gauge(server, name):
    line = next(
        line
        for line in server.get("/metrics").text.splitlines()
        if line.startswith(f"tiercel:{name}{{")
    )
    return float(line.rpartition(" ")[2])


def wait_idle(server):
    wait_for(lambda: gauge(server, "num_requests_running") == 0)


# Chat completions through OpenAI's client


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_and_its_stream(client):
    whole = chat(client)
    text = whole.choices[0].message.content
    assert text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 16
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 5  # it came in pieces
    assert chunks[-1].usage.completion_tokens == 16


def test_the_stream_helper_of_the_client(client):
    text = chat(client).choices[0].message.content
    with client.chat.completions.stream(
        model=MODEL, messages=USER, max_tokens=16, temperature=0, stop=[text[20:24]]
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text.partition(text[20:24])[0]


def test_answers_of_one_seed_differ_and_repeat(client):
    def draw():
        whole = chat(client, n=2, temperature=1.5, seed=11, max_tokens=10)
        return [choice.message.content for choice in whole.choices]

    first, second = draw()
    assert first != second
    assert draw() == [first, second]


def test_a_stop_string(client):
    text = chat(client).choices[0].message.content
    stop = text[10:14]
    choice = chat(client, stop=[stop]).choices[0]
    assert choice.message.content == text.partition(stop)[0]
    assert choice.finish_reason == "stop"


def test_log_probabilities(client):
    whole = chat(client, logprobs=True, top_logprobs=3, max_tokens=6)
    content = whole.choices[0].logprobs.content
    assert len(content) == 6
    joined = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert joined == whole.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy: the best was taken


def test_tools(client):
    fields = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100}
    fields["parallel_tool_calls"] = False
    choice = chat(client, **fields).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    named = {"type": "function", "function": {"name": "get_weather"}}
    pieces, names = "", []
    for chunk in chat(client, **{**fields, "tool_choice": named}, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            names += [delta.function.name] if delta.function.name else []
            pieces += delta.function.arguments or ""
    assert names == ["get_weather"]
    assert set(json.loads(pieces)) == {"city", "unit"}


def test_a_whole_round_with_a_tool(client):
    call = {"id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}  # fmt: skip
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert chat(client, messages=messages, tools=[TOOL]).choices[0].message is not None


def test_a_json_schema(client):
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe a child."}],
        response_format=Person,
        max_tokens=60,
        temperature=0,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    assert parsed.choices[0].finish_reason == "stop"


def test_a_stream_that_is_cancelled_gives_its_place_back(client, default_server):
    stream = chat(client, stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert gauge(default_server, "num_requests_running") >= 1
    stream.close()
    wait_idle(default_server)


def test_tasks_that_are_cancelled_give_their_places_back(default_server):
    async def run():
        async with openai.AsyncOpenAI(
            base_url=f"{default_server.url}/v1", api_key="none", max_retries=0
        ) as client:
            fields = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
            tasks = [asyncio.ensure_future(chat(client, **fields)) for _ in range(3)]
            await asyncio.sleep(0.5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    wait_idle(default_server)


def test_errors_have_the_classes_of_the_client(client, default_server):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=USER)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "x " * 9000}], stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input="x")
    assert caught.value.code == "unsupported_model"
    assert default_server.get("/health").status_code == 200


# Completions and responses through OpenAI's client


def test_completions_with_echo_and_log_probabilities(client):
    whole = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0, echo=True,
        logprobs=2,
    )  # fmt: skip
    choice = whole.choices[0]
    lists = choice.logprobs
    assert choice.text.startswith("The capital of France is")
    assert lists.token_logprobs[0] is None
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.text_offset)
    assert len(lists.tokens) == whole.usage.total_tokens
    assert choice.text[lists.text_offset[-1] :] == lists.tokens[-1]
    stream = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0, stream=True
    )
    pieces = "".join(chunk.choices[0].text for chunk in stream)
    assert "The capital of France is" + pieces == choice.text


def test_a_response_and_its_stream(client):
    fields = {"model": MODEL, "input": "Why is the sky blue?", "temperature": 0}
    whole = client.responses.create(**fields, max_output_tokens=16)
    assert whole.status == "incomplete"
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text
    with client.responses.stream(**fields, max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    deltas = client.responses.create(**fields, max_output_tokens=16, stream=True)
    text = "".join(e.delta for e in deltas if e.type == "response.output_text.delta")
    assert text == whole.output_text


def test_a_response_with_a_tool_and_a_form(client):
    tool = {"type": "function", **TOOL["function"]}
    with client.responses.stream(
        model=MODEL, input="Rome?", tools=[tool], tool_choice="required", temperature=0,
        max_output_tokens=100, parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        final = stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    parsed = client.responses.parse(
        model=MODEL, input="Describe a child.", text_format=Person, max_output_tokens=60,
        temperature=0,
    )  # fmt: skip
    assert isinstance(parsed.output_parsed, Person)


# Messages through Anthropic's client


def ask(claude, **fields):
    fields = {"messages": USER, "max_tokens": 16, "extra_body": {"temperature": 0}, **fields}
    return claude.messages.create(model=MODEL, **fields)


def test_a_message_and_its_stream(claude):
    message = ask(claude)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 16
    with claude.messages.stream(
        model=MODEL, messages=USER, max_tokens=16, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == message.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 16


def test_message_tools_and_stop_sequences(claude):
    function = TOOL["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = ask(claude, tools=[tool], tool_choice=choice, max_tokens=100)
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert set(use.input) == {"city", "unit"}
    assert message.stop_reason == "tool_use"
    text = ask(claude).content[0].text
    stopped = ask(claude, stop_sequences=[text[8:12]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[8:12])
    assert stopped.content[0].text == text.partition(text[8:12])[0]


def test_counted_tokens_are_those_that_are_used(claude):
    counted = claude.messages.count_tokens(model=MODEL, messages=USER, system="Be brief.")
    usage = ask(claude, system="Be brief.", max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_message_errors_have_the_classes_of_the_client(claude):
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, messages=[])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", messages=USER, max_tokens=5)


def test_the_tool_runner_of_the_client():
    """It asks for a thread that the server keeps, and must learn that there is none."""
    client = FakeClient(info=fake_info(max_model_len=1024))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    client.script = lambda request: says("5" if len(client.submitted) == 2 else call)(request)

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    with (
        thread_server(client=client) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
    ):
        first, last = claude.beta.messages.tool_runner(
            model=MODEL, max_tokens=50, tools=[add], messages=USER
        )
    assert (first.stop_reason, first.content[0].input) == ("tool_use", {"a": 2, "b": 3})
    assert last.content[0].text == "5"


# lm-eval, by hand


def test_the_requests_of_lm_eval(default_server):
    """Its tokenizer routes and its scoring request, in the shape that its source sends."""
    url = default_server.url
    assert httpx.get(f"{url}/tokenizer_info").json()["eos_token"]

    def encode(text):
        body = {"prompt": text, "add_special_tokens": False}
        return httpx.post(f"{url}/tokenize", json=body).json()["tokens"]

    context, best, other = encode("The capital of France is"), encode(" Paris"), encode(" Lima")
    assert httpx.post(f"{url}/detokenize", json={"tokens": context}).json() == {
        "prompt": "The capital of France is"
    }
    body = {
        "model": MODEL,
        "prompt": [context + best, context + other],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    sums, greedy = [], []
    for choice, ids in zip(answer["choices"], body["prompt"], strict=True):
        lists = choice["logprobs"]
        assert len(lists["token_logprobs"]) == len(ids) + 1
        values = lists["token_logprobs"][len(context) : -1]
        tops = lists["top_logprobs"][len(context) : -1]
        sums.append(sum(values))
        greedy.append(all(v == max(t.values()) for v, t in zip(values, tops, strict=True)))
    assert sums[0] > sums[1]
    assert greedy == [True, False]
