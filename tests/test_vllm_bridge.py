"""The bridge to vLLM, against a module that registers operators as vLLM does."""

import subprocess
import sys
import types

import pytest
import torch

from tiercel import vllm_bridge
from tiercel.errors import InstallationError
from tiercel.ops.moe_route import moe_route


class CustomOp(torch.nn.Module):
    """As in vLLM: a name is registered once, and a call goes to the form of the device."""

    op_registry: dict = {}  # noqa: RUF012 - as there

    @classmethod
    def register(cls, name):
        def decorate(op_cls):
            assert name not in cls.op_registry, f"Duplicate op name: {name}"
            op_cls.name = name
            cls.op_registry[name] = op_cls
            return op_cls

        return decorate

    def forward(self, *args, **kwargs):
        is_on_gpu = any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
        return (self.forward_cuda if is_on_gpu else self.forward_cpu)(*args, **kwargs)


@pytest.fixture(params=["custom_op", "hw_agnostic.custom_op"])
def vllm(monkeypatch, request):
    """A vLLM with `CustomOp` in one of its places."""
    monkeypatch.setattr(CustomOp, "op_registry", {})
    place = f"vllm.model_executor.{request.param}"
    parts = place.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules[place].CustomOp = CustomOp
    return sys.modules["vllm"]


@pytest.mark.usefixtures("vllm")
def test_every_operator_of_the_library_is_registered():
    found = vllm_bridge.register()
    from tiercel.ops import library

    defined = {name.split("::")[1] for name in library._LIBRARY._op_defs}
    assert set(vllm_bridge.OPERATORS) == defined
    assert set(found) == set(CustomOp.op_registry) == {f"tiercel_{name}" for name in defined}
    assert all(issubclass(module, CustomOp) for module in found.values())


@pytest.mark.usefixtures("vllm")
def test_plugins_are_called_more_than_once():
    assert vllm_bridge.register() == vllm_bridge.register()


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("form", ["forward", "forward_native", "forward_cuda"])
def test_a_module_is_its_operator(form):
    module = vllm_bridge.register()["tiercel_moe_route"]()
    logits, bias = torch.randn(5, 9), torch.randn(9)
    ids, weights = getattr(module, form)(logits, bias, 3, scale=2.5)
    expected = moe_route(logits, bias, topk=3, scale=2.5)
    assert torch.equal(ids, expected[0])
    assert torch.equal(weights, expected[1])
    assert not list(module.parameters())


def test_without_vllm_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InstallationError, match="needs vLLM, which is not installed") as caught:
        vllm_bridge.register()
    assert "pip install vllm" in caught.value.hint


def test_a_vllm_without_custom_operators_is_named(monkeypatch):
    module = types.ModuleType("vllm")
    module.__path__ = []
    monkeypatch.setitem(sys.modules, "vllm", module)
    with pytest.raises(InstallationError, match=r"this vLLM has no CustomOp in vllm\.model_"):
        vllm_bridge.register()


def test_importing_it_imports_neither_vllm_nor_pytorch():
    code = "import sys, tiercel.vllm_bridge; print({'vllm', 'torch'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"set()\n"
