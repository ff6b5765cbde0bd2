"""Engine processes of these tests are forks."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _forks(forked_engines):
    pass
