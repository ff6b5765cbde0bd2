"""A tiny model for the tests of a module, and a check that each test leaves nothing behind."""

import pytest

from tests.tiny_llm import assert_idle, open_tiny
from tiercel.llm import LLM


@pytest.fixture(scope="module")
def llm():
    with open_tiny() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nothing_stays_behind(request):
    """After each test on a shared model, all blocks and rows are free."""
    yield
    if "llm" in request.fixturenames:
        shared = request.getfixturevalue("llm")
        if isinstance(shared, LLM):
            assert_idle(shared)
