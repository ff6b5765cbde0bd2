"""Pools of ranks, and a thread for each, for the tests of this folder."""

import pytest
import torch

from tests.parallel.ranks import rank_pool


@pytest.fixture(scope="session")
def two_ranks():
    with rank_pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks():
    with rank_pool(4) as pool:
        yield pool


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
