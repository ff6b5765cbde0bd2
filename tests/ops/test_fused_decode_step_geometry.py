"""Which decoders the kernel of a whole decode step takes, how, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tiercel.kernels.fused.fused_decode_step_geometry import (
    MATRICES,
    MOST_TOKENS,
    DecoderShape,
    StepGeometry,
    partition,
    refuse_shape,
)
from tiercel.kernels.fused.fused_refusal import CTAS, SMEM_BYTES, Refusal, refuse_gpu

QWEN3_8B = DecoderShape(36, 4096, 12288, 32, 8, 128, 128, 40960)
PLAIN = dict.fromkeys(MATRICES, ("Q4_K",)) | {"gate_up": ("Q4_K", "Q4_K")}
MIXED = PLAIN | {"v": ("Q6_K",), "down": ("Q6_K",)}


@pytest.mark.parametrize("inner", [12288, 14336, 4096, 3584])
def test_sizes_that_fit(inner):
    assert refuse_shape(replace(QWEN3_8B, intermediate_size=inner)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 2560}, "hidden_size is 2560; the kernel is built for 4096"),
        ({"num_heads": 40}, "num_heads is 40; the kernel is built for 32"),
        ({"num_kv_heads": 32}, "num_kv_heads is 32; the kernel is built for 8"),
        ({"head_dim": 64}, "head_dim is 64; the kernel is built for 128"),
        ({"rotary_dim": 64}, "rotary_dim is 64; the kernel is built for 128"),
        ({"intermediate_size": 14330}, "intermediate_size is 14330, not a multiple of 256"),
        ({"intermediate_size": 16640}, "intermediate_size is 16640; at most 16384 fits"),
        ({"intermediate_size": 9216}, "intermediate_size is 9216; it must fill 7/8 of 12288"),
        ({"num_layers": 97}, "num_layers is 97; at most 96 fit"),
        ({"max_tokens": 262144}, "contexts have up to 262144 tokens; at most 131072 fit"),
        ({"unsupported": "q, k and v have biases"}, "q, k and v have biases"),
    ],
    ids=str,
)
def test_a_refusal_says_what_does_not_fit(changes, reason):
    found = refuse_shape(replace(QWEN3_8B, **changes))
    assert found.reason.startswith(reason)
    assert partition(replace(QWEN3_8B, **changes), [PLAIN]) == found


def test_the_largest_sizes_fit():
    assert refuse_shape(replace(QWEN3_8B, num_layers=96, max_tokens=MOST_TOKENS)) is None
    assert refuse_shape(replace(QWEN3_8B, max_tokens=MOST_TOKENS + 1))


def test_masks_name_the_types():
    v_and_down = 1 << MATRICES.index("v") | 1 << MATRICES.index("down")
    assert partition(QWEN3_8B, [PLAIN, MIXED]) == StepGeometry((0, v_and_down), 3)


def test_a_type_that_does_not_fit_is_named_with_its_layer():
    reasons = {
        "q of layer 1 is Q8_0; the kernel reads Q4_K and Q6_K": {"q": ("Q8_0",)},
        "gate_up of layer 1 is of two types, Q4_K and Q6_K": {"gate_up": ("Q4_K", "Q6_K")},
        "gate_up of layer 1 is F16; the kernel reads Q4_K and Q6_K": {"gate_up": ("Q4_K", "F16")},
    }
    for reason, changes in reasons.items():
        assert partition(QWEN3_8B, [PLAIN, PLAIN | changes]) == Refusal(reason)


def test_a_gpu_that_does_not_fit_is_told_why():
    assert refuse_gpu((9, 0), 132, SMEM_BYTES) is None
    assert refuse_gpu((9, 0), CTAS, SMEM_BYTES) is None
    reasons = {
        "compute capability 8.0, not 9.0": ((8, 0), 132, SMEM_BYTES),
        "the GPU has 114 SMs, fewer than 128": ((9, 0), 114, SMEM_BYTES),
        f"not {SMEM_BYTES}": ((9, 0), 132, SMEM_BYTES - 1),
    }
    for reason, gpu in reasons.items():
        assert reason in refuse_gpu(*gpu).reason
