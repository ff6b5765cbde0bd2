"""Files whose container is sound but whose hyperparameters, tensors or tokenizer are not."""

import pytest

from tests.gguf_files import tiny_model
from tests.hostile_files import model_hostiles
from tiercel.errors import ModelFormatError, UnsupportedModelError
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
