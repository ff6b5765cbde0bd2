"""Files whose container is sound but whose hyperparameters, tensors or tokenizer are not."""

import pytest

from tests.gguf_files import Stored, tiny_model
from tests.hostile_files import model_hostiles
from tiercel.errors import ModelFormatError, UnsupportedModelError
from tiercel.loader import names
from tiercel.models.source import open_source

HOSTILES = dict(model_hostiles())


@pytest.mark.reliability
@pytest.mark.parametrize("name", HOSTILES)
def test_refused_in_one_line_naming_the_file(tmp_path, name):
    path = tmp_path / "model.gguf"
    HOSTILES[name](path)
    with pytest.raises((ModelFormatError, UnsupportedModelError)) as raised:
        open_source(path)
    assert str(raised.value).startswith("model.gguf: ")
    assert f"{raised.value}{raised.value.hint}".isprintable()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_sound_twin_is_accepted(tmp_path, arch):
    path = tmp_path / "model.gguf"
    tiny_model(path, arch)
    source = open_source(path)
    assert source.config.arch == arch
    assert list(source.verify()) == []


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_missing_tensor_is_named_as_its_file_would(tmp_path, arch):
    path = tiny_model(tmp_path / "model.gguf", arch, tensors={"blk.1.ffn_norm.weight": None})
    with pytest.raises(ModelFormatError, match=r"tensor 'blk\.1\.ffn_norm\.weight' is missing"):
        open_source(path)


@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])
def test_names_of_files_and_ours_lead_back(tmp_path, arch):
    source = open_source(tiny_model(tmp_path / "model.gguf", arch, tied=False))
    override = source.family.hf_names_override
    for ours, stored in source.names.items():
        assert names.to_gguf(ours) == stored
        assert names.from_hf(names.to_hf(ours, override), override) == ours


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("none", 1.0)),
        ({"rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"rope.scale_linear": 2.0}, ("linear", 2.0)),
        ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, ("linear", 4.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ("none", 1.0)),
    ],
)
def test_a_rotary_factor_without_a_type_is_linear(tmp_path, keys, expected):
    metadata = {f"llama.{key}": value for key, value in keys.items()}
    rope = open_source(tiny_model(tmp_path / "model.gguf", metadata=metadata)).config.rope
    assert (rope.scaling, rope.factor) == expected


def test_other_constants_of_rotary_scaling_are_refused(tmp_path):
    key = "qwen3.rope.scaling.yarn_beta_fast"
    tiny_model(tmp_path / "model.gguf", "qwen3", metadata={key: 16.0})
    with pytest.raises(UnsupportedModelError, match=r"yarn_beta_fast is 16\."):
        open_source(tmp_path / "model.gguf")
    open_source(tiny_model(tmp_path / "model.gguf", "qwen3", metadata={key: 32.0}))


@pytest.mark.parametrize("pattern", [["a", "b"], [0.5, 1.0], [2, 1], [True], True, "text"])
def test_a_pattern_of_windows_that_is_none(tmp_path, pattern):
    metadata = {"gemma3.attention.sliding_window_pattern": pattern}
    path = tiny_model(tmp_path / "model.gguf", "gemma3", metadata=metadata)
    with pytest.raises(ModelFormatError, match="sliding_window_pattern is"):
        open_source(path)


@pytest.mark.parametrize("pattern", [[True, False], [1, 0]])
def test_a_pattern_of_windows_per_layer(tmp_path, pattern):
    metadata = {"gemma3.attention.sliding_window_pattern": pattern}
    path = tiny_model(tmp_path / "model.gguf", "gemma3", metadata=metadata)
    assert open_source(path).config.layer_types == ("sliding", "full")


def test_integers_in_a_dense_decoder_are_refused(tmp_path):
    table = Stored((4, 2), 26, bytes(32))
    path = tiny_model(tmp_path / "model.gguf", "llama", tensors={"blk.1.ffn_norm.weight": table})
    with pytest.raises(UnsupportedModelError, match=r"'blk\.1\.ffn_norm\.weight': dtype is 'I32'"):
        open_source(path)
