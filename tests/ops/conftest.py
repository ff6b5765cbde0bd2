"""Kernels that run on a processor where a test asks for it."""

import pytest

from tests.launches_on_cpu import Processor
from tiercel.kernels import rtc


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    """Keeps what it compiled from test to test."""
    return Processor(tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture
def on_processor(processor, monkeypatch):
    """The same, in the place of the GPU."""
    monkeypatch.setattr(rtc, "load_kernel", processor.load_kernel)
    monkeypatch.setattr(rtc, "launch", processor.launch)
    return processor
