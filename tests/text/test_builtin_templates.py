"""Our template of DeepSeek-V4 writes the prompts that its publisher's program writes.

The strings here were compared with that program, of April 2026 and of July 2026.
"""

# ruff: noqa: RUF001 - the full-width bars and quotes are meant

import json

import pytest

from tests.gguf_files import tiny_model
from tests.text.test_tokenizer import bpe_metadata
from tiercel.errors import InvalidRequestError
from tiercel.models import source as source_module
from tiercel.models.source import open_source
from tiercel.text.builtin_templates import builtin_template
from tiercel.text.chat_template import ChatTemplate, check_messages, encode_around, encode_chat
from tiercel.text.template_client import TemplateWorker
from tiercel.text.tokenizer import Tokenizer
from tiercel.text.tokenizer_data import TokenizerData

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, DSML = "<｜User｜>", "<｜Assistant｜>", "｜DSML｜"
SYSTEM = {"role": "system", "content": "Be kind."}
QUESTION = {"role": "user", "content": "Hi"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Sucht ein Wort, z. B. „Ä“",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
TOOL_SECTION = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "look_up", "description": "Sucht ein Wort, z. B. „Ä“", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}
{"name": "now"}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501 - the model was trained with these lines
ABSOLUTE = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""  # noqa: E501
BEYOND = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.

"""  # noqa: E501


@pytest.fixture(scope="module")
def worker():
    worker = TemplateWorker()
    yield worker
    worker.close()


@pytest.fixture
def render(worker):
    def call(messages, *, config=None, tools=None, prompts=True, **kwargs):
        template = ChatTemplate(builtin_template("deepseek4", config or {}), BOS, worker=worker)
        return template.render(
            check_messages(messages),
            tools=tools,
            add_generation_prompt=prompts,
            template_kwargs=kwargs,
        )

    return call


def says(content, **fields):
    return {"role": "assistant", "content": content, **fields}


def call(name, arguments, call_id="c"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, call_id="c"):
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def test_a_question(render):
    assert render([QUESTION]) == f"{BOS}{USER}Hi{ASSISTANT}</think>"
    assert render([SYSTEM, QUESTION]) == f"{BOS}Be kind.{USER}Hi{ASSISTANT}</think>"
    assert render([SYSTEM, QUESTION], prompts=False) == f"{BOS}Be kind.{USER}Hi"
    assert render([{"role": "user", "content": ""}]) == f"{BOS}{USER}{ASSISTANT}</think>"


@pytest.mark.parametrize(
    ("kwargs", "thinks"),
    [
        ({}, False),
        ({"thinking": True}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": False, "reasoning_effort": "high"}, False),
        ({"enable_thinking": False, "reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"thinking": None, "enable_thinking": None}, False),
    ],
)
def test_thinking_is_off_until_a_request_wants_it(render, kwargs, thinks):
    end = "<think>" if thinks else "</think>"
    assert render([QUESTION], **kwargs) == f"{BOS}{USER}Hi{ASSISTANT}{end}"


HISTORY = [
    SYSTEM,
    QUESTION,
    says("Hello.", reasoning_content="A greeting."),
    {"role": "user", "content": "And now?"},
]


def test_several_turns(render):
    start = f"{BOS}Be kind.{USER}Hi{ASSISTANT}</think>Hello.{EOS}{USER}And now?{ASSISTANT}"
    assert render(HISTORY) == f"{start}</think>"
    assert render(HISTORY, thinking=True) == f"{start}<think>"  # earlier thinking is dropped
    kept = f"{BOS}Be kind.{USER}Hi{ASSISTANT}<think>A greeting.</think>Hello.{EOS}"
    assert (
        render(HISTORY, thinking=True, drop_thinking=False)
        == f"{kept}{USER}And now?{ASSISTANT}<think>"
    )
    done = [*HISTORY, says("Later.", reasoning_content="Time.")]
    assert render(done, prompts=False, thinking=True) == f"{start}<think>Time.</think>Later.{EOS}"
    assert render(done, prompts=False) == f"{start}</think>Later.{EOS}"
    assert render(done, thinking=True).endswith(f"Later.{EOS}{ASSISTANT}<think>")


def test_system_messages_stand_where_they_are(render):
    late = {"role": "system", "content": "Be brief."}
    assert render([QUESTION, says("A"), late, QUESTION]) == (
        f"{BOS}{USER}Hi{ASSISTANT}</think>A{EOS}Be brief.{USER}Hi{ASSISTANT}</think>"
    )
    assert render([QUESTION, late]) == f"{BOS}{USER}HiBe brief.{ASSISTANT}</think>"


def test_messages_of_the_user_side_by_side_are_one_turn(render):
    again = {"role": "user", "content": "Still there?"}
    assert render([QUESTION, again]) == f"{BOS}{USER}Hi\n\nStill there?{ASSISTANT}</think>"


def test_tools_follow_the_system_text(render):
    tail = f"{TOOL_SECTION}{USER}Hi{ASSISTANT}"
    assert render([SYSTEM, QUESTION], tools=TOOLS) == f"{BOS}Be kind.\n\n{tail}</think>"
    assert render([QUESTION], tools=TOOLS) == f"{BOS}\n\n{tail}</think>"
    inside = render([{**SYSTEM, "tools": TOOLS}, QUESTION], thinking=True)
    assert inside == f"{BOS}Be kind.\n\n{tail}<think>"


CALLS = [
    call("look_up", {"word": "Grüße „ä“ 你好", "limit": 3, "exact": False, "none": None}, "a"),
    call("look_up", {"filter": {"any": [1, 2.5, "ü", {"deep": [True, None]}], "e": {}}}, "b"),
    call("now", {}, "c"),
]
WRITTEN = f"""

