"""Triton's interpreter without discarded work: half the time, the same results.

And with products of bfloat16, which it keeps as 16-bit integers and would multiply as such.
"""

import functools
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def quicken():
    """Patch the language once per function, cache NumPy's types, skip unused overflow checks."""
    patch, find_type = interpreter._patch_lang, interpreter._get_np_dtype
    types = {}

    @functools.cache  # else at each call of a device function, `tl.sum` and `tl.cdiv` among them
    def patch_for_good(fn):
        scope = patch(fn)
        scope._changes.clear()  # nothing is restored after a launch
        return scope

    def known_type(dtype):
        name = dtype.scalar.name
        if name not in types:
            types[name] = find_type(dtype.scalar)
        return types[name]

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *rest):
        return multiply(self, widened(a), widened(b), d, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._patch_lang = patch_for_good
    interpreter._get_np_dtype = known_type
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else assertions read these checks
        builder.options = replace(builder.options, sanitize_overflow=False)
