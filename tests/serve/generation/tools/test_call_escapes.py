"""Arguments of tool calls that look like their own markup, in every format, and the bounds.

The writers of `call_writers.py` and the parsers are two sides: what one writes the other reads.
"""

import itertools
import json
import random

import pytest

from tests.serve.generation.tools.call_writers import TOOLS, WRITERS, Tool
from tests.serve.generation.tools.test_tools import content, read, use_of, values
from tiercel.serve.generation.tools.parsers import gemma, pythonic
from tiercel.serve.generation.tools.tool_formats import FORMATS

SCRAPS = [
    *('"', "'", "\\", "\\\\", '\\"', "\\'", "\\n", "\\u0041", "\\x41", "\n", "\r", "\t", " ", ""),
    *("{", "}", "[", "]", "(", ")", ",", ":", ";", "=", "#", "/", "<", ">", "|", "`", "%", "$"),
    *("null", "true", "None", "True", "NaN", "1", "-1.5", "1e5", "é", "😀", "\u2028", "\u0085"),
    *("```", "```json\n", "\n```", "<tool_call", "tool_call>", "<parameter=a>", "<function=now>"),
    *("[now()]", '{"name": "now"}', "<|python_tag|", "x, y", "key:value", "a=b", "// c"),
]  # fmt: skip
KEYS = ["word", "limit", "kind", "tags", "deep", "x", "a", "b_c", "d-e"]
# What closes a value in formats whose strings stand as they are, without escapes.
FORBIDDEN = ("</parameter>", '<|"|>', "<escape>", "\uff5c")
# Keys of Gemma's objects have no quotes, so they hold names alone.
ANY = Tool("any_thing", {"type": "object", "additionalProperties": True})


def random_text(rng):
    text = "".join(rng.choices(SCRAPS, k=rng.randint(0, 7)))
    return "" if any(marker in text for marker in FORBIDDEN) else text


def random_value(rng, depth):
    kind = rng.choice(["text"] * 4 + ["number", "word"] + ["list", "object"] * (depth < 3))
    if kind == "text":
        return random_text(rng)
    if kind == "number":
        return rng.choice([0, -1, 7, 1.5, -2.25, 10**12])
    if kind == "word":
        return rng.choice([True, False, None])
    if kind == "list":
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    names = rng.sample(KEYS, rng.randint(0, 3))
    return {name: random_value(rng, depth + 1) for name in names}


def random_calls(rng, name):
    calls = []
    for _ in range(rng.randint(1, 3)):
        arguments = {key: random_value(rng, 0) for key in rng.sample(KEYS, rng.randint(0, 4))}
        if name == "qwen3_coder":  # the schema says which values are text: here all are
            arguments = {key: random_text(rng) for key in arguments}
        calls.append((rng.choice(["any_thing", "now"]), arguments))
    return calls


def cut_at_random(rng, text):
    places = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 6)))
    starts = [0, *places]
    return [text[a:b] for a, b in zip(starts, [*places, len(text)], strict=True)]


TEXT_TOOLS = tuple(
    Tool(name, {"type": "object", "properties": {key: {"type": "string"} for key in KEYS}})
    for name in ("any_thing", "now")
)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_constrained", [True, False])
def test_random_arguments_come_back(name, is_constrained):
    rng = random.Random(f"{name} {is_constrained}")
    tools = TEXT_TOOLS if name == "qwen3_coder" else (ANY, *TOOLS)
    use = use_of(name, tools=tools)
    for _ in range(120):
        calls = random_calls(rng, name)
        text = WRITERS[name](calls)
        found = read(use, cut_at_random(rng, text), is_constrained=is_constrained)
        assert values(found) == calls, text
        assert content(found) == ""


@pytest.mark.parametrize("name", WRITERS)
def test_text_that_ends_in_what_escapes_a_quote(name):
    """A backslash before the closing quote, and before the end of each piece."""
    use = use_of(name)
    for tail in ("\\", "\\\\", '\\"', "\\'", '"', "'", "\\n", "\n", "]", "}", ")", "{", "[("):
        calls = [("look_up", {"word": f"a{tail}", "kind": "noun"}), ("now", {})]
        text = WRITERS[name](calls)
        for is_constrained in (True, False):
            assert values(read(use, [text], is_constrained=is_constrained)) == calls, tail
            assert values(read(use, text, is_constrained=is_constrained)) == calls, tail


@pytest.mark.parametrize("name", WRITERS)
def test_an_answer_may_hold_many_calls(name):
    """The number of calls has no bound but that of the tokens; each has its place and id."""
    calls = [("look_up", {"word": str(i), "kind": "noun"}) for i in range(150)]
    parser = use_of(name).parser()
    events = parser.push(WRITERS[name](calls)) + parser.finish()
    ids = [event.id for event in events if hasattr(event, "name")]
    assert len(set(ids)) == len(ids) == 150
    assert values(read(use_of(name), [WRITERS[name](calls)], is_constrained=False)) == calls


def nested(depth, opening, closing):
    return opening * depth + "1" + closing * depth


