"""The CUDA source of norm, rotation and cache write, lane by lane on a processor.

CTAs and warps come in any order; heads may be NaN until they are waited for.
"""

import itertools

import pytest
import torch

from tests.ops.test_rotary_kv_write import Case
from tiercel.kernels.attention import rotary_kv_write as kernel

CPU = torch.device("cpu")
# One rounding of the result, and those of float32 before it.
TOLERANCE = {torch.float16: 2**-11 + 1e-5, torch.bfloat16: 2**-8 + 1e-5}
# (tokens, num_heads, num_kv_heads, head_dim): heads of all kinds in a CTA, CTAs without enough.
SHAPES = [(5, 3, 1, 64), (3, 32, 8, 128), (7, 5, 5, 256), (1, 1, 1, 128)]
# Each takes a compiler 2 s; these are all sizes of heads and both forms of everything.
QUICK = {
    (SHAPES[0], torch.float16, True),
    (SHAPES[1], torch.bfloat16, True),
    (SHAPES[1], torch.float16, False),
    (SHAPES[2], torch.bfloat16, True),
    (SHAPES[3], torch.bfloat16, False),
}
CASES = [
    pytest.param(
        *case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(map(str, case))
    )
    for case in itertools.product(SHAPES, TOLERANCE, (False, True))
]


@pytest.fixture(autouse=True)
def _on_cpu(on_processor, monkeypatch):
    monkeypatch.setattr(kernel, "has_cuda_kernel", lambda *_: True)


@pytest.mark.parametrize(("shape", "dtype", "norms"), CASES)
def test_matches_oracle(shape, dtype, norms, processor):
    case = Case(*shape, shape[-1] // 2, dtype, CPU, norms=norms)
    before = case.heads.clone()
    processor.seed += 1
    case.run("kernel")
    case.check(before, TOLERANCE[dtype])


@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_heads_are_read_after_the_wait(norms, processor):
    """They come late; the cache shows the values that were read."""
    case = Case(6, 5, 3, 64, 32, torch.float16, CPU, norms=norms)
    heads = case.heads.clone()
    case.run("kernel")
    in_time = case.guarded.clone()
    case.guarded.fill_(float("nan"))
    processor.late = [case.heads.copy_(heads)]
    case.run("kernel")
    assert torch.equal(case.guarded.view(torch.int16), in_time.view(torch.int16))


def test_others_of_the_batch_change_no_bit(processor):
    case = Case(7, 6, 2, 128, 64, torch.bfloat16, CPU, norms=True)
    before, positions, slots = case.heads.clone(), case.positions, case.slots
    case.run("kernel")
    whole = case.heads
    for token in range(7):
        case.heads = before[token : token + 1].clone()
        case.positions, case.slots = positions[token : token + 1], slots[token : token + 1]
        case.run("kernel")
        assert torch.equal(case.heads[0], whole[token])


@pytest.mark.parametrize("what", ["heads at an odd address", "places of more than 32 bits"])
def test_what_goes_through_triton(what, monkeypatch):
    launches = []
    monkeypatch.setattr(kernel, "_launch", lambda *_: (lambda *given: launches.append(given), 1))
    case = Case(3, 2, 1, 64, 32, torch.float16, CPU, norms=True)
    if what == "heads at an odd address":
        storage = torch.empty(case.heads.numel() + 1, dtype=torch.float16)
        case.heads = storage[1:].view(case.heads.shape)
    else:
        large = torch.empty(2**22 + 1, 64, 1, 64, dtype=torch.float16, device="meta")
        case.caches = (large, large)
    case.run("kernel")
    assert len(launches) == 1
