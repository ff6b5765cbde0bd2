"""Tiercel: an LLM inference engine for quantised language models.

The public names are resolved on first use, so that `import tiercel` and the command line's help
load no PyTorch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from tiercel.version import __version__

if TYPE_CHECKING:
    from tiercel.async_llm import AsyncLLM
    from tiercel.errors import (
        ArgumentError,
        ContextLengthError,
        InternalError,
        InvalidRequestError,
        ModelFormatError,
        ModelNotFoundError,
        OutOfMemoryError,
        TiercelError,
        UnsupportedModelError,
    )
    from tiercel.llm import LLM
    from tiercel.params import SamplingParams, StructuredOutputs

__all__ = [
    "LLM",
    "ArgumentError",
    "AsyncLLM",
    "ContextLengthError",
    "InternalError",
    "InvalidRequestError",
    "ModelFormatError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "SamplingParams",
    "StructuredOutputs",
    "TiercelError",
    "UnsupportedModelError",
    "__version__",
]

_MODULES = {
    "LLM": "tiercel.llm",
    "AsyncLLM": "tiercel.async_llm",
    "SamplingParams": "tiercel.params",
    "StructuredOutputs": "tiercel.params",
}
_ENGINES = ("LLM", "AsyncLLM")  # the names that import PyTorch


def __getattr__(name: str) -> object:
    """Import the module that defines a public name (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'tiercel' has no attribute {name!r}")
    if name in _ENGINES and "torch" not in sys.modules:
        importlib.import_module("tiercel.env").shorten_openmp_spins()
    module = importlib.import_module(_MODULES.get(name, "tiercel.errors"))
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
