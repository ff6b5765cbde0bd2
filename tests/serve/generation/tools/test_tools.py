"""Tool calls in every format: read back whole, in pieces and broken; held to it by a grammar."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.grammar_walk import CONTEXT, Walker
from tests.serve.generation.tools.call_writers import BAR, DSML, NOW, TOOLS, WRITERS, Tool
from tests.tiny_llm import LLAMA
from tiercel.errors import ArgumentError, InvalidRequestError
from tiercel.grammar.spec import ThinkingForm, compile_spec
from tiercel.models.source import open_source
from tiercel.params import StructuredOutputs
from tiercel.serve.generation.output_events import ContentDelta, ToolCallArguments, ToolCallStart
from tiercel.serve.generation.tools.tool_choice import make_tool_constraints
from tiercel.serve.generation.tools.tool_formats import FORMATS, SelectedFormat, select_tool_format

# Marks of all formats, quotes, brackets, line ends and scripts: what an argument may well hold.
HARD = 'a"b\\c\n\n{"x": [1]}</tool_call> <tool_call> é😀 {{7}} [f(x)]; </p> ```json `'
ARGUMENTS = {
    "word": HARD,
    "limit": -3,
    "kind": "verb",
    "tags": ["", "é", "x, y"],
    "deep": {"a": 1.5},
}
CALLS = [("look_up", ARGUMENTS), ("now", {}), ("mixed", {"x": 5}), ("mixed", {"x": "ü", "y": 3})]
PREFIXES = ("", "Let me look.", "\n\n  Well:\n\n")


def use_of(name, choice="auto", *, tools=TOOLS, parallel=True, named=None, is_structured=False):
    return make_tool_constraints(
        SelectedFormat(FORMATS[name], is_in_template=True),
        tools,
        choice=choice,
        named=named,
        is_parallel=parallel,
        is_structured=is_structured,
        max_tokens=CONTEXT,
    )


def read(use, pieces, *, is_constrained):
    parser = use.parser(is_constrained=is_constrained)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish())


def joined(events):
    """Content and calls, each as one."""
    found = []
    for event in events:
        assert not isinstance(event, ContentDelta | ToolCallArguments) or event.text
        if isinstance(event, ToolCallStart):
            assert re.fullmatch(r"call_[0-9a-f]{24}", event.id)
            assert event.index == sum(kind == "call" for kind, *_ in found)
            found.append(["call", event.name, ""])
        elif isinstance(event, ToolCallArguments):
            assert event.index == sum(kind == "call" for kind, *_ in found) - 1
            found[-1][2] += event.text
        elif found and found[-1][0] == "text":
            found[-1][1] += event.text
        else:
            found.append(["text", event.text])
    return found


def values(found):
    return [(entry[1], json.loads(entry[2])) for entry in found if entry[0] == "call"]


def content(found):
    return "".join(entry[1] for entry in found if entry[0] == "text")


@pytest.fixture(scope="module")
def tiny():
    source = open_source(LLAMA)
    return Walker(source.tokenizer(None), source.config.vocab_size)


@pytest.mark.parametrize("is_constrained", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_read_back_whatever_the_pieces(name, is_constrained):
    use = use_of(name)
    anchored = FORMATS[name].is_anchored
    for number, prefix in enumerate(PREFIXES[::2] if anchored else PREFIXES):
        if anchored and prefix.strip():
            continue  # after other text this format has no calls
        text = prefix + WRITERS[name](CALLS)
        whole = read(use, [text], is_constrained=is_constrained)
        assert values(whole) == CALLS
        assert content(whole) == prefix.rstrip()
        assert read(use, text, is_constrained=is_constrained) == whole  # a character at a time
        for cut in range(number % 3, len(text), 3):
            pieces = [text[:cut], text[cut:]]
            assert read(use, pieces, is_constrained=is_constrained) == whole, cut


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_come_while_they_are_written(name):
    text = WRITERS[name]([("look_up", {"word": "x" * 200, "kind": "noun"})])
    parser = use_of(name).parser()
    half = parser.push(text[: text.index("x" * 200) + 100])
    assert isinstance(half[0], ToolCallStart)
    if name == "pythonic":
        return  # a literal is read when it is complete
    assert "x" * 90 in "".join(event.text for event in half[1:])


@pytest.mark.parametrize("name", WRITERS)
def test_without_a_grammar_a_call_is_told_when_it_is_sound(name):
    text = WRITERS[name]([("look_up", {"word": "x" * 200, "kind": "noun"})])
    parser = use_of(name).parser(is_constrained=False)
    assert parser.push(text[: text.index("x" * 200) + 100]) == []


@pytest.mark.parametrize("name", WRITERS)
def test_cut_by_the_limit_of_tokens(name):
    """With a grammar no markup is shown; without one, what is no call is content."""
    use, text = use_of(name), WRITERS[name](CALLS[:1])
    triggers = FORMATS[name].triggers(TOOLS, is_constrained=True)
    full = read(use, [text], is_constrained=True)[0][2]
    for cut in range(len(text)):
        held = read(use, [text[:cut]], is_constrained=True)
        for entry in held:
            if entry[0] == "call":
                assert entry[1] == "look_up"
                assert full.startswith(entry[2])
            else:  # not yet the whole of what tells a call
                assert entry[1] in {trigger[0] for trigger in triggers}
        free = read(use, [text[:cut]], is_constrained=False)
        assert values(free) == CALLS[:1] or content(free) == text[:cut]


BROKEN = {
    "hermes": [
        "<tool_call>\nno JSON\n</tool_call>",
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"a": }}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"a": 1}, "id": }\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"a": 1},}\n</tool_call>',
        "<tool_call><tool_call></tool_call>",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\nnow()\n</tool_call>",
    ],
    "llama3_json": ['{"a": 1}', '{"name": "now"', '{"name": "now", "parameters": 3}', "{x}"],
    "pythonic": ["[now(a)]", "[now(a=b)]", "[now(a={1, 2})]", "[now(a=1", "[now(a=exit())]"],
    "gemma4": ["<|tool_call>now{}<tool_call|>", "<|tool_call>call:now{a:}<tool_call|>"],
    "functiongemma": ["<start_function_call>call:now<end_function_call>"],
    "deepseek_v31": [f"<{BAR}tool▁calls▁begin{BAR}>now", f"<{BAR}tool▁calls▁begin{BAR}>now{{}}"],
    "deepseek_v4": [f'<{DSML}tool_calls>\n<{DSML}invoke name="now">oops'],
}  # fmt: skip


@pytest.mark.reliability
@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in BROKEN.items() for t in texts])
def test_broken_calls_are_content(name, text):
    use = use_of(name)
    assert read(use, [text], is_constrained=False) == [["text", text]]
    assert read(use, text, is_constrained=False) == [["text", text]]
    if not FORMATS[name].is_anchored:
        sound = WRITERS[name](CALLS[1:2])
        found = read(use, f"{text}\n{sound}", is_constrained=False)
        assert values(found) == CALLS[1:2]  # a later call is found all the same
        assert content(found) == text


@pytest.mark.reliability
def test_deep_nesting_is_no_call_and_no_crash():
    for name, text in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000),
        ("gemma4", "<|tool_call>call:f{a:" + "[" * 5000),
        ("pythonic", "[now(a=" + "[" * 5000 + "]" * 5000 + ")]"),
    ):
        found = read(use_of(name), [text], is_constrained=False)
        assert content(found) == text


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>', {"a": "é"}),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', {}),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', {"a": 1}),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ("pythonic", "[f(a=true, b=None, c=[1, (2,)])]", {"a": True, "b": None, "c": [1, [2]]}),
        ("pythonic", "<|python_start|>[f()]<|python_end|>", {}),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter></function>", {"a": "x"}),
        ("gemma4", "<|tool_call>call:f{ a : 1 , b:[ True ] }", {"a": 1, "b": [True]}),
    ],
)  # fmt: skip
def test_variants_that_models_write(name, text, call):
    use = use_of(name, tools=(Tool("f", {"type": "object"}),))
    assert values(read(use, [text], is_constrained=False)) == [("f", call)]
    assert values(read(use, text, is_constrained=False)) == [("f", call)]


SCRAPS = (
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', '{"name": "now", "parameters": ',
    "}", "}}", "{", '"', "\\", ",", " ", "\n", "x", "é", "[now(", "[", "]", ")", "a=1", "<", "|",
    "<function=now>", "<parameter=a>", "</parameter>", "</function>", "; ", "<|python_tag|>",
    "<|tool_call>", "call:now{", "a:", '<|"|>', "<tool_call|>", "<escape>",
    f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁sep{BAR}>",
    f"<{BAR}tool▁call▁end{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>", f"<{DSML}tool_calls>",
    f'<{DSML}invoke name="now">', f'<{DSML}parameter name="a" string="true">',
    f"</{DSML}parameter>", f"</{DSML}invoke>", f"</{DSML}tool_calls>", "function", "```json\n",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=40, deadline=None)
@given(
    scraps=st.lists(st.sampled_from(SCRAPS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    is_constrained=st.booleans(),
)
@example(
    scraps=["<tool_call>", '{"name": "f", "arguments": {', "}", "}"], cuts=[], is_constrained=False
)
@example(scraps=["[now(", "[", "a=1", "x"], cuts=[], is_constrained=True)
def test_any_text_gives_the_same_events_in_any_pieces(name, scraps, cuts, is_constrained):
    text, use = "".join(scraps), use_of(name)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    whole = read(use, [text], is_constrained=is_constrained)
    assert read(use, pieces, is_constrained=is_constrained) == whole
    assert read(use, text, is_constrained=is_constrained) == whole
    if not is_constrained:
        assert all(isinstance(arguments, dict) for _, arguments in values(whole))
        if not values(whole):
            assert content(whole) == text  # nothing is lost


json_text = st.text(st.characters(codec="utf-8", exclude_characters="\x00\x7f"), max_size=20)


@st.composite
def look_up_arguments(draw, texts):
    arguments = {"word": draw(texts)}
    if draw(st.booleans()):
        arguments["limit"] = draw(st.integers(-(10**9), 10**9))
    arguments["kind"] = draw(st.sampled_from(["noun", "verb"]))
    if draw(st.booleans()):
        arguments["tags"] = draw(st.lists(texts, max_size=3))
    if draw(st.booleans()):
        arguments["deep"] = {"a": draw(st.sampled_from([0, -1.5, 20]))}
        if draw(st.booleans()):
            arguments["deep"]["b"] = draw(st.sampled_from([True, False, None]))
    return arguments


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_the_grammar_takes_is_read_back(tiny, name, data):
    texts = json_text
    if name == "pythonic":  # its strings know no other escapes than these
        texts = st.text(st.characters(min_codepoint=32, codec="utf-8"), max_size=20)
    calls = [("look_up", data.draw(look_up_arguments(texts)))]
    if data.draw(st.booleans()):
        calls.append(("now", {}))
    text = WRITERS[name](calls)
    for use in (use_of(name, "required"), use_of(name, "auto")):
        matcher = tiny.matcher(compile_spec(None, max_tokens=CONTEXT, calls=use))
        assert tiny.accepts(matcher, text), text
        assert values(read(use, [text], is_constrained=True)) == calls


WRONG = [
    [("other", {})],
    [("look_up", {})],
    [("look_up", {"word": "a"})],
    [("look_up", {"word": "a", "kind": "adverb"})],
    [("look_up", {"word": "a", "limit": 1.5, "kind": "noun"})],
    [("look_up", {"word": "a", "kind": "noun", "tags": [1]})],
    [("look_up", {"word": "a", "kind": "noun", "deep": {}})],
    [("now", {"x": 1})],
]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_grammar_refuses_wrong_calls(tiny, name, choice):
    spec = compile_spec(None, max_tokens=CONTEXT, calls=use_of(name, choice))
    for calls in WRONG:
        if (name, choice, calls[0][0]) == ("pythonic", "auto", "other"):
            continue  # what calls none of the tools is text in this notation
        assert not tiny.accepts(tiny.matcher(spec), WRITERS[name](calls)), calls
    assert tiny.accepts(tiny.matcher(spec), "Just text.") == (choice == "auto")
    assert tiny.accepts(tiny.matcher(spec), "") == (choice == "auto")


@pytest.mark.parametrize("name", WRITERS)
def test_choices(tiny, name):
    two = [("now", {}), ("mixed", {"x": "a", "y": 3})]
    one, other = WRITERS[name](two[:1]), WRITERS[name](two[1:])

    def takes(text, **options):
        spec = compile_spec(None, max_tokens=CONTEXT, calls=use_of(name, **options))
        return tiny.accepts(tiny.matcher(spec), text)

    both = WRITERS[name](two)
    assert takes(both, choice="required")
    assert takes(both, choice="auto")
    for choice in ("required", "auto"):
        assert takes(one, choice=choice, parallel=False)
        assert not takes(both, choice=choice, parallel=False)
        assert takes(one, choice=choice, named="now")
        assert not takes(other, choice=choice, named="now")
        assert not takes(both, choice=choice, named="now")
    if not FORMATS[name].is_anchored:
        assert takes(f"Let me see.\n{one}", choice="auto")
        assert not takes(f"Let me see.\n{one}", choice="required")


@pytest.mark.parametrize("name", WRITERS)
def test_calls_or_a_form_behind_thinking(tiny, name):
    """All three parts at once: thinking that mentions the markup, then calls or the schema."""
    if FORMATS[name].is_anchored:
        with pytest.raises(InvalidRequestError, match="cannot be told"):
            use_of(name, "auto", is_structured=True)
        return
    use = use_of(name, "auto", is_structured=True)
    assert use.is_anchored
    call = WRITERS[name](CALLS[1:2])
    spec = compile_spec(
        StructuredOutputs(json={"type": "object", "properties": {"a": {"const": "<tool_call>"}},
                                "required": ["a"], "additionalProperties": False}),
        max_tokens=CONTEXT,
        calls=use,
        thinking=ThinkingForm("<think>", "</think>", is_open=True),
    )  # fmt: skip
    thought = f"hm, {call[:20]}\n</think>\n\n"
    assert tiny.accepts(tiny.matcher(spec), thought + call)
    assert tiny.accepts(tiny.matcher(spec), thought + '{"a": "<tool_call>"}')
    for wrong in (call, thought + "text", thought + '{"a": 1}', thought + call + "x", thought):
        assert not tiny.accepts(tiny.matcher(spec), wrong)
    form = '{"a": "<tool_call>"}'
    assert read(use, [form], is_constrained=True) == [["text", form]]
    assert values(read(use, [call], is_constrained=True)) == CALLS[1:2]


def test_optional_thinking_before_free_text_and_calls(tiny):
    spec = compile_spec(
        None,
        max_tokens=CONTEXT,
        calls=use_of("hermes"),
        thinking=ThinkingForm("<think>", "</think>", is_open=False),
    )
    call = WRITERS["hermes"](CALLS[1:2])
    for text in ("hi", call, f"<think>{call[:15]} hm</think>\n\nSo: {call}", "<think>a</think>b"):
        assert tiny.accepts(tiny.matcher(spec), text), text
    for text in (
        "<think>a",
        "<think>a <tool_call> b",
        "<think>a</think><tool_call>x",
        "<tool_call>",
    ):
        assert not tiny.accepts(tiny.matcher(spec), text), text


def test_markers_that_are_control_tokens(tiny):
    """The trigger is then one token, which no text can spell."""
    names = [
        n for n, i in tiny.tokenizer.control_tokens.items() if i not in tiny.vocabulary.stop_ids
    ]
    marker = names[0]
    use = use_of("hermes")
    object.__setattr__(use, "format", type("Renamed", (type(use.format),), {"opening": marker})())
    spec = compile_spec(
        None, max_tokens=CONTEXT, calls=use, control_tokens=tiny.tokenizer.control_tokens
    )
    body = '\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert tiny.accepts(tiny.matcher(spec), f"So: {marker}{body}", parse_special=True)
    assert not tiny.accepts(tiny.matcher(spec), f"So: {marker} no", parse_special=True)
    assert tiny.accepts(tiny.matcher(spec), f"So: {marker} no")  # spelled out, it is text
    assert not use_of("hermes").needs_special(tiny.tokenizer.control_tokens)
    assert use_of("hermes").needs_special({"<tool_call>": 5})
    assert use_of("deepseek_v4").needs_special({DSML: 5})


def test_random_answers_under_the_grammar_are_calls(tiny):
    rng = np.random.default_rng(5)
    num_done = 0
    for name in WRITERS:
        use = use_of(
            name, "required", tools=(NOW, Tool("pick", {"properties": {"n": {"enum": [1, 2]}}}))
        )
        matcher = tiny.matcher(compile_spec(None, max_tokens=CONTEXT, calls=use))
        ids, is_done = tiny.sample(matcher, rng)
        text = tiny.tokenizer.decode(ids)
        found = read(use, [text], is_constrained=True)
        num_done += is_done
        if is_done:
            assert content(found) == ""
            assert values(found)
            assert read(use, text, is_constrained=False) == found
    assert num_done > 5


def test_keywords_that_cannot_be_enforced(tiny):
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    loose = use_of("hermes", tools=(Tool("f", schema),))
    assert tiny.matcher(compile_spec(None, max_tokens=CONTEXT, calls=loose))
    strict = use_of("hermes", tools=(Tool("f", schema, strict=True),))
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        tiny.matcher(compile_spec(None, max_tokens=CONTEXT, calls=strict))


FIRST, SECOND = (f"tools[{place}].function.parameters" for place in range(2))
MANY = {"properties": {str(k): {} for k in range(2400)}}


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("tools", "options", "param", "code"),
    [
        ((NOW,), {"named": "later"}, "tool_choice", "invalid_request"),
        ((), {"choice": "required"}, "tool_choice", "invalid_request"),
        ((NOW, Tool("f", {"type": "array"})), {}, SECOND, "invalid_schema"),
        ((Tool("f", {"$ref": "http://x"}),), {}, FIRST, "invalid_schema"),
        ((Tool("f", {"enum": [0] * 5000}),), {}, FIRST, "schema_too_complex"),
        (tuple(Tool(f"f{i}", MANY) for i in range(10)), {}, "tools", "schema_too_complex"),
        ((Tool("f", {"type": "array"}),), {"choice": "none"}, FIRST, "invalid_schema"),
    ],
)
def test_wrong_tools_are_refused(tools, options, param, code):
    with pytest.raises(InvalidRequestError) as caught:
        use_of("hermes", **{"tools": tools, "choice": "auto", **options})
    assert caught.value.param == param
    assert caught.value.code == code


def test_no_tools_no_use():
    assert use_of("hermes", tools=()) is None
    assert use_of("hermes", "none") is None
    assert make_tool_constraints(
        None, (), choice="auto", named=None, is_parallel=True, is_structured=False, max_tokens=9
    ) is None  # fmt: skip
    with pytest.raises(InvalidRequestError, match="switched off"):
        make_tool_constraints(
            None,
            TOOLS,
            choice="auto",
            named=None,
            is_parallel=True,
            is_structured=False,
            max_tokens=9,
        )


TEMPLATES = {
    "{% if tools %}<tool_call>{{ x }}</tool_call>": ("hermes", True),
    "{% if tools %}<tool_call>\n<function=example>": ("qwen3_coder", True),
    '{% if tools %}{"name": function name, "parameters": d}<|python_tag|>': ("llama3_json", True),
    "{% if tools %}[func_name1(params_name1=params_value1)]": ("pythonic", True),
    "{% if tools %}<|python_start|>": ("pythonic", True),
    "{% if tools %}<start_function_call>call:": ("functiongemma", True),
    "{% if tools %}<|tool_call>call:": ("gemma4", True),
    f"{{% if tools %}}<{BAR}tool▁calls▁begin{BAR}> ```json": ("deepseek_v3", True),
    f"{{% if tools %}}<{BAR}tool▁calls▁begin{BAR}>": ("deepseek_v31", True),
    f"{{% if tools %}}{DSML}function_calls": ("deepseek_v32", True),
    f"{{% if tools %}}{DSML}tool_calls": ("deepseek_v4", True),
    "{% for m in messages %}": ("hermes", False),
    "{% if tools %}[AVAILABLE_TOOLS]": ("hermes", False),
    "{% if tools %}<tool_call>f<arg_key>": ("hermes", False),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_names_the_format(template):
    name, is_in_template = TEMPLATES[template]
    selected = select_tool_format(template, "llama", None)
    assert (selected.format.name, selected.is_in_template) == (name, is_in_template)


def test_the_default_model_gets_tools_as_text(default_model):
    source = open_source(default_model)
    selected = select_tool_format(source.tokenizer(None).chat_template, "llama", None)
    assert (selected.format.name, selected.is_in_template) == ("hermes", False)


def test_formats_by_name():
    assert set(FORMATS) == set(WRITERS)
    for name in FORMATS:
        assert select_tool_format("{{ tools }}", "llama", name).format.name == name
        assert select_tool_format("{{ tools }}", "llama", name).is_in_template
        assert not select_tool_format("x", "llama", name).is_in_template
    assert select_tool_format("{{ tools }}", "llama", "none") is None
    assert select_tool_format(None, "llama", None) is None
    assert select_tool_format("{{ tools }}", "deepseek4", None).format.name == "deepseek_v4"
    with pytest.raises(ArgumentError, match="tool_parser='nope'"):
        select_tool_format("x", "llama", "nope")
