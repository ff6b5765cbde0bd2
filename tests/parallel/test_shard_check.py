"""Sizes that cannot share a model are refused in one line, with those that can."""

import itertools

import pytest

from tests.dsv4_files import TINY
from tests.gguf_files import tiny_model
from tests.large_models import sparse_model
from tests.parallel.shared_models import write_v4
from tiercel.errors import ArgumentError
from tiercel.models.shard_check import check_sharding, possible_sizes
from tiercel.models.sharding import WHOLE, Sharding, inner_block, sharding_kind
from tiercel.models.source import open_source

EXPERTS = sharding_kind(expert_parallel=True, data_parallel_attention=False)
OWN_ROWS = sharding_kind(expert_parallel=False, data_parallel_attention=True)


def dense(tmp_path, **sizes):
    return open_source(tiny_model(tmp_path / "m.gguf", "qwen3", **sizes))


@pytest.mark.parametrize(
    ("size", "sizes", "reason", "hint"),
    [
        (3, {}, "3 is not a power of two", "Use 1 or 2."),
        (0, {}, "0 is not a power of two", "Use 1 or 2."),
        (128, {"heads": 128, "kv_heads": 1, "ff": 4096}, "128 is not a power of two up to 64",
         "Use 1 or 2 or 4 or 8 or 16."),
        (8, {}, "8 does not divide its 4 attention heads", "Use 1 or 2."),
        (4, {"heads": 12, "kv_heads": 3}, "4 does not divide its 3 key/value heads", "Use 1."),
        (2, {"ff": 1, "qtype": "F32"}, "2 ranks cannot share 1 inner columns", "Use 1."),
        (4, {"ff": 96, "head_dim": 32}, "96 columns of layers.0.down.weight in 4 parts are no "
         r"whole blocks of 32 \(Q8_0\)", "Use 1 or 2."),
        (2, {"ff": 256, "hidden": 256, "head_dim": 128, "qtype": "Q4_K"},
         r"256 columns of layers.0.down.weight in 2 parts are no whole blocks of 256 \(Q4_K\)",
         "Use 1."),
        (4, {"ff": 1024, "hidden": 256, "head_dim": 128, "qtype": "Q4_K"},
         r"512 columns of layers.0.o.weight in 4 parts are no whole blocks of 256 \(Q4_K\)",
         "1 or 2"),
    ],
)  # fmt: skip
def test_a_dense_model_is_refused(tmp_path, size, sizes, reason, hint):
    with pytest.raises(ArgumentError, match=f"tensor_parallel_size={size}: .*: {reason}") as caught:
        check_sharding(dense(tmp_path, **sizes), size)
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_dense_model_has_no_experts(tmp_path):
    with pytest.raises(ArgumentError, match="it has no experts") as caught:
        check_sharding(dense(tmp_path), 2, EXPERTS)
    assert caught.value.hint == "Leave expert_parallel out."
    with pytest.raises(ArgumentError, match="it has no experts") as caught:
        check_sharding(dense(tmp_path), 2, OWN_ROWS)
    assert caught.value.hint == (
        "Run whole engines (replicas), or leave data_parallel_attention out."
    )


@pytest.mark.parametrize("width", [32, 96, 128, 33, 9728, 12288, 25600])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_of_an_inner_width_are_blocks_that_join(width, size):
    """Whole blocks of 256 where they are enough; none is more than a block above another."""
    block = inner_block(width, size)
    assert width % block == 0
    assert (block == 256) == (width >= 9728)
    parts = [Sharding(rank, size).inner_part(width) for rank in range(size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == width
    assert all(first[1] == second[0] for first, second in itertools.pairwise(parts))
    sizes = [stop - start for start, stop in parts]
    assert all(count % block == 0 for count in sizes)
    assert max(sizes) == sizes[0] <= min(sizes) + block


@pytest.mark.parametrize(
    ("size", "whole_experts", "reason", "hint"),
    [
        (4, False, "4 does not divide its 2 output groups", "1 or 2"),
        (4, True, "4 does not divide its 6 experts", "Use 2, or no expert_parallel."),
        (16, True, "16 does not divide its 6 experts", "Use 2, or no expert_parallel."),
        (1, True, "expert_parallel=True needs several ranks", "Use 2, or no expert_parallel."),
    ],
)
def test_deepseek_v4_is_refused(size, whole_experts, reason, hint):
    with pytest.raises(ArgumentError, match=reason) as caught:
        check_sharding(open_source(TINY), size, EXPERTS if whole_experts else WHOLE)
    assert hint in caught.value.hint


def test_experts_are_cut_between_blocks_alone(tmp_path):
    """Of 64 columns four ranks would have half a block each; whole experts cut none."""
    source = open_source(write_v4(tmp_path, formats=True, moe_intermediate_size=64))
    with pytest.raises(ArgumentError, match=r"64 columns of .*w2.weight .* blocks of 32 \(MXFP4\)"):
        check_sharding(source, 4)
    check_sharding(source, 4, EXPERTS)
    assert possible_sizes(source) == [1, 2]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3-4b", [1, 2, 4, 8, 16]),  # 9728 = 38 * 256 inner columns: not equal parts
        ("qwen3-8b", [1, 2, 4, 8, 16]),
        ("qwen3-14b", [1, 2, 4]),  # 5 of 40 heads have 640 columns of o, no blocks of 256
        ("qwen3-32b", [1, 2, 4, 8, 16, 32]),
        ("llama3-70b", [1, 2, 4, 8, 16, 32]),
    ],
)
def test_true_shapes(tmp_path, name, sizes):
    """In Q4_K_M; 16 GPUs share 8 key heads."""
    assert possible_sizes(open_source(sparse_model(tmp_path / "m.gguf", name))) == sizes
