"""Finding a model: who may download."""

import pytest

from tests.tiny_llm import LLAMA
from tiercel.models import source


@pytest.mark.parametrize(
    ("asked", "variable", "expected"),
    [
        (None, None, False),
        (None, "0", False),
        (None, "1", True),
        (False, "1", False),
        (True, "0", True),
        (True, None, True),
    ],
)
def test_the_caller_decides_before_the_variable(asked, variable, expected, monkeypatch):
    seen = []

    def resolve(model, *, offline, report):
        seen.append((model, offline, report))
        return LLAMA

    monkeypatch.setattr(source, "resolve", resolve)
    monkeypatch.delenv("TIERCEL_OFFLINE", raising=False)
    if variable is not None:
        monkeypatch.setenv("TIERCEL_OFFLINE", variable)
    assert source.find_source("name", offline=asked).config.arch == "llama"
    assert seen == [("name", expected, None)]
