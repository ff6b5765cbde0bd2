"""Launches of Triton kernels: what is compiled for them, and that dependent ones wait first."""

import json
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from tiercel.kernels.runtime import rtc
from tiercel.kernels.runtime.triton_launch import TritonLaunch, wait_for_inputs


@pytest.fixture(scope="module")
def compiled():
    """Facts of the kernels as Triton compiles them for Hopper; needs no GPU."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile_triton"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Parameters that are weights, which no kernel of a step writes.
WEIGHTS = {
    "rms_norm": [2],
    "sandwich": [3],
    "rotary_kv_write": [6, 7],
    "odd slots": [6, 7],
    "mhc_mix product": [1],
    "mhc_mix step": [4],
    "mhc_mix finish": [4],
    "moe_route": [1],
}


def test_every_kernel_waits_before_it_touches_what_others_write(compiled):
    assert len(compiled) == 19
    for name, found in compiled.items():
        assert found["is_dependent"], name
        assert found["starts"] < found["waits"], name
        assert found["reads_ahead"] == WEIGHTS.get(name, []), name
        assert {0, "written"} <= set(found["reads"]), name


def test_alignment_of_a_scalar_changes_no_other_load(compiled):
    """Else sums over a head would change their order with the number of tokens."""
    assert compiled["odd slots"]["wide_loads"] == compiled["rotary_kv_write"]["wide_loads"] >= 6
    assert compiled["act_mul"]["wide_loads"] >= 2
    assert compiled["rms_norm"]["wide_loads"] >= 6


@triton.jit(do_not_specialize=["factor", "count"])
def scale_kernel(
    out_ptr,
    x_ptr,
    bias_ptr,
    factor,
    count,
    BLOCK: tl.constexpr,  # noqa: N803 - a constant, as in kernels
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
):
    wait_for_inputs(IS_DEPENDENT)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < count, other=0.0).to(tl.float32) * factor
    if bias_ptr is not None:
        x += tl.load(bias_ptr + cols, mask=cols < count, other=0.0)
    tl.store(out_ptr + cols, x.to(out_ptr.dtype.element_ty), mask=cols < count)


def test_types_alignment_and_missing_tensors_each_get_their_kernel(device):
    launch = TritonLaunch(scale_kernel, 4, {"BLOCK": 32})
    for dtype in (torch.float32, torch.float16):
        for start in (0, 1, 4):  # elements: aligned and not
            for has_bias in (False, True):
                for count in (1, 31, 100):
                    x = torch.randn(count + start).to(dtype).to(device)[start:]
                    bias = torch.randn(count, device=device) if has_bias else None
                    wide = torch.full((count + 2,), float("nan"), dtype=dtype, device=device)
                    launch((-(-count // 32), 1, 1), (wide[1:-1], x, bias), (1.5, count))
                    expected = x.float() * 1.5 + (0.0 if bias is None else bias)
                    torch.testing.assert_close(wide[1:-1], expected.to(dtype))
                    assert wide[[0, -1]].isnan().all()


@pytest.mark.gpu
def test_the_switch_and_the_device_decide(device, monkeypatch):
    expected = torch.cuda.get_device_capability(device) >= (9, 0)
    for text, wanted in (("1", expected), ("0", False)):
        monkeypatch.setenv("TIERCEL_PDL", text)
        rtc.is_dependent.cache_clear()
        assert rtc.is_dependent(device) is wanted
    rtc.is_dependent.cache_clear()
