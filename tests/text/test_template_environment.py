"""The Jinja environment of templates, compared with that of transformers; and its limits."""

import itertools
from datetime import datetime, timedelta

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.text.test_tokenizer import make_bpe
from tiercel.errors import InvalidRequestError, ModelFormatError
from tiercel.text import chat_template
from tiercel.text.chat_template import ChatTemplate, check_messages, encode_chat
from tiercel.text.shield import ControlFinder
from tiercel.text.template_client import TemplateWorker

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".\n'},
    {"role": "user", "content": "Grüße 你好\u2028 'x'"},
    {"role": "assistant", "content": "  spaced  ", "tool_calls": [{"name": "f", "n": [1, 2.5]}]},
]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"b": {}, "a": None}}}]

# Pieces of templates whose whitespace depends on the settings of the environment.
BLOCKS = ["{% if true %}", "{%- if true %}", "{% if true -%}", "{%+ if true %}", "{# note #}"]
SPACES = ["", " ", "\n", "\t \n", "\n\n  ", "x ", "x\n  "]
WHITESPACE = [
    f"{before}{block}{between}y{'{% endif %}' if 'if' in block else ''}{after}"
    for block in BLOCKS
    for before, between, after in itertools.product(SPACES[1:], SPACES, ("", "\n", "\n\n", " \n"))
]
SOURCES = [
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}\n",
    "{%- for m in messages -%}\n  {{- m['content'] }}\n  {%- if not loop.last %}|{% endif %}\n"
    "{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}"
    "{% endfor %}",
    "{{ messages | tojson }}",
    "{{ messages[1].content | tojson(ensure_ascii=true) }}",
    "{{ tools | tojson(indent=4) }}{{ tools | tojson(indent=2, sort_keys=true) }}",
    "{{ tools | tojson(true) }}{{ tools | tojson(false, 1, (',', ':'), true) }}",
    "{{ messages[2].tool_calls | tojson(separators=(',', ':')) }}",
    "{{ messages[0].content }}{{ messages[0].content | e }}",
    "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}"
    "{{ ns.n }}",
    "{{ missing }}|{{ messages[0].missing }}|{{ missing is defined }}",
    "{{ add_generation_prompt }}|{{ tools is none }}|{{ tools | length if tools else 0 }}",
    "{% macro f(x, y=2) %}{{ x }}-{{ y }}{% endmacro %}{{ f(1) }}{{ f(1, y=3) }}",
    "{{ messages[2].content.strip() }}|{{ messages | map(attribute='role') | join(',') }}",
    "{% raw %}{{ x }}{% endraw %}\n",
    "{% for m in messages %}\n\n{{ m.role }}\n\n{% endfor %}\n\n\n",
]


@pytest.fixture(scope="module")
def worker():
    worker = TemplateWorker()
    yield worker
    worker.close()


def theirs(source, **options):
    """The rendering of transformers; it takes conversations and returns (texts, masks)."""
    options = {"add_generation_prompt": True, "tools": None, **options}
    texts, _ = render_jinja_template([MESSAGES], chat_template=source, **options)
    return texts[0]


def test_whitespace_around_blocks_is_that_of_transformers(worker):
    """All together, with marks between them: each rendering costs a message to the child."""
    marked = [f"{source}{{{{ '@' }}}}" for source in WHITESPACE]
    for first in range(0, len(marked), 200):
        source = "".join(marked[first : first + 200])
        ours = ChatTemplate(source, worker=worker).render(MESSAGES)
        assert ours.split("@") == theirs(source).split("@")


@pytest.mark.parametrize("end", ["", "\n", "\n\n", " \n", "{% if true %}\n{% endif %}\n"])
def test_the_end_of_a_template_is_that_of_transformers(worker, end):
    for source in ("x", "{{ 'x' }}", "{% if true %}x{% endif %}"):
        assert ChatTemplate(source + end, worker=worker).render(MESSAGES) == theirs(source + end)


@pytest.mark.parametrize("source", SOURCES)
def test_filters_loops_and_variables_are_those_of_transformers(worker, source):
    for options in ({}, {"tools": TOOLS}, {"add_generation_prompt": False}):
        template = ChatTemplate(source, worker=worker)
        assert template.render(MESSAGES, **options) == theirs(source, **options)


def test_json_is_decoded_without_escapes(worker):
    """As llama.cpp's templates do with arguments that are text."""
    template = ChatTemplate("{{ (text | from_json).a[1] }}", worker=worker)
    assert template.render(MESSAGES, template_kwargs={"text": '{"a": [1, "é"]}'}) == "é"
    for text in ('{"a": [1, "\\u003c|im_end|>"]}', '{"a": [1, "<\\/s>"]}', "{"):
        with pytest.raises(InvalidRequestError, match="the chat template failed"):
            template.render(MESSAGES, template_kwargs={"text": text})


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d %b %Y", "%B %d, %Y", "%A", "%j %U", "today %%"])
def test_the_date_is_that_of_today(worker, form):
    source = f"{{{{ strftime_now('{form}') }}}}"
    before = datetime.now()
    found = ChatTemplate(source, worker=worker).render(MESSAGES)
    assert found in {before.strftime(form), datetime.now().strftime(form)}


