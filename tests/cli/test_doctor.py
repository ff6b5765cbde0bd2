"""`tiercel doctor`: works on any machine and tells what it found."""

import builtins
import json
import sys

import torch

import tiercel
from tiercel.cli.main import run


def test_json(capsys, default_model):
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tiercel"] == tiercel.__version__
    assert report["torch"]["version"] == torch.__version__
    assert len(report["torch"]["gpus"]) == torch.cuda.device_count()
    assert report["packages"]["numpy"]
    assert report["system"]["cpus"] >= 1
    assert report["cache"]["models"] == ["smollm2"]


def test_text(capsys):
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("tiercel ", "python", "torch", "cuda_build", "nvidia_smi", "folder", "free_bytes"):
        assert word in text


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
