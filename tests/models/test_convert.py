"""DeepSeek-V4 converted to NVFP4 experts: the same logits, what is rounded, what is copied."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from tests.dsv4_files import (
    CONFIG,
    NUM_LAYERS,
    TINY,
    WRITERS,
    decoded_tensors,
    released_tensors,
    save_folder,
    write_nvfp4,
    write_released,
)
from tiercel import LLM
from tiercel.errors import ArgumentError, ModelFormatError
from tiercel.loader import safetensors_write
from tiercel.models import convert_plan
from tiercel.models.convert import check_rounded, find_rounded, write_model
from tiercel.models.convert_plan import plan_conversion
from tiercel.models.source import open_source
from tiercel.quant_types import QuantType

MATRIX = "layers.1.ffn.experts.4.w3"
EXPECTED = load_file(TINY.parent / "expected.safetensors")


def quiet(_what, _done, _total):
    pass


def convert(folder, out, *, can_replace=False):
    plan = plan_conversion(folder, out, can_replace=can_replace)
    rounded = find_rounded(plan, quiet)
    write_model(plan, quiet)
    return rounded


def logits(folder, prompt):
    with LLM(folder, device="cpu", dtype="float32") as llm:
        return torch.from_numpy(llm.logits(EXPECTED[f"{prompt}.tokens"].tolist()))


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def load_folder(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def write_wide(folder, exponent, matrix=MATRIX):
    """The tiny checkpoint; one group of a matrix is `exponent` powers below the largest."""
    tensors = released_tensors()
    scale = tensors[f"{matrix}.scale"].view(torch.uint8)
    scale[:] = 120
    scale[5, 1] = 120 - exponent
    values = tensors[f"{matrix}.weight"].view(torch.uint8)
    values[0, 0] = 0x77  # 6 and 6: nothing can be doubled
    values[5, 16:32] = 0x13  # 1.5 and 0.5
    return save_folder(folder, tensors)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The tiny checkpoint with NVFP4 experts."""
    out = tmp_path_factory.mktemp("converted") / "out"
    assert convert(TINY, out) == []
    return out


