"""Pools of ranks for the tests of this folder."""

import pytest

from tests.parallel.ranks import rank_pool


@pytest.fixture(scope="session")
def two_ranks():
    with rank_pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks():
    with rank_pool(4) as pool:
        yield pool
