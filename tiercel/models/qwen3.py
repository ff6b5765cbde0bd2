"""Qwen3, and its forerunner Qwen2 (also 2.5): Llama's decoder with two differences.

Qwen3 norms each head of q and k before the rotation (the two do not commute) and its head size is a
number of its own, not hidden_size / num_heads. Qwen2 has biases on q, k and v instead.

Source: "Qwen3 Technical Report", arXiv 2505.09388; "Qwen2 Technical Report", arXiv 2407.10671.
"""

from tiercel.errors import UnsupportedModelError
from tiercel.models.config import Architecture, Fields, ModelConfig


def _refuse_sliding_window(config: ModelConfig, fields: Fields) -> ModelConfig:
    if fields.get("use_sliding_window") is True:
        raise UnsupportedModelError(
            f"{fields.file}: use_sliding_window is true.",
            hint="Tiercel runs this family with full attention only.",
        )
    return config


ARCHITECTURE = Architecture(name="qwen3", qk_norm=True, refine_hf=_refuse_sliding_window)
QWEN2 = Architecture(name="qwen2", qkv_bias=True, refine_hf=_refuse_sliding_window)