@pytest.mark.parametrize("brackets", ["[]", "{}", "()"])
@pytest.mark.parametrize("depth", [1, 63, 64, 65, 66])
def test_depth_of_pythonic_arguments(brackets, depth):
    opening, closing = brackets
    if opening == "{":
        opening = '{"k": '
    value = nested(depth, opening, closing)
    text = f"[now(a={value})]"
    found = read(use_of("pythonic"), [text], is_constrained=False)
    if depth > pythonic.MAX_DEPTH == 64:
        assert found == [["text", text]]
        return
    expected = 1
    for _ in range(depth):
        expected = {"k": expected} if opening[0] == "{" else [expected]
        expected = 1 if opening == "(" else expected  # brackets around a number
    assert values(found) == [("now", {"a": expected})]


def test_brackets_side_by_side_are_not_deep():
    value = "[" + ", ".join(["[[]]"] * 100) + "]"
    found = read(use_of("pythonic"), [f"[now(a={value})]"], is_constrained=False)
    assert values(found) == [("now", {"a": [[[]]] * 100})]


@pytest.mark.parametrize("name", ["gemma4", "functiongemma"])
@pytest.mark.parametrize("depth", [1, 63, 64, 65])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_depth_of_gemmas_arguments(name, depth, kind):
    """The object of the arguments is at depth 0, and a value in it at depth 1."""
    value = 1
    for _ in range(depth - 1):
        value = [value] if kind == "list" else {"k": value}
    text = WRITERS[name]([("now", {"a": value})])
    found = read(use_of(name), [text], is_constrained=False)
    if depth > gemma.MAX_DEPTH == 64:
        assert content(found) == text
    else:
        assert values(found) == [("now", {"a": value})]


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if name not in ("hermes", "llama3_json")]
)
@pytest.mark.parametrize("length", [1, 256, 257])
def test_length_of_a_name(name, length):
    """256 characters; JSON formats take a name as any other string."""
    tool = Tool("n" * length)
    text = WRITERS[name]([(tool.name, {})])
    found = read(use_of(name, tools=(tool,)), [text], is_constrained=False)
    if length <= 256:
        assert values(found) == [(tool.name, {})]
    else:
        assert (values(found), content(found)) == ([], text)


@pytest.mark.parametrize("name", WRITERS)
def test_keys_of_arguments_are_told_apart(name):
    """Values go to their own keys, in the order in which they were written."""
    rng = random.Random(name)
    use = use_of(name, tools=TEXT_TOOLS)
    for _ in range(20):
        keys = rng.sample(KEYS, len(KEYS))
        arguments = {key: f"value of {key}" for key in keys}
        found = read(use, [WRITERS[name]([("now", arguments)])], is_constrained=True)
        ((_, told),) = values(found)
        assert list(told.items()) == list(arguments.items())


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_the_keys_of_a_call_come_in_any_order(name, key):
    """Also with an id and a type beside them; the arguments as an object, as text, or left out."""
    use = use_of(name, tools=(ANY,))
    given = {"word": 'a"}{', "deep": {"a": [1]}}
    for arguments in (given, json.dumps(given), {}, None):
        entries = {"name": "any_thing", "id": "call_1", "type": "function"}
        expected = given if arguments else {}
        if arguments is not None:
            entries[key] = arguments
        for order in itertools.permutations(entries):
            body = json.dumps({name: entries[name] for name in order})
            text = f"<tool_call>\n{body}\n</tool_call>" if name == "hermes" else body
            for pieces in ([text], text):
                found = read(use, pieces, is_constrained=False)
                assert values(found) == [("any_thing", expected)], body
                assert content(found) == ""


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_constrained", [True, False])
def test_text_comes_before_a_call_where_markers_tell_them_apart(name, is_constrained):
    """JSON and lists of Python without markers are calls at the start of an answer alone."""
    calls = [("look_up", {"word": "tin", "kind": "noun"})]
    text = "Let me look.\n" + WRITERS[name](calls)
    found = read(use_of(name), [text], is_constrained=is_constrained)
    if name in ("llama3_json", "pythonic"):
        assert (values(found), content(found)) == ([], text)
    else:
        assert (values(found), content(found)) == (calls, "Let me look.")


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_request_allows(name):
    """All choices: a named tool is the only one, must be called, and once."""
    for choice in ("auto", "required"):
        for parallel in (True, False):
            for named in (None, "now"):
                use = use_of(name, choice, parallel=parallel, named=named)
                must = choice == "required" or named is not None
                assert use.is_required == must
                assert use.is_parallel == (parallel and named is None)
                assert use.is_anchored == (must or FORMATS[name].is_anchored)
                found = [tool.name for tool in use.tools]
                assert found == (["now"] if named else [tool.name for tool in TOOLS])
    assert use_of(name, "none") is None
    assert use_of(name, "none", named="now").is_required  # a name is a choice


def test_markers_of_all_formats_are_known():
    """A parser that needs the names of control tokens must see each marker of its format."""
    for name, form in FORMATS.items():
        text = WRITERS[name]([("now", {"a": "b"})])
        use = use_of(name)
        written = [marker for marker in form.markers if marker in text]
        for marker in written:
            assert use.needs_special({marker: 1}), (name, marker)
        assert not use.needs_special({"<|no marker|>": 1})
        assert not use.needs_special({"": 1})
