"""Which decoders the kernel of a whole decode step takes, how, and why not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.model_shapes import MIXTURES, SHAPES, decoder_shape, step_types
from tiercel.kernels.fused.fused_decode_step_geometry import (
    GROUPS,
    LANE_COLUMNS,
    MATRICES,
    MOST_TOKENS,
    PHASES,
    RECORD,
    TEAM_HEADS,
    TILE_KEYS,
    TYPES,
    WARP_LANES,
    WARPS,
    DecoderShape,
    RowPlan,
    make_geometry,
    make_mask,
    partition,
    refuse_shape,
    select_geometry,
    select_plan,
)
from tiercel.kernels.fused.fused_refusal import CTAS, SMEM_BYTES, Refusal, refuse_gpu

QWEN3_8B = DecoderShape(36, 4096, 12288, 32, 8, 128, 128, 40960)
PLAIN = dict.fromkeys(MATRICES, ("Q4_K",)) | {"gate_up": ("Q4_K", "Q4_K")}
MIXED = PLAIN | {"v": ("Q6_K",), "down": ("Q6_K",)}


# Those of benchmarks.model_shapes that do not fit, and why.
REFUSED = {
    "smollm2-135m": "hidden_size is 576, not a multiple of 128",
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_published_size_fits_or_is_told_why(name):
    reason = REFUSED.get(name)
    assert refuse_shape(decoder_shape(name)) == (Refusal(reason) if reason else None)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in REFUSED])
def test_every_row_has_one_cta(name):
    shape = decoder_shape(name)
    geometry = make_geometry(shape, (0,) * shape.num_layers)
    sizes = {"q": shape.q_size, "k": shape.kv_size, "v": shape.kv_size, "o": shape.hidden_size}
    sizes |= {"gate_up": 2 * shape.intermediate_size, "down": shape.hidden_size}
    for matrix in MATRICES:
        parts = [part for cta in range(CTAS) for part in geometry.parts(matrix, cta)]
        assert sorted(row for part in parts for row in part) == list(range(sizes[matrix]))
        assert {len(part) for part in parts} == {geometry.part_rows(matrix)}


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in REFUSED])
def test_plans_of_every_size_fit_a_warp(name):
    shape = decoder_shape(name)
    geometry = make_geometry(shape, (0,) * shape.num_layers)
    columns = (shape.hidden_size, shape.q_size, shape.hidden_size, shape.intermediate_size)
    for phase, plan, wide in zip(PHASES, geometry.plans, columns, strict=True):
        assert plan.lanes == (1 if wide % 256 else 2)
        assert plan.blocks * plan.lanes * LANE_COLUMNS == wide
        ends = [plan.first_block(i) for i in range(plan.slices + 1)]
        widths = [after - before for before, after in pairwise(ends)]
        assert ends[0] == 0
        assert ends[-1] == plan.blocks
        assert 0 < min(widths) <= max(widths) <= min(widths) + 1
        assert plan.tile * max(widths) * plan.lanes <= WARP_LANES
        assert WARPS % plan.across == 0
        if plan.times > 1:  # a row's sum stays in a lane's register, for two rows of a warp
            assert (phase, plan.across, plan.tile) == ("down", 1, 1)


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in REFUSED])
def test_ctas_have_nearly_equal_shares(name):
    """Of the bytes of a layer; small models have fewer groups of 32 than CTAs."""
    shape = decoder_shape(name)
    geometry = make_geometry(shape, (0,) * shape.num_layers)
    counts = [len(pairs) for pairs in geometry.pairs]
    assert max(counts) == -(-shape.intermediate_size // RECORD // CTAS)
    columns = {"o": shape.q_size, "gate_up": shape.hidden_size, "down": shape.intermediate_size}
    columns |= dict.fromkeys(("q", "k", "v"), shape.hidden_size)
    shares = [
        sum(
            len(part) * columns[matrix]
            for matrix in MATRICES
            for part in geometry.parts(matrix, cta)
        )
        for cta in range(CTAS)
    ]
    most = max(shares) * CTAS / sum(shares)
    limits = {
        "gemma3-270m": 4,
        "gemma3-1b": 1.8,
        "gemma3-4b": 1.35,
        "qwen2.5-0.5b": 2.5,
        "qwen3-0.6b": 2.1,
        "qwen2.5-1.5b": 1.7,
        "qwen3-1.7b": 1.3,
        "llama3-1b": 1.35,
    }
    assert most <= limits.get(name, 1.25)


def test_plans():
    """Whole rows of 4096 columns; several rows a warp; several warps a row; slices in turn."""
    assert select_plan(4096, 48) == RowPlan(2, 16, across=1, times=1, tile=1)
    assert select_plan(1024, 64) == RowPlan(2, 4, across=1, times=1, tile=4)
    assert select_plan(5120, 64) == RowPlan(2, 20, across=4, times=1, tile=3)
    assert select_plan(12288, 32, may_wait=True) == RowPlan(2, 48, across=1, times=3, tile=1)
    assert select_plan(14336, 32, may_wait=True) == RowPlan(2, 56, across=1, times=4, tile=1)
    # No multiple of 256: lanes are dealt one by one.
    assert select_plan(1152, 64) == RowPlan(1, 9, across=1, times=1, tile=3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 2600}, "hidden_size is 2600, not a multiple of 128"),
        ({"hidden_size": 8448}, "hidden_size: 8448; at most 8192 fit"),
        ({"num_heads": 136}, "136 query heads share 8 key/value heads; at most 16 can share one"),
        ({"num_heads": 36}, "36 query heads share 8 key/value heads; at most 16 can share one"),
        (
            {"num_heads": 154, "num_kv_heads": 14, "head_dim": 64, "rotary_dim": 64},
            "groups of query heads: 154; at most 128 fit",
        ),
        ({"num_heads": 68, "num_kv_heads": 34}, "columns of o: 8704; at most 8192 fit"),
        ({"head_dim": 96}, "head_dim is 96; the kernel has heads of 64, 128 and 256"),
        ({"activation": "relu"}, "the activation is relu; the kernel has silu and gelu_tanh"),
        ({"rotary_dim": 64}, "rotary_dim is 64; the kernel rotates all 128"),
        (
            {"num_heads": 7, "num_kv_heads": 1, "head_dim": 64, "rotary_dim": 64},
            "q has 448 rows, not a multiple of 128",
        ),
        (
            {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "rotary_dim": 64},
            "k and v have 64 rows, not a multiple of 128",
        ),
        ({"intermediate_size": 14330}, "intermediate_size is 14330, not a multiple of 128"),
        ({"intermediate_size": 49408}, "intermediate_size: 49408; at most 49152 fit"),
        ({"num_layers": 97}, "num_layers: 97; at most 96 fit"),
        ({"max_tokens": 262144}, "tokens of a context: 262144; at most 131072 fit"),
    ],
    ids=str,
)
def test_a_refusal_says_what_does_not_fit(changes, reason):
    found = refuse_shape(replace(QWEN3_8B, **changes))
    assert found == Refusal(reason)
    assert partition(replace(QWEN3_8B, **changes), [PLAIN]) == found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"ranks": 8}, None),
        ({"ranks": 16}, "16 GPUs share the model, more than 8"),
        (
            {"intermediate_size": 1000},
            "intermediate_size is 1000, not a multiple of 128 (of one of 2 GPUs)",
        ),
    ],
    ids=str,
)
def test_a_part_of_a_decoder_fits_or_is_told_why(changes, reason):
    """As each of two GPUs has it: half of the heads and of the MLP's inner width."""
    half = replace(QWEN3_8B, num_heads=16, num_kv_heads=4, intermediate_size=6144, ranks=2)
    shape = replace(half, **changes)
    found = partition(shape, [PLAIN])
    assert refuse_shape(shape) == (Refusal(reason) if reason else None)
    if reason:
        assert found == Refusal(reason)
        return
    assert found.shape.matrix_sizes["o"] == (4096, 2048)
    assert found.shape.matrix_sizes["gate_up"] == (12288, 4096)
    # Each rank deals outputs of o and down out alike, whatever its inner width is.
    wider = partition(replace(shape, intermediate_size=6400), [PLAIN])
    for name in ("o", "down"):
        assert all(found.parts(name, cta) == wider.parts(name, cta) for cta in range(CTAS))


