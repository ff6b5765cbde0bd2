"""Tools whose schema names no properties: what the grammar of each format lets through."""

import pytest

from tests.grammar_walk import CONTEXT, Walker
from tests.serve.generation.tools.call_writers import WRITERS, Tool
from tests.serve.generation.tools.test_tools import use_of
from tests.tiny_llm import LLAMA
from tiercel.grammar.spec import compile_spec
from tiercel.models.source import open_source
from tiercel.serve.generation.tools.parsers.format import arguments_schema

# Schema of the arguments, and whether it takes what it does not name.
SCHEMAS = [
    (None, False),
    ({}, False),
    ({"type": "object"}, True),
    ({"type": "object", "additionalProperties": True}, True),
    ({"type": "object", "additionalProperties": False}, False),
    ({"type": "object", "properties": {}}, False),
    ({"type": "object", "properties": {}, "additionalProperties": True}, True),
]
# Formats that write each argument by a rule of its own: without a name there is no rule.
BY_NAME_ALONE = {"pythonic", "deepseek_v32", "deepseek_v4"}


@pytest.fixture(scope="module")
def tiny():
    source = open_source(LLAMA)
    return Walker(source.tokenizer(None), source.config.vocab_size)


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_that_a_schema_does_not_name(tiny, name):
    for parameters, takes_more in SCHEMAS:
        use = use_of(name, "required", tools=(Tool("f", parameters),))
        spec = compile_spec(None, max_tokens=CONTEXT, calls=use)
        for arguments in ({}, {"a": "b"}):
            is_taken = not arguments or (takes_more and name not in BY_NAME_ALONE)
            text = WRITERS[name]([("f", arguments)])
            assert tiny.accepts(tiny.matcher(spec), text) == is_taken, (parameters, arguments)


@pytest.mark.parametrize(("parameters", "takes_more"), SCHEMAS)
def test_the_schema_says_whether_more_is_taken(parameters, takes_more):
    schema = arguments_schema(Tool("f", parameters))
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is takes_more


@pytest.mark.parametrize(
    "keyword", ["patternProperties", "allOf", "anyOf", "oneOf", "$ref", "additionalProperties"]
)
def test_keywords_that_name_properties_elsewhere_leave_the_schema_open(keyword):
    given = {"properties": {"a": {}}, keyword: {"x": 1}}
    schema = arguments_schema(Tool("f", given))
    assert schema == {"type": "object", **given}
