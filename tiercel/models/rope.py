"""Tables of cos and sin for rotary embedding, computed in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tiercel.models.config import RopeConfig

_CHUNK_POSITIONS = 1 << 16  # of a table: 16 MB of float64 at 32 frequencies


def inverse_frequencies(rope: RopeConfig, factors: Tensor | None = None) -> Tensor:
    """Angle per position of each pair, (rotary_dim / 2,) float64.

    Args:
        rope: base and scaling.
        factors: (rotary_dim / 2,), divides the frequencies (`rope_freqs` of a GGUF file); None for
            none.

    Source: "YaRN", arXiv 2309.00071; Llama 3's scaling as in transformers' modeling_rope_utils.
    """
    half = rope.rotary_dim // 2
    frequencies = rope.base ** (-torch.arange(half, dtype=torch.float64) / half)
    if factors is not None:
        frequencies = frequencies / factors.double()
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies)
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _yarn(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    def dimension(turns: float) -> float:
        length = rope.original_context / (2 * math.pi * turns)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.base))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    pair = torch.arange(frequencies.numel(), dtype=torch.float64)
    kept = 1 - ((pair - low) / max(0.001, high - low)).clamp(0, 1)
    return frequencies * ((1 - kept) / rope.factor + kept)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    turns = rope.original_context * frequencies / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return frequencies * ((1 - smooth) / rope.factor + smooth)


def rope_table(rope: RopeConfig, num_positions: int, factors: Tensor | None = None) -> Tensor:
    """Cos and sin of every position.

    Angles are float64 before the rounding: in float32 they are 0.03 rad off near 1 M tokens.

    Returns:
        (num_positions, 2, rotary_dim / 2) float32.
    """
    frequencies = inverse_frequencies(rope, factors)
    scale = 1.0
    if rope.scaling == "yarn":
        default = 1 + 0.1 * math.log(rope.factor) if rope.factor > 1 else 1.0
        scale = rope.attention_factor or default
    table = torch.empty(num_positions, 2, frequencies.shape[0])
    for start in range(0, num_positions, _CHUNK_POSITIONS):
        stop = min(start + _CHUNK_POSITIONS, num_positions)
        angles = torch.outer(torch.arange(start, stop, dtype=torch.float64), frequencies)
        table[start:stop, 0] = angles.cos() * scale
        table[start:stop, 1] = angles.sin() * scale
    return table