def test_the_largest_sizes_fit():
    assert refuse_shape(replace(QWEN3_8B, num_layers=96, max_tokens=MOST_TOKENS)) is None
    assert refuse_shape(replace(QWEN3_8B, max_tokens=MOST_TOKENS + 1))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 5, 8, 40, 128])
def test_tiles_of_the_longest_context_have_room(kv_heads):
    shape = replace(QWEN3_8B, num_heads=2 * kv_heads, num_kv_heads=kv_heads, num_layers=1)
    geometry = make_geometry(shape, (0,))
    assert geometry.splits * kv_heads <= CTAS
    assert geometry.most_tiles * geometry.splits * GROUPS * TILE_KEYS >= MOST_TOKENS


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sharers", "splits"),
    [
        (8, 1, 1, 32),
        (16, 1, 2, 32),
        (32, 2, 2, 32),
        (24, 2, 2, 32),
        (128, 8, 2, 8),
        (11, 1, 11, 11),
    ],
)
def test_query_heads_are_shared_in_equal_groups(heads, kv_heads, sharers, splits):
    shape = replace(QWEN3_8B, num_heads=heads, num_kv_heads=kv_heads, num_layers=1)
    geometry = make_geometry(shape, (0,))
    assert (geometry.sharers, geometry.splits) == (sharers, splits)
    assert geometry.sharers * geometry.heads * kv_heads == heads
    assert geometry.heads <= TEAM_HEADS


@pytest.mark.parametrize("window", [1, 32, 33, 512, 1024, 4096])
def test_tiles_of_a_window_have_room(window):
    shape = replace(QWEN3_8B, window=window, sliding=(True,) * 36)
    geometry = make_geometry(shape, (0,) * 36)
    # A window's first key and its last one are in tiles that others share.
    touched = max(
        (first + window - 2) // TILE_KEYS - first // TILE_KEYS + 1 for first in range(TILE_KEYS)
    )
    assert geometry.sliding_tiles * geometry.splits * GROUPS >= touched


