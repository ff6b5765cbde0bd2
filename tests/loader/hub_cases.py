"""A hub with a few repositories, and helpers for its tests."""

import pytest

from tiercel.errors import ModelNotFoundError
from tiercel.loader import hub

GGUF = b"GGUF" + bytes(range(251)) * 2000  # half a megabyte, eight pieces of the server
OTHER = b"GGUF" + bytes(range(7)) * 3000
FOLDER = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 40,
    "README.md": b"words",
}
REPOSITORIES = {
    "acme/tiny": {"tiny-Q4_K_M.gguf": GGUF, "tiny-Q8_0.gguf": OTHER, "README.md": b"words"},
    "acme/folder": FOLDER,
    "acme/split": {
        "q/m-00001-of-00002.gguf": OTHER + b"1",
        "q/m-00002-of-00002.gguf": OTHER + b"2",
    },
}
MODEL = "acme/tiny"
FILE = "tiny-Q4_K_M.gguf"


def resolve(model=MODEL, offline=False, report=None):
    return hub.resolve(model, offline=offline, report=report)


def pull(model=MODEL, offline=False, report=None, **kwargs):
    return hub.pull(model, offline=offline, report=report, **kwargs)


def refusal(function, *args, **kwargs):
    """The message and hint of the refusal, which must be one line."""
    with pytest.raises(ModelNotFoundError) as caught:
        function(*args, **kwargs)
    text = f"{caught.value} {caught.value.hint}"
    assert "\n" not in text
    return text


def file_names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def leftovers(folder):
    return [name for name in file_names(folder) if name.endswith(".part")]
