"""Kernels that run on a processor where a test asks for it."""

import pytest

from tests.launches_on_cpu import Processor
from tests.products_on_cpu import Products
from tiercel.kernels.runtime import rtc


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


@pytest.fixture(scope="module")
def chosen(request):
    """Parameters of this module's tests that run: what no test needs is not compiled."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


@pytest.fixture(scope="module")
def built_products(tmp_path_factory):
    """Keeps the products that it compiled from test to test."""
    return Products(tmp_path_factory.mktemp("products_on_cpu"))


@pytest.fixture
def products(built_products, monkeypatch):
    """The same, in the place of the GPU."""
    monkeypatch.setattr(rtc, "load_kernel", built_products.load_kernel)
    monkeypatch.setattr(rtc, "launch", built_products.launch)
    return built_products