def test_masks_name_the_types():
    v_and_down = 1 << MATRICES.index("v") | 1 << MATRICES.index("down")
    fives = partition(QWEN3_8B, [dict.fromkeys(MATRICES, ("Q5_K",)) | {"v": ("Q6_K",)}])
    assert fives.masks == (1 << 2 | (63 - 4) << 6,)
    assert [fives.qtype(0, name) for name in ("q", "v", "down")] == ["Q5_K", "Q6_K", "Q5_K"]
    assert fives.types == ("Q6_K", "Q5_K")
    assert partition(QWEN3_8B, [PLAIN, MIXED]) == make_geometry(QWEN3_8B, (0, v_and_down))
    types = ("Q4_0", "Q8_0", "IQ4_XS", "Q5_0", "IQ4_NL", "Q4_K")
    geometry = make_geometry(QWEN3_8B, (make_mask(types),))
    assert tuple(geometry.qtype(0, name) for name in MATRICES) == types
    assert geometry.types == tuple(sorted(types, key=TYPES.index))


def test_a_type_that_does_not_fit_is_named_with_its_layer():
    known = "the kernel reads Q4_K, Q6_K, Q5_K, Q4_0, Q8_0, IQ4_XS, Q5_0 and IQ4_NL"
    reasons = {
        f"q of layer 1 is Q3_K; {known}": {"q": ("Q3_K",)},
        "gate_up of layer 1 is of two types, Q4_K and Q6_K": {"gate_up": ("Q4_K", "Q6_K")},
        f"gate_up of layer 1 is F16; {known}": {"gate_up": ("Q4_K", "F16")},
    }
    for reason, changes in reasons.items():
        assert partition(QWEN3_8B, [PLAIN, PLAIN | changes]) == Refusal(reason)
    odd = replace(QWEN3_8B, hidden_size=1152)
    assert partition(odd, [PLAIN]) == Refusal(
        "q of layer 0 is Q4_K with 1152 columns, not a multiple of 256"
    )


@pytest.mark.parametrize("mixture", MIXTURES)
def test_files_of_every_published_size_fit_or_are_told_why(mixture):
    """Rows that are no multiple of 256 have other types, of which Q5_1 is not read."""
    refused = {
        ("gemma3-1b", "IQ4_XS"): "v of layer 0 is Q5_1",
        ("qwen2.5-0.5b", "IQ4_XS"): "v of layer 0 is Q5_1",
        ("gemma3-270m", "IQ4_XS"): "v of layer 0 is Q5_1",
        **{
            (name, "Q5_K_M"): "q of layer 0 is Q5_1"
            for name in ("gemma3-1b", "gemma3-270m", "qwen2.5-0.5b")
        },
    }
    for name in [name for name in SHAPES if name not in REFUSED]:
        layers = [
            {matrix: (kind,) for matrix, kind in zip(MATRICES, types, strict=True)}
            for types in step_types(name, mixture)
        ]
        found = partition(decoder_shape(name), layers)
        reason = refused.get((name, mixture))
        if reason is None:
            assert (
                tuple(found.qtype(0, matrix) for matrix in MATRICES) == step_types(name, mixture)[0]
            )
        else:
            assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("name", "qtype", "form"),
    [
        ("qwen3-8b", "Q5_K", ""),
        ("qwen2.5-7b", "Q4_K", ""),
        ("llama3-70b", "Q6_K", ""),
        ("qwen3-8b", "IQ4_XS", "matrices in IQ4_XS"),
        ("gemma3-270m", "Q5_0", ""),
        ("gemma3-270m", "Q4_0", "matrices in Q4_0"),
        ("gemma3-4b", "Q4_K", ""),
    ],
)
def test_a_form_that_was_not_timed_must_be_asked_for(monkeypatch, name, qtype, form):
    monkeypatch.delenv("TIERCEL_MEGAKERNEL", raising=False)
    shape = decoder_shape(name)
    layers = [dict.fromkeys(MATRICES, (qtype,))] * shape.num_layers
    found = select_geometry(shape, layers)
    if form:
        asked = "TIERCEL_MEGAKERNEL=1 uses it"
        assert found == Refusal(f"not timed on a GPU with {form}; {asked}")
        monkeypatch.setenv("TIERCEL_MEGAKERNEL", "1")
        found = select_geometry(shape, layers)
    assert found == partition(shape, layers)


def test_sums_over_gpus_must_be_asked_for(monkeypatch):
    monkeypatch.delenv("TIERCEL_MEGAKERNEL", raising=False)
    shape = replace(QWEN3_8B, num_heads=8, num_kv_heads=2, intermediate_size=3072, ranks=4)
    reason = "not timed on a GPU with sums over 4 GPUs; TIERCEL_MEGAKERNEL=1 uses it"
    assert select_geometry(shape, [PLAIN] * 36) == Refusal(reason)
    two = replace(shape, ranks=2)
    assert select_geometry(two, [PLAIN] * 36) == partition(two, [PLAIN] * 36)


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
