"""Fixtures that run CUDA kernels on a processor.

A module whose kernels run for longer than they compile has `LEVEL = QUICK_TO_RUN`.
"""

import pytest

from tests.launches_on_cpu import QUICK_TO_COMPILE, Processor
from tests.products_on_cpu import Products
from tiercel.kernels.runtime import rtc


@pytest.fixture(scope="module")
def level(request):
    """Optimisation of this module's kernels."""
    return getattr(request.module, "LEVEL", QUICK_TO_COMPILE)


@pytest.fixture(scope="module")
def processor(level, tmp_path_factory):
    """A processor that keeps its compiled kernels from test to test."""
    return Processor(tmp_path_factory.mktemp("cuda_on_cpu"), level=level)


@pytest.fixture
def on_processor(processor, monkeypatch):
    """The processor in place of the GPU."""
    monkeypatch.setattr(rtc, "load_kernel", processor.load_kernel)
    monkeypatch.setattr(rtc, "launch", processor.launch)
    return processor


@pytest.fixture(scope="module")
def chosen(request):
    """Parameters of this module's tests that run: no other kernels are compiled."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


@pytest.fixture(scope="module")
def built_products(level, tmp_path_factory):
    """Products on a processor, which keep their compiled kernels from test to test."""
    return Products(tmp_path_factory.mktemp("products_on_cpu"), level=level)


@pytest.fixture
def products(built_products, monkeypatch):
    """The products on a processor, in place of the GPU."""
    monkeypatch.setattr(rtc, "load_kernel", built_products.load_kernel)
    monkeypatch.setattr(rtc, "launch", built_products.launch)
    return built_products
