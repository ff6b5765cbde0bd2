"""`tiercel doctor`: works on any machine and reports what it found."""

import builtins
import json
import sys
from types import SimpleNamespace

import pytest
import torch

import tiercel
from tiercel.cli.main import run
from tiercel.kernels.fused.fused_refusal import SMEM_BYTES
from tiercel.kernels.runtime import rtc


def test_json(capsys, default_model):
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tiercel"] == tiercel.__version__
    assert report["torch"]["version"] == torch.__version__
    assert len(report["torch"]["gpus"]) == torch.cuda.device_count()
    assert report["packages"]["numpy"]
    assert report["system"]["cpus"] >= 1
    assert report["native_library"]["library"]
    assert report["cache"]["models"] == ["smollm2"]


def test_the_native_library_is_named_or_why_it_is_not_used(capsys, monkeypatch):
    for name, value, expected in (
        ("TIERCEL_NATIVE", "0", "not used: TIERCEL_NATIVE=0"),
        ("TIERCEL_CPU", "mmx", "not used: TIERCEL_CPU='mmx' is unknown. Use "),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert run(["doctor", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)["native_library"]
        assert report["library"].startswith(expected)


def test_text(capsys):
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (
        "tiercel ",
        "python",
        "torch",
        "cuda_build",
        "nvidia_smi",
        "fused_layer_tail",
        "folder",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("gpu", "exact", "expected"),
    [
        (None, "0", "no GPU"),
        ((9, 0, 132), "0", "can run"),
        ((9, 0, 132), "1", "switched off by TIERCEL_EXACT=1"),
        ((8, 0, 108), "1", "the GPU has compute capability 8.0, not 9.0 (Hopper)"),
        ((9, 0, 114), "0", "the GPU has 114 SMs, fewer than 128"),
    ],
    ids=str,
)
def test_fused_kernels(capsys, monkeypatch, gpu, exact, expected):
    monkeypatch.setenv("TIERCEL_EXACT", exact)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    if gpu is not None:
        sms = SimpleNamespace(multi_processor_count=gpu[2])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu[:2])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: sms)
        monkeypatch.setattr(rtc, "max_smem_bytes", lambda device: SMEM_BYTES)
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["fused_kernels"]
    assert found == dict.fromkeys(("fused_decode_step", "fused_layer_tail"), expected)


def test_pytorch_that_does_not_load_is_told(capsys, monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name == "torch":
            raise OSError("libcudart.so: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(builtins, "__import__", refuse)
    status = run(["doctor", "--json"])
    monkeypatch.undo()
    assert status == 1
    assert "libcudart.so" in json.loads(capsys.readouterr().out)["torch"]["error"]


def test_no_cache_folder_yet(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "a/b"))
    assert run(["doctor", "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert (cache["exists"], cache["writable"], cache["models"]) == (False, True, [])
    assert cache["compiled_kernels"] == 0
    assert not (tmp_path / "a").exists()


def test_compiled_kernels_are_counted(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path))
    (tmp_path / "cubins").mkdir()
    for name in ("a-1.cubin", "b-2.cubin", "c.part"):
        (tmp_path / "cubins" / name).touch()
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"]["compiled_kernels"] == 2
