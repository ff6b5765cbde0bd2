"""A tiny model for the tests of a module, and what each test must leave behind: nothing."""

import pytest

from tests.tiny_llm import assert_idle, open_tiny


@pytest.fixture(scope="module")
def llm():
    with open_tiny() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nothing_stays_behind(request):
    """After each test on the shared model, all blocks and rows are free."""
    yield
    if "llm" in request.fixturenames:
        assert_idle(request.getfixturevalue("llm"))