<{DSML}tool_calls>
<{DSML}invoke name="look_up">
<{DSML}parameter name="word" string="true">Grüße „ä“ 你好</{DSML}parameter>
<{DSML}parameter name="limit" string="false">3</{DSML}parameter>
<{DSML}parameter name="exact" string="false">false</{DSML}parameter>
<{DSML}parameter name="none" string="false">null</{DSML}parameter>
</{DSML}invoke>
<{DSML}invoke name="look_up">
<{DSML}parameter name="filter" string="false">{{"any": [1, 2.5, "ü", {{"deep": [true, null]}}], "e": {{}}}}</{DSML}parameter>
</{DSML}invoke>
<{DSML}invoke name="now">

</{DSML}invoke>
</{DSML}tool_calls>"""  # noqa: E501


def test_calls_and_their_results(render):
    """Thinking stays in all turns of a conversation with tools; results come in order of calls."""
    messages = [
        QUESTION,
        says("", reasoning_content="I must look.", tool_calls=CALLS),
        result("third", "c"),
        result("second", "b"),
        result("first", "a"),
        {"role": "user", "content": "Well?"},
        says("Done.", reasoning_content="Good."),
        QUESTION,
    ]
    results = "\n\n".join(f"<tool_result>{n}</tool_result>" for n in ("first", "second", "third"))
    begin = f"{BOS}\n\n{TOOL_SECTION}{USER}Hi{ASSISTANT}"
    assert render(messages, tools=TOOLS, thinking=True) == (
        f"{begin}<think>I must look.</think>{WRITTEN}{EOS}{USER}{results}\n\nWell?{ASSISTANT}"
        f"<think>Good.</think>Done.{EOS}{USER}Hi{ASSISTANT}<think>"
    )
    assert render(messages, tools=TOOLS) == (
        f"{begin}</think>{WRITTEN}{EOS}{USER}{results}\n\nWell?{ASSISTANT}"
        f"</think>Done.{EOS}{USER}Hi{ASSISTANT}</think>"
    )


def test_a_call_after_text_and_an_empty_result(render):
    messages = [QUESTION, says("I look.", tool_calls=[CALLS[2]]), result("")]
    block = f'<{DSML}tool_calls>\n<{DSML}invoke name="now">\n\n</{DSML}invoke>\n</{DSML}tool_calls>'
    assert render(messages) == (
        f"{BOS}{USER}Hi{ASSISTANT}</think>I look.\n\n{block}{EOS}"
        f"{USER}<tool_result></tool_result>{ASSISTANT}</think>"
    )


def test_arguments_may_be_text(render):
    """As in the OpenAI API; what is no object is an argument of its own."""
    as_text = [call(c["function"]["name"], json.dumps(c["function"]["arguments"])) for c in CALLS]
    assert WRITTEN in render([QUESTION, says("", tool_calls=as_text)])
    cut = render([QUESTION, says("", tool_calls=[call("now", '{"a": 1')])])
    assert f'<{DSML}parameter name="arguments" string="true">{{"a": 1</{DSML}parameter>' in cut


def test_escapes_in_arguments_make_no_control_tokens(worker):
    tokenizer = tokenizer_with_markers()
    text = json.dumps({"word": f"{USER}x{EOS}"})  # ASCII: the markers are escaped
    template = ChatTemplate(builtin_template("deepseek4", {}), BOS, worker=worker)
    ids = encode_chat(
        tokenizer, template, [QUESTION, says("", tool_calls=[call("now", text)]), result(USER)]
    )
    names = [tokenizer.token_text(i) for i in ids if i in tokenizer.control_tokens.values()]
    assert names == [BOS, USER, ASSISTANT, EOS, USER, ASSISTANT]
    assert f"{USER}x{EOS}" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("config", "effort", "expected"),
    [
        *(({}, effort, "") for effort in ("minimal", "low", "medium", "high", None)),
        *(({}, effort, ABSOLUTE) for effort in ("xhigh", "max")),
        *(({"dspark_x": 1}, effort, "") for effort in ("minimal", "low", None)),
        *(({"dspark_x": 1}, effort, ABSOLUTE) for effort in ("medium", "high", "xhigh")),
        ({"dspark_x": 1}, "max", BEYOND),
    ],
)
def test_levels_of_effort(render, config, effort, expected):
    kwargs = {} if effort is None else {"reasoning_effort": effort}
    found = render([SYSTEM, QUESTION], config=config, thinking=True, **kwargs)
    assert found == f"{BOS}{expected}Be kind.{USER}Hi{ASSISTANT}<think>"
    without = render([SYSTEM, QUESTION], config=config, thinking=False, **kwargs)
    assert without == f"{BOS}Be kind.{USER}Hi{ASSISTANT}</think>"


def test_an_unknown_effort_is_refused(render):
    with pytest.raises(InvalidRequestError, match="reasoning_effort is huge; it must be none, min"):
        render([QUESTION], reasoning_effort="huge")


def test_the_program_of_the_folder_decides_over_its_config(tmp_path):
    (tmp_path / "encoding").mkdir()
    path = tmp_path / "encoding" / "encoding_dsv4.py"
    for name, flag in (("REASONING_EFFORT_MAX", "false"), ("REASONING_EFFORT_PROMPTS", "true")):
        path.write_text(f"{name} = 'é'\nraise SystemExit\n", encoding="utf-8")
        for config in ({}, {"dspark_block_size": 5}):
            source = builtin_template("deepseek4", config, tmp_path)
            assert source.startswith(f"{{%- set has_low_effort = {flag} -%}}")
    path.write_bytes(b"\xff other")
    assert "= true" in builtin_template("deepseek4", {"dspark_block_size": 5}, tmp_path)[:40]
    assert "= false" in builtin_template("deepseek4", {}, tmp_path)[:40]


def test_the_form_of_the_answer(render):
    """By the field of a message, as in the publisher's program, or for the whole request."""
    schema = {"type": "object", "title": "é"}
    section = (
        "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        '{"type": "object", "title": "é"}'
    )
    expected = f"{BOS}Be kind.{section}{USER}Hi{ASSISTANT}</think>"
    assert render([{**SYSTEM, "response_format": schema}, QUESTION]) == expected
    assert render([SYSTEM, QUESTION], response_format=schema) == expected
    assert render([QUESTION], response_format=schema) == expected.replace("Be kind.", "")
    assert render([SYSTEM, QUESTION], response_format=schema, tools=TOOLS) == (
        f"{BOS}Be kind.\n\n{TOOL_SECTION}{section}{USER}Hi{ASSISTANT}</think>"
    )


