"""The start of a process: no collection meanwhile, PyTorch's library loaded before its import."""

import gc
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tiercel import cold_start

LOADED_BEFORE_PYTORCH = """
import sys
from tiercel.cold_start import preload_pytorch
thread = preload_pytorch()
if thread is not None:
    thread.join()
    assert "torch" not in sys.modules
    assert "libtorch_cpu.so" in open("/proc/self/maps").read()
import torch
assert torch.arange(3).sum() == 3
assert preload_pytorch() is None
"""

META_KERNELS_RUN_LATE = """
import sys
from tiercel.cold_start import postpone_meta_kernels
postpone_meta_kernels()
import torch
from torch import _meta_registrations as module
assert sys.modules["torch._meta_registrations"] is module
has_run = "register_meta" in vars(module)
assert has_run == (torch.version.cuda is not None or sys.platform != "linux"), has_run
assert torch.nn.functional.softmax(torch.zeros(4), 0).sum() == 1
assert not hasattr(module, "__path__") and has_run == ("register_meta" in vars(module))
from torch._meta_registrations import register_meta
assert callable(register_meta)
windows = torch.empty(2, 3, 8, 8, device="meta", requires_grad=True)
shape = torch.nn.functional.fractional_max_pool2d(windows, 2, output_size=4).shape
assert shape == (2, 3, 4, 4)  # by a kernel of that module alone
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    assert torch.linalg.inv(torch.empty(3, 3)).shape == (3, 3)
"""


def test_the_collector_pauses_and_what_was_made_is_frozen():
    before = gc.get_freeze_count()
    try:
        with cold_start.paused_collector():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with cold_start.paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_the_collector_resumes_after_an_error():
    with pytest.raises(KeyboardInterrupt), cold_start.paused_collector():
        raise KeyboardInterrupt
    gc.unfreeze()
    assert gc.isenabled()


def test_the_library_is_loaded_before_pytorch():
    subprocess.run([sys.executable, "-c", LOADED_BEFORE_PYTORCH], check=True, timeout=120)


@pytest.mark.parametrize("files", [(), ("libtorch_cpu.so", "libtorch_cuda.so")])
def test_nothing_is_loaded_without_the_library_or_for_gpus(files, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    for name in files:
        (tmp_path / "lib" / name).touch()
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert cold_start.preload_pytorch() is None


def test_a_broken_library_is_left_to_pytorch(tmp_path):
    path = tmp_path / "libtorch_cpu.so"
    path.write_bytes(b"no library")
    cold_start._load(str(path).encode())


def test_meta_kernels_run_when_they_are_asked_for():
    subprocess.run([sys.executable, "-c", META_KERNELS_RUN_LATE], check=True, timeout=120)


def test_meta_kernels_are_left_alone_once_pytorch_is_there():
    import torch  # noqa: F401

    before = list(sys.meta_path)
    cold_start.postpone_meta_kernels()
    assert sys.meta_path == before
