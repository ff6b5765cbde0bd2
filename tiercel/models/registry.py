"""Which architectures Tiercel runs, by the names that model files use. Imported on demand.

Free of PyTorch: a family names the class that runs it (`models/model.py` imports that).
"""

from __future__ import annotations

import importlib
from typing import Any

from tiercel.errors import UnsupportedModelError
from tiercel.models.config import Architecture
from tiercel.models.sharding import ShardRules
from tiercel.models.stored import FindWeights

# One line per architecture: the name in GGUF files, the class in Hugging Face files, the record.
_GGUF = {
    "llama": "tiercel.models.llama:ARCHITECTURE",
    "qwen2": "tiercel.models.qwen3:QWEN2",
    "qwen3": "tiercel.models.qwen3:ARCHITECTURE",
    "gemma3": "tiercel.models.gemma3:ARCHITECTURE",
    "deepseek4": "tiercel.models.deepseek_v4:ARCHITECTURE",
}
_HF = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "DeepseekV4ForCausalLM": "deepseek4",
}


def _load(reference: str) -> Any:
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def architecture(name: str, file: str) -> Architecture:
    """The family that a GGUF file names.

    Raises:
        UnsupportedModelError: not one of ours; the message lists them.
    """
    if name not in _GGUF:
        shown = name if len(name) <= 40 else name[:37] + "..."
        raise UnsupportedModelError(
            f"{file}: architecture {shown!r} is not supported.",
            hint=f"Tiercel runs {', '.join(sorted(_GGUF))}.",
        )
    result: Architecture = _load(_GGUF[name])
    return result


def find_weights(family: Architecture) -> FindWeights:
    """What checks the tensors of a family that has no `names`, imported on demand."""
    result: FindWeights = _load(family.find_weights)
    return result


def shard_rules(family: Architecture) -> ShardRules:
    """How the weights of a family are split, imported on demand."""
    result: ShardRules = _load(f"{family.shards}:RULES")
    return result


def hf_architecture(names: list[str], file: str) -> Architecture:
    """The family that `architectures` of a `config.json` names.

    Raises:
        UnsupportedModelError: none of ours; the message lists them.
    """
    for name in names:
        if name in _HF:
            return architecture(_HF[name], file)
    raise UnsupportedModelError(
        f"{file}: architectures {names!r:.80} are not supported.",
        hint=f"Tiercel runs {', '.join(sorted(_HF))}.",
    )
