"""The CUDA source of products that rotate heads and write the cache, on a processor."""

import ctypes

import pytest
import torch

from tests.ops.test_packed_gemm_heads import check_two_types, product_of_heads
from tiercel.kernels.packed import packed_gemm as kernel

CPU = torch.device("cpu")
PIECE = 4096  # bytes
# Heads of a warp: one, two; CTAs of a sum; turns in registers or not; norms and prefetch or not.
CASES = [
    (
        "Q4_K",
        128,
        (True, True),
        kernel.PackedGemmConfig(tokens=64, groups=2, splits=2, stages=2, steps=4),
    ),
    (
        "Q6_K",
        64,
        (False, True),
        kernel.PackedGemmConfig(tokens=32, groups=3, splits=1, stages=2, steps=2),
    ),
    (
        "Q4_K",
        64,
        (True, False),
        kernel.PackedGemmConfig(tokens=32, groups=1, splits=1, stages=2, steps=2),
    ),
]


def name_of(parameter):
    return f"{parameter.groups}x{parameter.splits}" if hasattr(parameter, "groups") else None


@pytest.fixture(scope="module", autouse=True)
def _all_together(built_products, chosen):
    """One translation unit: each of its own takes half as long as all of them."""
    sources = []
    for params in chosen:
        name, config = params["name"], params["config"]
        kind = params["head_dim"], *params["options"]
        sources += [
            kernel.image_source(kernel.column_order(name), config.tokens),
            kernel.gemm_source(name, torch.float16, config, heads=kind),
        ]
    built_products.build(sources)


@pytest.mark.parametrize(("name", "head_dim", "options", "config"), CASES, ids=name_of)
def test_matches_oracle(name, head_dim, options, config, products, monkeypatch):
    """In any order of copies and warps, with the same bits; what is prefetched, each once."""
    monkeypatch.setattr(kernel, "_MOST_PIECE", PIECE)
    source = kernel.gemm_source(name, torch.float16, config, heads=(head_dim, *options))
    library, results = products.built[source].library, []
    for products.seed in range(2 if config.tokens == 32 else 1):
        has_norms, prefetches = options
        outputs, *found = product_of_heads(
            name, head_dim, config, CPU, has_norms=has_norms, prefetches=prefetches
        )
        results.append(found)
        for one, other in zip(results[-1], results[0], strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
        numbers = (ctypes.c_uint64 * 1000)()
        count = library.take_prefetched(numbers, 1000)
        requested = list(zip(numbers[:count:2], numbers[1:count:2], strict=True))
        assert sorted(requested) == sorted(pieces_of(outputs) if prefetches else [])


@pytest.mark.slow
def test_values_of_another_type(products):
    check_two_types(40, 128, CPU, has_norms=True)


def pieces_of(outputs):
    """Addresses and sizes of the first keys and values of each request."""
    keys, found = outputs.prefetch, []
    tokens = PIECE // (outputs.k_cache[0, 0].numel() * 2)
    for row, length in zip(keys.rows.tolist(), keys.seq_lens.tolist(), strict=True):
        for piece in range(keys.num_bytes // (len(keys.rows) * PIECE)):
            first = piece // 2 * tokens
            if first < length:
                plane = (outputs.k_cache, outputs.v_cache)[piece % 2]
                found.append((plane[keys.tables[row, first // 64], first % 64].data_ptr(), PIECE))
    return found
