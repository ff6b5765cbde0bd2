"""Refusals of a conversion, each one line that says what would be right."""

import shutil
from collections import namedtuple

import pytest
import torch

from tests.dsv4_files import TINY, WRITERS, released_tensors, save_folder, write_released
from tests.gguf_files import tiny_model
from tiercel.errors import ArgumentError, ModelNotFoundError, UnsupportedModelError
from tiercel.models import convert_plan
from tiercel.models.convert_plan import plan_conversion

Usage = namedtuple("Usage", "total used free")


def refusal(folder, out, kind=ArgumentError, *, can_replace=False):
    with pytest.raises(kind) as caught:
        plan_conversion(folder, out, can_replace=can_replace)
    text = f"{caught.value} {caught.value.hint}"
    assert text.isprintable()
    assert len(text) < 300
    assert caught.value.hint.endswith(".")
    return text


def test_other_models_are_refused(tmp_path):
    out = tmp_path / "out"
    refusal(tmp_path / "none", out, ModelNotFoundError)
    gguf = tiny_model(tmp_path / "m.gguf")
    assert "m.gguf: this is a GGUF file of the arch" in refusal(gguf, out, UnsupportedModelError)
    gguf = WRITERS["gguf_mxfp4"](tmp_path)
    assert "Only safetensors folders of Deep" in refusal(gguf, out, UnsupportedModelError)


def test_folders_without_mxfp4_experts_are_refused(tmp_path):
    floats = WRITERS["transformers_disk"](tmp_path / "floats")
    out = tmp_path / "out"
    text = refusal(floats, out, UnsupportedModelError)
    assert text == "floats: the experts are F32. Only experts in MXFP4 can be converted."


def test_stacks_of_experts_are_refused(tmp_path):
    tensors = released_tensors()
    count = 6
    for layer in range(4):
        prefix = f"layers.{layer}.ffn.experts."
        parts = {
            (part, end): torch.stack(
                [tensors.pop(f"{prefix}{i}.{part}.{end}").view(torch.uint8) for i in range(count)]
            )
            for part in ("w1", "w2", "w3")
            for end in ("weight", "scale")
        }
        for end, ours in (("weight", ""), ("scale", "_scale_inv")):
            both = torch.cat((parts["w1", end], parts["w3", end]), 1)
            tensors[f"{prefix}gate_up_proj{ours}"] = both
            tensors[f"{prefix}down_proj{ours}"] = parts["w2", end]
    folder = save_folder(tmp_path / "in", tensors)
    text = refusal(folder, tmp_path / "out", UnsupportedModelError)
    assert "gate_up_proj' is not one expert's matrix under its released name" in text


def test_folders_that_hold_each_other_are_refused(tmp_path):
    folder = write_released(tmp_path / "models/in")
    (tmp_path / "link").symlink_to(folder)
    for out in (folder, folder / "out", folder / "..", tmp_path, tmp_path / "link/out"):
        text = refusal(folder, out, can_replace=True)
        assert "the folder to write and that of the model must not hold each other." in text
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_place_that_is_taken_is_refused(tmp_path):
    out = tmp_path / "out"
    assert "out: there is no folder none" in refusal(TINY, tmp_path / "none/out")
    out.touch()
    assert "out: this is a file. Name a folder" in refusal(TINY, out, can_replace=True)
    out.unlink()
    write_released(out)
    assert "out: the folder is not empty. Name a new one, or give --force" in refusal(TINY, out)
    assert plan_conversion(TINY, out, can_replace=True).is_replacing
    (out / "thesis.tex").touch()
    text = refusal(TINY, out, can_replace=True)
    assert "out: the folder holds 'thesis.tex', which is no file of a model." in text
    (tmp_path / "new.partial").symlink_to("nowhere")
    text = refusal(TINY, tmp_path / "new")
    assert "new: new.partial is there: another conversion writes it, or one was killed." in text


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    assert not plan_conversion(TINY, tmp_path / "out", can_replace=False).is_replacing


def test_too_little_disk_is_refused(tmp_path, monkeypatch):
    plan = plan_conversion(TINY, tmp_path / "out", can_replace=False)
    num_bytes = sum(entry.nbytes for shard in plan.shards.values() for entry in shard)
    for free, is_enough in ((num_bytes + (2 << 20), True), (num_bytes, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free, 0, free))
        if is_enough:
            plan_conversion(TINY, tmp_path / "out", can_replace=False)
    text = refusal(TINY, tmp_path / "out")
    assert text.startswith("out: the conversion takes 0.0 GB and the disk has 0.0 GB left. Free")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("config.json", True),
        ("tokenizer.model", True),
        ("model-00001-of-00002.safetensors", True),
        ("encoding", True),
        ("LICENSE", True),
        ("notes.tex", False),
        (".ssh", False),
        ("Documents", False),
    ],
)
def test_names_of_model_files(name, is_one):
    assert convert_plan.is_model_file(name) == is_one
