"""JSON text that is not complete: arguments of calls that were cut, strings as they come."""

import json

import pytest

from tests.serve.api.openai.test_chat import CALL, CHAT, post, prompt_of, roomy
from tiercel.errors import InvalidRequestError
from tiercel.serve.api.openai.custom_tools import CustomInputParser, write_arguments
from tiercel.serve.generation.chat_messages import read_arguments
from tiercel.serve.generation.partial_json import close_object, whole_prefix

TEXT = 'a "quoted" \\ back\\\\slash, {[}] \n\t é \U0001f600 \x7f'
ARGUMENTS = {
    "path": TEXT,
    "n": [1, -2.5e3, True, None, {"k,": "v]"}],
    "flag": False,
    "o": {"x": {}},
}


def is_part_of(part, whole):
    """Whether a value is what was there of another when it was cut."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return list(part) == list(whole)[: len(part)] and all(
            is_part_of(value, whole[key]) for key, value in part.items()
        )
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(is_part_of, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    return part == whole or (str(whole).startswith(str(part).removesuffix(".0")))


@pytest.mark.parametrize("is_ascii", [False, True])
@pytest.mark.parametrize("indent", [None, 1])
def test_every_start_of_an_object_is_an_object(is_ascii, indent):
    text = json.dumps(ARGUMENTS, ensure_ascii=is_ascii, indent=indent)
    sizes = []
    for length in range(len(text) + 1):
        found = read_arguments(text[:length], "x")
        assert is_part_of(found, ARGUMENTS), text[:length]
        sizes.append(len(found))
    assert found == ARGUMENTS
    assert sizes == sorted(sizes)  # a member that is there stays
    kept = read_arguments(text[: text.index("slash") + 3], "x")["path"]
    assert kept == TEXT[: TEXT.index("slash") + 3]


@pytest.mark.parametrize(
    "text",
    ["nope", "[1", "[]", '"x', "1", "{nope", '{"a" 1', '{"a": nope', '{"a": 1]', '{"a": 1} x', "}",
     '{"a": {"b": 1}}}', '{"a": "x" "y', "{" * 5000, '{"a": ' * 5000, "null"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_is_no_start_of_an_object_is_refused(text):
    with pytest.raises(InvalidRequestError) as caught:
        read_arguments(text, "messages[1]")
    assert caught.value.param == "messages[1]"


def test_a_cut_call_in_the_history_reaches_the_template():
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{# tools <tool_call> #}"
    )
    client = roomy(template)
    cut = {**CALL, "function": {"name": "look_up", "arguments": '{"word": "a \\"b'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [cut]}
    response = post({**CHAT, "messages": [*CHAT["messages"], answer]}, client)
    assert response.status_code == 200, response.text
    assert '{"word": "a \\"b"}' in prompt_of(client)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("is_ascii", [False, True])
def test_the_input_of_a_freeform_tool_comes_as_it_is_generated(size, is_ascii):
    written = json.dumps({"input": TEXT}, ensure_ascii=is_ascii)
    assert json.loads(write_arguments(TEXT)) == {"input": TEXT}
    reader = CustomInputParser()
    pieces = [reader.push(written[i : i + size]) for i in range(0, len(written), size)]
    assert "".join(pieces) == TEXT
    assert reader.finish() == ""
    assert size > 2 or len([piece for piece in pieces if piece]) > len(TEXT) / 2


def test_a_cut_input_has_no_half_of_a_character():
    for cut in ("\\", "\\u", "\\u00e", "\\ud83d", "\\ud83d\\", "\\ud83d\\ude0"):
        reader = CustomInputParser()
        assert reader.push('{"input": "ab' + cut) == "ab"
        assert reader.finish() == ""
        assert close_object('{"input": "ab' + cut) == {"input": "ab"}


def test_arguments_of_another_shape_are_the_input():
    reader = CustomInputParser()
    text = '{"patch": "x\\ny"}'
    assert reader.push(text[:5]) + reader.push(text[5:]) == ""
    assert reader.finish() == text
    reader = CustomInputParser()
    assert reader.push('{"input":\n"a\nb"}') == "a\nb"  # a raw line end of an unbound model
    assert reader.push(', "input": "c') == ""


def test_a_long_string_takes_linear_time():
    assert len(whole_prefix("\\n" * 500_000 + "\\u")) == 1_000_000
    assert close_object('{"a": "' + "\\\\" * 500_000) == {"a": "\\" * 500_000}
    assert close_object("{" * 100_000) is None
