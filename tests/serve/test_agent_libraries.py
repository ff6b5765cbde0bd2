"""langchain-openai and openai-agents against a real server with the default model, unchanged."""

import asyncio
import json

import agents
import openai
import pytest
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.serve.api.openai.test_chat_tools import called
from tests.serve.events import says
from tests.serve.fake_client import FakeClient, fake_info
from tests.serve.thread_server import thread_server

# The libraries leave sockets to the garbage collector, which may run within a line of ours.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

MODEL = "tiny"  # the name that the server was given
QUESTION = "Why is the sky blue?"


class Person(BaseModel):
    """A form for an answer; small enough for a small model's patience."""

    is_adult: bool
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@agents.function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@pytest.fixture(autouse=True)
def _untraced(monkeypatch):
    """No library reports to its vendor from a test."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    agents.set_tracing_disabled(True)


def langchain(server, **options):
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 16, "max_retries": 0}
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", **{**fields, **options})


@pytest.fixture
def scripted():
    """A server whose model first calls `add`, then answers 5."""
    client = FakeClient(info=fake_info(max_model_len=1024))
    call = called("add", '{"a": 2, "b": 3}')
    client.script = lambda request: says(call if len(client.submitted) == 1 else "5")(request)
    with thread_server(client=client) as server:
        yield server


# langchain-openai


@pytest.mark.parametrize("has_responses", [False, True])
def test_langchain_chats_and_streams(default_server, has_responses):
    chat = langchain(default_server, use_responses_api=has_responses, stream_usage=True)
    whole = chat.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] == 16
    pieces = list(chat.stream(QUESTION))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert len([piece for piece in pieces if piece.text]) > 4


def test_langchain_answers_tasks(default_server):
    async def run():
        kinds = [langchain(default_server, use_responses_api=value) for value in (False, True)]
        return await asyncio.gather(*(chat.ainvoke(QUESTION) for chat in kinds))

    first, second = asyncio.run(run())
    assert first.text == second.text
    assert first.text


@pytest.mark.parametrize("has_responses", [False, True])
def test_langchain_calls_tools(default_server, has_responses):
    chat = langchain(default_server, use_responses_api=has_responses, max_tokens=120)
    bound = chat.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    answer = bound.invoke("What is the weather in Rome?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert set(call["args"]) == {"city"}
    history = [HumanMessage("Rome?"), answer, ToolMessage("sunny", tool_call_id=call["id"])]
    assert chat.bind_tools([get_weather]).invoke(history).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_a_form(default_server, method):
    chat = langchain(default_server, max_tokens=100)
    person = chat.with_structured_output(Person, method=method).invoke("Describe a child.")
    assert isinstance(person, Person)


def test_langchain_continues_raw_prompts(default_server):
    raw = OpenAI(
        base_url=f"{default_server.url}/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=4,
    )
    assert "Paris" in raw.invoke("The capital of France is")


def test_langchain_sends_a_cut_call_back(default_server):
    cut = {"name": "get_weather", "args": '{"city": "Ro', "id": "call_1", "error": "cut"}
    answer = AIMessage("", invalid_tool_calls=[{**cut, "type": "invalid_tool_call"}])
    history = [HumanMessage("Rome?"), answer, ToolMessage("not JSON", tool_call_id="call_1")]
    assert langchain(default_server).bind_tools([get_weather]).invoke(history).text


# openai-agents


def models_of(server):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return {
        "chat": OpenAIChatCompletionsModel(MODEL, client),
        "responses": OpenAIResponsesModel(MODEL, client),
    }


def agent(server, kind, **options):
    settings = agents.ModelSettings(temperature=0, max_tokens=options.pop("max_tokens", 16))
    return agents.Agent(
        name="Helper",
        instructions="Be brief.",
        model=models_of(server)[kind],
        model_settings=settings,
        **options,
    )


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_agents_answer_and_stream(scripted, kind):
    """By a script: this library takes an answer that the length cuts for an error."""
    scripted.client.script = says("It scatters.", group=2)

    async def run():
        helper = agent(scripted, kind)
        whole = await agents.Runner.run(helper, QUESTION)
        stream = agents.Runner.run_streamed(helper, QUESTION)
        deltas = [
            event.data.delta
            async for event in stream.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return whole.final_output, stream.final_output, deltas

    whole, streamed, deltas = asyncio.run(run())
    assert whole == "It scatters."
    assert whole == streamed == "".join(deltas)
    assert len(deltas) > 4


@pytest.mark.parametrize("kind", ["chat", "responses"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_agents_carry_out_tools(scripted, kind, is_stream):
    async def run():
        helper = agent(scripted, kind, tools=[add])
        if not is_stream:
            return (await agents.Runner.run(helper, "2 + 3?")).final_output
        stream = agents.Runner.run_streamed(helper, "2 + 3?")
        async for _ in stream.stream_events():
            pass
        return stream.final_output

    assert asyncio.run(run()) == "5"
    first, second = scripted.client.submitted
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_agents_get_a_form(default_server, kind):
    helper = agent(default_server, kind, output_type=Person, max_tokens=60)
    result = asyncio.run(agents.Runner.run(helper, "Describe a child."))
    assert isinstance(result.final_output, Person)


def test_agents_hand_a_freeform_tool_to_the_model(scripted):
    """OpenAI's client reads the items and events of such a call."""
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    fields = {"model": MODEL, "input": "x", "tools": [{"type": "custom", "name": "add"}]}
    scripted.client.script = says(called("add", json.dumps({"input": "a\nb"})))
    (item,) = client.responses.create(**fields).output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "add", "a\nb")
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[0].input == "a\nb"
    assert "response.custom_tool_call_input.done" in kinds
