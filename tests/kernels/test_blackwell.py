"""Kernels of tcgen05 that no op launches yet, as far as a compiler knows them."""

import re

from tests.kernels.test_rtc import ask, compile_here, registers_of
from tiercel.kernels.attention import sparse_attention_blackwell as attention

ARCH = "sm_100a"


def test_attention_compiles(tmp_path):
    cubin = compile_here(attention.attention_source(), tmp_path, ARCH)
    assert registers_of(cubin, tmp_path) <= 255
    usage = ask(cubin, tmp_path, "cuobjdump", "--dump-resource-usage")
    assert re.search(r"STACK:0\b.* LOCAL:0\b", usage)


def test_attention_fits_a_processor():
    reserved = 2048  # by the compiler, for tensor memory and the system
    assert attention.smem_bytes() + attention.STATIC_BYTES + reserved <= 227 << 10
