"""DeepSeek-V4: what our template writes of an assistant's turn is parsed back to the same turn."""

# ruff: noqa: RUF001 - the full-width bars and quotes are meant

import random

import pytest

from tests.serve.generation.tools.test_call_escapes import random_calls
from tests.serve.generation.tools.test_tools import TOOLS, content, read, use_of, values
from tiercel.serve.generation.output_events import ReasoningDelta
from tiercel.serve.generation.reasoning_parser import ThinkTagParser, select_reasoning_format
from tiercel.serve.generation.tools.tool_formats import select_tool_format
from tiercel.text.builtin_templates import builtin_template
from tiercel.text.chat_template import ChatTemplate

SOURCE = builtin_template("deepseek4", {})
QUESTION = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def template():
    template = ChatTemplate(SOURCE, "<｜begin▁of▁sentence｜>")
    yield template
    template.close()


def turn(template, message, *, thinks):
    """(prompt, the assistant's turn after it, without the end token)."""
    tools = [{"type": "function", "function": {"name": tool.name}} for tool in TOOLS]
    kwargs = {"thinking": thinks}
    prompt = template.render([QUESTION], tools=tools, template_kwargs=kwargs)
    whole = template.render(
        [QUESTION, message], tools=tools, add_generation_prompt=False, template_kwargs=kwargs
    )
    assert whole.startswith(prompt)
    assert whole.endswith("<｜end▁of▁sentence｜>")
    return prompt, whole.removeprefix(prompt).removesuffix("<｜end▁of▁sentence｜>")


def test_the_formats_are_chosen_by_the_template():
    selected = select_tool_format(SOURCE, "deepseek4", None)
    assert (selected.format.name, selected.is_in_template) == ("deepseek_v4", True)
    assert select_reasoning_format(SOURCE, None).name == "think"


CALLS = [
    ("look_up", {"word": "„Grüße“ 你好 <b>\n\n", "kind": "noun", "deep": {"a": [1, {"é": None}]}}),
    ("now", {}),
    ("mixed", {"x": 5}),
    ("mixed", {"x": "5", "y": True}),
]


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("text", ["", "Let me look."])
@pytest.mark.parametrize("calls", [CALLS[:1], CALLS[1:2], CALLS], ids=str)
def test_a_turn_comes_back(template, thinks, text, calls):
    message = {
        "role": "assistant",
        "content": text,
        "reasoning_content": "I must\n\nlook.",
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
    }
    prompt, written = turn(template, message, thinks=thinks)
    form = select_reasoning_format(SOURCE, None).form(prompt)
    assert (form is not None) is thinks
    if form is not None:
        parser = ThinkTagParser(form)
        events = parser.push(written) + parser.finish()
        thinking = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        assert thinking == "I must\n\nlook."
        written = "".join(event.text for event in events if not isinstance(event, ReasoningDelta))
    for is_constrained in (True, False):
        found = read(use_of("deepseek_v4"), written, is_constrained=is_constrained)
        assert values(found) == calls
        assert content(found) == text


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_come_back(template, seed):
    calls = random_calls(random.Random(seed), "deepseek_v4")
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
    }
    _, written = turn(template, message, thinks=False)
    assert values(read(use_of("deepseek_v4"), [written], is_constrained=False)) == calls
