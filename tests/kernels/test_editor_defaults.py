"""What an editor knows of the CUDA sources: flags, and a value for each macro that Python gives."""

import re

from tests.kernels.cubin_digests import all_sources
from tiercel.kernels.runtime import rtc


def test_every_macro_has_a_value():
    text = rtc.read_source("include/editor_defaults.cuh")
    defined = re.findall(r"^#define (\w+) \d+$", text, re.MULTILINE)
    macros = {name for source in all_sources() for name, _ in source.macros}
    assert macros <= set(defined)
    assert len(set(defined)) == len(defined)


def test_every_kernel_has_digests():
    kernels = {path for path in rtc.source_files() if path.endswith(".cu")}
    assert {rtc.source_path(source.name) for source in all_sources()} == kernels