def test_converted_experts_give_the_same_logits(converted):
    assert torch.equal(logits(converted, "p1"), logits(TINY, "p1"))
    assert [path.name for path in converted.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("naming", ["released", "prefixed", "scale_inv", "sharded"])
def test_each_naming_of_single_experts_is_converted(tmp_path, naming, converted, monkeypatch):
    """To the same experts, in several files too."""
    split = safetensors_write.split_shards
    monkeypatch.setattr(convert_plan, "split_shards", lambda groups: split(groups, 300_000))
    convert(WRITERS[naming](tmp_path / "in"), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 5
    expected = {n: t for n, t in load_folder(converted).items() if ".ffn.experts." in n}
    found = {n.removeprefix("model."): t for n, t in load_folder(tmp_path / "out").items()}
    for name, tensor in expected.items():
        if name.startswith("layers."):
            assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name
    stored = open_source(tmp_path / "out").stored
    assert stored["layers.3.ffn.experts.w2.weight"].qtype is QuantType.NVFP4
    assert stored["mtp.0.ffn.experts.w2.weight"].qtype is QuantType.MXFP4


def test_only_experts_of_main_layers_change(converted):
    before, after = released_tensors(), load_folder(converted)
    changed = {n for n in before if n.startswith("layers.") and ".ffn.experts." in n}
    values = {name for name in changed if name.endswith(".weight")}
    assert len(values) == NUM_LAYERS * CONFIG["n_routed_experts"] * 3
    assert after.keys() == (before.keys() - changed) | {
        name + end for name in values for end in ("", "_scale", "_scale_2")
    }
    for name, tensor in before.items():
        if name not in changed:
            assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    for name in values:
        assert torch.equal(after[name], before[name].view(torch.uint8))
        assert after[f"{name}_scale_2"].shape == ()
        assert math.frexp(float(after[f"{name}_scale_2"]))[0] == 0.5  # a power of two


def test_the_config_says_what_is_nvfp4(converted):
    config = json.loads((converted / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == {key: CONFIG[key] for key in CONFIG if key != "quantization_config"}
    for key, value in CONFIG["quantization_config"].items():
        assert quantization[key] == value  # of the FP8 matrices, which stay
    assert quantization["quant_algo"] == "MIXED_PRECISION"
    assert quantization["moe_quant_algo"] == "NVFP4"
    assert quantization["group_size"] == 16
    assert "mtp.*" in quantization["ignore"]


def test_a_mixed_folder_keeps_what_is_nvfp4(tmp_path):
    """Scalars of the NVFP4 experts that are there keep their shape, input scales too."""
    folder = write_nvfp4(tmp_path / "in")
    before, source = load_folder(folder), open_source(folder)
    convert(folder, tmp_path / "out")
    after = load_folder(tmp_path / "out")
    for name, tensor in before.items():
        if name.startswith(("layers.0.", "layers.3.")):
            assert after[name].shape == tensor.shape
            assert torch.equal(as_bytes(after[name]), as_bytes(tensor))
    assert {source.stored[f"layers.{i}.ffn.experts.w1.weight"].qtype for i in (0, 3)} == {
        QuantType.NVFP4
    }
    written = open_source(tmp_path / "out").stored
    assert {written[f"layers.{i}.ffn.experts.w1.weight"].qtype for i in range(NUM_LAYERS)} == {
        QuantType.NVFP4
    }


def test_a_layer_of_other_experts_is_on_the_ignore_list(tmp_path):
    decoded, tensors = decoded_tensors(), released_tensors()
    for name in list(tensors):
        if name.startswith("layers.2.ffn.experts."):
            tensors.pop(name)
            if name.endswith(".weight"):
                tensors[name] = decoded[name].bfloat16()
    folder = save_folder(tmp_path / "in", tensors)
    convert(folder, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["ignore"][-2:] == ["mtp.*", "layers.2.ffn.experts.*"]


@pytest.mark.parametrize("span", [18, 19, 22])
def test_a_wide_matrix_is_rounded_and_reported(tmp_path, span):
    folder = write_wide(tmp_path / "in", span - 1)
    rounded = convert(folder, tmp_path / "out")
    before = decoded_tensors(load_folder(folder))[f"{MATRIX}.weight"].double()
    after = load_folder(tmp_path / "out")
    scale = after[f"{MATRIX}.weight_scale"].double() * after[f"{MATRIX}.weight_scale_2"].double()
    codes = after[f"{MATRIX}.weight"].long()
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    grid = torch.cat((grid, -grid))
    values = grid[torch.stack((codes & 15, codes >> 4), -1).flatten(-2)]
    change = values * scale.repeat_interleave(16, -1) - before
    if span == 18:
        assert not change.any()
        assert rounded == []
        return
    (found,) = rounded
    assert (found.tensor, found.span) == (f"{MATRIX}.weight", span)
    assert found.max_error == float(change.abs().max()) > 0
    assert found.relative_error == pytest.approx(float(change.norm() / before.norm()))
    assert {int(row) for row in change.nonzero()[:, 0]} == {5}


def test_a_bound_refuses_before_anything_is_written(tmp_path):
    plan = plan_conversion(write_wide(tmp_path / "in", 18), tmp_path / "out", can_replace=False)
    rounded = find_rounded(plan, quiet)
    check_rounded(plan, rounded, rounded[0].relative_error)
    with pytest.raises(ArgumentError, match=rf"{MATRIX}\.weight' would have a relative error"):
        check_rounded(plan, rounded, 0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_scale_that_is_nan_is_refused(tmp_path):
    tensors = released_tensors()
    tensors[f"{MATRIX}.scale"].view(torch.uint8)[7, 0] = 255
    folder = save_folder(tmp_path / "in", tensors)
    with pytest.raises(ModelFormatError, match=r"experts\.4\.w3\.scale' holds the E8M0 byte 255"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_files_are_copied(tmp_path):
    folder = write_released(tmp_path / "in")
    kept = {
        "tokenizer_config.json": '{"model_max_length": 9}',
        "generation_config.json": '{"temperature": 0.5}',
        "chat_template.jinja": "{{ messages }}",
        "LICENSE": "MIT",
        "encoding/encoding_dsv4.py": "REASONING = {'low': ''}",
        "encoding/tests/case.json": "{}",
    }
    left = ["hf_quant_config.json", "README.md", "inference/model.py", ".git/config"]
    for name in (*kept, *left):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(kept.get(name, "{}"))
    (folder / "encoding/link.py").symlink_to(folder / "LICENSE")  # as in the cache of a hub
    convert(folder, tmp_path / "out")
    out = tmp_path / "out"
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert names == {*kept, "config.json", "model.safetensors", "encoding/link.py"}
    assert not (out / "encoding/link.py").is_symlink()
    for name, text in kept.items():
        assert (out / name).read_text() == text
    assert open_source(out).chat_template == "{{ messages }}"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(143), OSError(28, "full")])
@pytest.mark.parametrize("is_replacing", [False, True])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, error, is_replacing):
    out = tmp_path / "out"
    if is_replacing:
        write_released(out)
    plan = plan_conversion(TINY, out, can_replace=True)
    seen = 0

    def interrupt(_what, done, total):
        nonlocal seen
        seen = done
        assert plan.partial.is_dir()
        if done > total / 2:
            raise error

    with pytest.raises(type(error) if isinstance(error, BaseException) else error):
        write_model(plan, interrupt)
    assert seen
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out"] if is_replacing else [])
    if is_replacing:
        assert load_folder(out).keys() == released_tensors().keys()


def test_a_model_is_replaced_when_asked(tmp_path):
    out = write_released(tmp_path / "out")
    (out / "old.json").write_text("{}")
    convert(TINY, out, can_replace=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    plan = plan_conversion(TINY, tmp_path / "out", can_replace=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    with pytest.raises(OSError, match="not empty"):
        write_model(plan, quiet)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]
