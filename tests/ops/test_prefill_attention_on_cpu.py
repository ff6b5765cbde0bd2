"""The CUDA source of prefill attention for Hopper, lane by lane on a processor.

Boxes of TMA come late and in any order, warps in any order; products are those of wgmma.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.launches_on_cpu import QUICK_TO_RUN, encode_tensor_map
from tests.ops.prefill_attention_cases import (
    TOLERANCE,
    assert_lse,
    cuda_config,
    make_case,
    relative_error,
)
from tiercel.kernels.runtime import rtc

# Variant, dtype, heads of a group, block size, parts of so many steps (0: whole). Each takes a
# compiler 3 s.
LEVEL = QUICK_TO_RUN
KINDS = [
    ("plain", torch.float16, 4, 64, 0),
    ("fast", torch.bfloat16, 8, 16, 0),
    ("plain", torch.bfloat16, 1, 128, 1),
]
# (cached tokens, P, item lengths): steps of 64 and 128 keys cut by P and by the diagonal; tiles of
# items alone, of pages alone, and with tokens that see nothing.
REQUESTS = [
    [(0, 0, [5, 0, 1, 70]), (0, 150, [])],
    [(290, 300, [3, 0, 66]), (1, 1, [2])],
    [(700, 703, [])],
]


@pytest.fixture(autouse=True)
def _on_cpu(on_processor, monkeypatch):
    processors = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr(rtc, "_encode_tensor_map", encode_tensor_map)


@pytest.mark.parametrize("q_scale", [1.0, 12.0])  # 12: maxima keep growing
@pytest.mark.parametrize(("variant", "dtype", "group", "block_size", "steps"), KINDS, ids=str)
def test_matches_oracle(variant, dtype, group, block_size, steps, q_scale, processor):
    for number, requests in enumerate(REQUESTS):
        processor.seed += 1
        case = make_case(
            requests, (group, 1, 128), block_size, dtype, torch.device("cpu"),
            q_scale=q_scale,
        )  # fmt: skip
        out = case.launch(cuda_config(variant), heads_first=bool(number % 2), steps=steps)
        expected, sums = case.expected_both()
        if steps:
            out, lse = out
            assert_lse(lse, sums, 2e-2 if q_scale == 1 else 0.2)
        assert relative_error(out, expected) < TOLERANCE[dtype]
        for token in range(len(out)):  # a short item weighs little in the whole
            if expected[token].norm() > 0:
                assert relative_error(out[token], expected[token]) < 4 * TOLERANCE[dtype]
            else:
                assert not out[token].any()