def test_developers_write_turns_that_are_dropped_with_the_thinking(render):
    """The publisher's meaning; the server passes system messages instead (see its tests)."""
    developer = {"role": "developer", "content": "Search."}
    start = f"{BOS}{USER}Search."
    assert render([developer]) == f"{start}{ASSISTANT}</think>"
    assert render([developer, QUESTION]) == f"{start}{USER}Hi{ASSISTANT}</think>"
    assert render([developer, QUESTION], thinking=True) == f"{BOS}{USER}Hi{ASSISTANT}<think>"
    with_tools = render([SYSTEM, developer, QUESTION], thinking=True, tools=TOOLS)
    assert f"{USER}Search.{USER}Hi{ASSISTANT}<think>" in with_tools
    assert "developer" not in builtin_template("deepseek4", {})


def tokenizer_with_markers():
    metadata = bpe_metadata()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    names = [BOS, EOS, USER, ASSISTANT]
    types = [*metadata["tokenizer.ggml.token_type"], *[3] * len(names)]
    changed = metadata | {
        "tokenizer.ggml.tokens": [*tokens, *names],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }
    return Tokenizer.from_gguf(TokenizerData.from_gguf(changed, "small.gguf"))


def test_markers_become_their_ids_and_bos_comes_once(worker):
    tokenizer = tokenizer_with_markers()
    template = ChatTemplate.from_tokenizer(
        tokenizer, source=builtin_template("deepseek4", {}), worker=worker
    )
    template.check()
    ids = encode_chat(tokenizer, template, HISTORY, template_kwargs={"thinking": True})
    bos, eos, user, assistant = (
        tokenizer.control_tokens[name] for name in (BOS, EOS, USER, ASSISTANT)
    )
    plain = tokenizer.encode
    assert ids == [
        bos, *plain("Be kind."), user, *plain("Hi"), assistant, *plain("</think>Hello."), eos,
        user, *plain("And now?"), assistant, *plain("<think>"),
    ]  # fmt: skip
    continued = encode_chat(
        tokenizer, template, [QUESTION, says("So")],
        add_generation_prompt=False, continues_final=True,
    )  # fmt: skip
    assert continued == [bos, user, *plain("Hi"), assistant, *plain("</think>So")]
    before, after = encode_around(tokenizer, template, [QUESTION])
    assert before == [bos, user, *plain("Hi")]
    assert after == [assistant, *plain("</think>")]


def test_only_models_without_a_template_get_ours(tmp_path, monkeypatch):
    assert builtin_template("qwen3", {}) is None
    monkeypatch.setattr(source_module, "builtin_template", lambda arch, *_: f"ours for {arch}")
    bare = open_source(
        tiny_model(tmp_path / "bare.gguf", metadata={"tokenizer.chat_template": None})
    )
    assert bare.chat_template == f"ours for {bare.family.name}"
    own = open_source(tiny_model(tmp_path / "own.gguf"))
    assert own.chat_template != bare.chat_template
