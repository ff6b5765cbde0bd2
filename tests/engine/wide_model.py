"""A model of Qwen3-8B's width and few layers, which the kernels for its sizes take."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import synthetic_model
from tests.tiny_llm import open_on_gpu

WIDE = synthetic_model.Shape(4096, 4, 32, 8, 128, 8192, vocab=512, context=4096)


def write_wide_model(path: Path, shape: synthetic_model.Shape = WIDE) -> Path:
    """Some layers with random weights, v and down of some in Q6_K."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synthetic_model.SHAPES, "four-layers", shape)
        synthetic_model.write("four-layers", path)
    return path


def open_wide(path, **options):
    """On a GPU; dense copies of its weights are kept where twice as much memory is left."""
    return open_on_gpu(path, gib=8, **options)
