"""Which published sizes the kernel between two attentions takes, how, and why not."""

from __future__ import annotations

import pytest

from tiercel.kernels.fused.fused_layer_tail_geometry import (
    ChainShape,
    ChainTypes,
    Geometry,
    Matrix,
    partition,
    partition_layer,
    refuse_width,
)
from tiercel.kernels.fused.fused_refusal import Refusal

H200_SMS = 132
FOUR = ChainTypes(o=False, gate_up=False, down=False)
SIX = ChainTypes(o=False, gate_up=False, down=True, v=True)
# Width, width of attention's outputs, of down's inputs, rows of q and k and of v; then the most
# tokens of a launch, or a reason.
PUBLISHED = {
    "qwen3-0.6b": (ChainShape(1024, 2048, 3072, 3072, 1024), 16),
    "qwen3-1.7b": (ChainShape(2048, 2048, 6144, 3072, 1024), 16),
    "qwen3-4b": (ChainShape(2560, 4096, 9728, 5120, 1024), 16),
    "qwen3-8b": (ChainShape(4096, 4096, 12288, 5120, 1024), 16),
    "qwen3-14b": (ChainShape(5120, 5120, 17408, 6144, 1024), 16),
    "qwen3-32b": (ChainShape(5120, 8192, 25600, 9216, 1024), 16),
    "llama3-1b": (ChainShape(2048, 2048, 8192, 2560, 512), 16),
    "llama3-3b": (ChainShape(3072, 3072, 8192, 4096, 1024), 16),
    "llama3-8b": (ChainShape(4096, 4096, 14336, 5120, 1024), 16),
    "llama3-70b": (ChainShape(8192, 8192, 28672, 9216, 1024), 16),
    "qwen2.5-7b": (ChainShape(3584, 3584, 18944, 4096, 512), 16),
    "gemma3-1b": (ChainShape(1152, 1024, 6912, 1280, 256), "hidden_size is 1152"),
    "gemma3-4b": (ChainShape(2560, 2048, 10240, 3072, 1024), 16),
    "gemma3-12b": (ChainShape(3840, 4096, 15360, 6144, 2048), "hidden_size is 3840"),
    "gemma3-27b": (ChainShape(5376, 4096, 21504, 6144, 2048), "hidden_size is 5376"),
}


@pytest.mark.parametrize("types", [FOUR, SIX], ids=["four", "six"])
@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size, types):
    shape, expected = PUBLISHED[size]
    found = partition(shape, types, H200_SMS)
    if isinstance(expected, str):
        assert found == Refusal(f"{expected}, not a multiple of 512")
    else:
        assert found == Geometry(shape, types, 128, expected)


def test_what_is_published_and_dealt():
    geometry = partition(PUBLISHED["qwen3-4b"][0], FOUR, H200_SMS)
    assert geometry.columns == (2560 + 9728 + 2560) // 256
    assert geometry.groups == 80


@pytest.mark.parametrize(("num_sms", "ctas"), [(9, 8), (47, 46), (128, 128), (132, 128)])
def test_ctas_are_pairs_of_sms(num_sms, ctas):
    assert partition(ChainShape(512, 512, 512, 32), FOUR, num_sms).ctas == ctas


def test_wide_attention_leaves_room_for_fewer_tokens():
    """17 columns a half are a class of 5; two tiles of tokens have slots for 4."""
    for attended, most in ((8192, 16), (8704, 8)):
        assert partition(ChainShape(4096, attended, 8192, 512), FOUR, 128).max_tokens == most


def test_slots_are_as_many_as_a_width_needs():
    """So that as many units as possible are in flight."""
    for attended, slots, stages in ((6144, 12, 2), (6656, 16, 1)):
        ring = partition(ChainShape(4096, attended, 8192, 512), SIX, 128).ring(2)
        assert (ring.slots, ring.stages) == (slots, stages)


def test_a_refusal_says_what_does_not_fit():
    shape = ChainShape(4096, 4096, 12288, 5120, 1024)
    reasons = {
        (shape, 1): "the GPU has 1 SMs",
        (shape, 63): "hidden_size is 4096; at most 3968 fits",
        (ChainShape(4096, 4096, 12288, 5136), 132): "q and k have 5136 rows, not a multiple of 32",
        (ChainShape(4096, 0, 12288, 5120), 132): "num_heads * head_dim is 0, not a multiple of 512",
        (ChainShape(4096, 16384, 12288, 5120), 132): "16384 columns do not fit shared memory",
    }
    for (refused, num_sms), reason in reasons.items():
        assert partition(refused, FOUR, num_sms) == Refusal(reason)


O_PROJ, GATE_UP, DOWN = (
    Matrix("Q4_K", *shape) for shape in ((512, 1024), (3072, 512), (512, 1536))
)
QKV = Matrix("Q4_K", 256, 512)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ChainShape(512, 1024, 1536, 256)),
        ({"qkv": []}, ChainShape(512, 1024, 1536, 0)),
        ({"qkv": [QKV, Matrix("Q6_K", 64, 512)]}, ChainShape(512, 1024, 1536, 256, 64)),
        ({"qkv": [QKV, Matrix("Q4_K", 64, 512)]}, "q, k and v: two segments of one type"),
        ({"qkv": [QKV, QKV, QKV]}, "q, k and v: 3 segments of different types"),
        ({"o": [Matrix("Q5_K", 512, 1024)]}, "o: Q5_K; the kernel reads Q4_K and Q6_K"),
        ({"gate_up": [GATE_UP, GATE_UP]}, "gate and up: 2 segments of different types"),
        ({"o": [Matrix("Q4_K", 256, 1024)]}, "matrices of shapes [(256, 1024)"),
        ({"o": [Matrix("Q4_K", 512, 768)]}, "num_heads * head_dim is 768, not a multiple of 512"),
    ],
    ids=str,
)
def test_matrices_of_a_layer(changes, expected):
    parts = {"o": [O_PROJ], "gate_up": [GATE_UP], "down": [DOWN], "qkv": [QKV]} | changes
    found = partition_layer(**parts, num_sms=16)
    if isinstance(expected, str):
        assert found.reason.startswith(expected)
    else:
        assert found.shape == expected


def test_types_of_a_layer_are_told_apart():
    six = [Matrix("Q6_K", 512, 1536)]
    qkv = [QKV, Matrix("Q6_K", 64, 512)]
    assert partition_layer([O_PROJ], [GATE_UP], six, qkv, 16).types == SIX


def test_widths_that_are_not_faster_go_kernel_by_kernel():
    refused = {size for size, (shape, _) in PUBLISHED.items() if refuse_width(shape.hidden)}
    assert refused == {"qwen3-0.6b", "llama3-70b", "gemma3-1b"}
    assert refuse_width(1024).reason.startswith("hidden_size is 1024; below 2048 and from 8192 on")
    assert refuse_width(2047)
    assert refuse_width(2048) is None