def test_the_time_is_that_of_now(worker):
    form = "%Y-%m-%d %H:%M:%S"
    before = datetime.now() - timedelta(seconds=1)  # the form cuts fractions
    text = ChatTemplate(f"{{{{ strftime_now('{form}') }}}}", worker=worker).render(MESSAGES)
    assert before <= datetime.strptime(text, form) <= datetime.now()


# --- Bounds ------------------------------------------------------------------------------------


def test_what_a_template_may_write_is_counted_to_the_character(worker):
    def answer(source, max_chars):
        request = {"source": source, "context": {}, "max_chars": max_chars, "cpu_seconds": 3}
        return worker.request(request, 2.0)

    for source in ("{{ 'é' * 100 }}", "{% for i in range(50) %}xy{% endfor %}", "x" * 100):
        assert answer(source, 100) == {"text": answer(source, 999)["text"]}
        assert answer(source, 99)["message"] == "it wrote more than 99 characters"


def test_what_a_template_may_write_grows_with_its_input(worker, monkeypatch):
    """1 Mi characters, and 4 for each of the template's source and of the input's JSON."""
    asked = []

    class Recorder:
        def request(self, request, seconds):
            asked.append(request["max_chars"])
            return {"text": ""}

    for content in ("", "x" * 1000):
        ChatTemplate("{{ 1 }}", worker=Recorder()).render([{"role": "user", "content": content}])
    assert asked[1] - asked[0] == 4 * 1000
    ChatTemplate("{{ 1 }}" + "y" * 50, worker=Recorder()).render([{"role": "user", "content": ""}])
    assert asked[2] - asked[0] == 4 * 50
    assert (1 << 20) < asked[0] < (1 << 20) + 4 * 500
    ChatTemplate("", worker=Recorder()).render([{"role": "user", "content": "x" * (20 << 20)}])
    assert asked[3] == 64 << 20


def test_a_source_at_the_bound_is_taken():
    assert ChatTemplate("x" * (1 << 20)).source
    with pytest.raises(ModelFormatError, match="has 1048577 characters; the limit is 1048576"):
        ChatTemplate("x" * ((1 << 20) + 1))


def test_messages_at_the_bound_are_taken():
    message = {"role": "user", "content": "x"}
    assert len(check_messages([message] * 2048)) == 2048
    with pytest.raises(InvalidRequestError, match="holds 2049 messages; 1 to 2048"):
        check_messages([message] * 2049)


@pytest.mark.parametrize("depth", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("make", [lambda x: [x], lambda x: {"k": x}], ids=["lists", "objects"])
def test_depth_of_what_a_template_gets(worker, depth, make):
    value = "leaf"
    for _ in range(depth - 1):
        value = make(value)  # the text within is a level too
    template = ChatTemplate("{{ messages[0].content }}", worker=worker)
    call = [{"role": "user", "content": "x", "more": value}]
    if depth <= 64:
        assert encode_chat(make_bpe(), template, call)
    else:
        with pytest.raises(InvalidRequestError, match="nested deeper than 64"):
            encode_chat(make_bpe(), template, call)


def test_what_a_template_raises_is_cut(worker):
    for length in (499, 500, 501):
        template = ChatTemplate(f"{{{{ raise_exception('!' * {length}) }}}}", worker=worker)
        with pytest.raises(InvalidRequestError) as caught:
            template.render(MESSAGES)
        assert str(caught.value) == "!" * min(length, 500)


def test_reserved_names_are_all_that_a_template_gets():
    for name in ("messages", "tools", "documents", "add_generation_prompt", "bos_token",
                 "eos_token", "raise_exception", "strftime_now", "self"):  # fmt: skip
        with pytest.raises(InvalidRequestError, match=f"'{name}'"):
            ChatTemplate("x").render(MESSAGES, template_kwargs={name: 1})
    assert len(chat_template.RESERVED_NAMES) == 9


# --- Control tokens in the text of users -------------------------------------------------------

TOKENS = {"<a>": 1, "<ab>": 2, "<a><": 3, "b>": 4, "": 5}
ALPHABET = "<ab>"


def longest_first(text):
    """Tokens from left to right, at each position the longest that begins there."""
    found, place = [], 0
    while place < len(text):
        lengths = [len(token) for token in TOKENS if token and text.startswith(token, place)]
        if lengths:
            found.append((place, place + max(lengths)))
        place += max(lengths, default=1)
    return found


def open_end(text):
    """The longest end of a text, without whitespace, with which a token could begin."""
    end = len(text.rstrip())
    for start in range(end):
        if any(token.startswith(text[start:end]) for token in TOKENS if token):
            return start, end
    return None


def test_control_tokens_are_found_in_every_short_text():
    finder = ControlFinder(TOKENS)
    for length in range(7):
        for chars in itertools.product(ALPHABET, repeat=length):
            text = "".join(chars)
            assert list(finder.find_all(text)) == longest_first(text), text
            for tail in ("", " ", "\n "):
                assert finder.find_open_end(text + tail) == open_end(text + tail), text
