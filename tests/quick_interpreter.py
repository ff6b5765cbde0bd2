"""Triton's interpreter without discarded work: half the time, the same results."""

import functools
from dataclasses import replace

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

    interpreter._patch_lang = patch_for_good
    interpreter._get_np_dtype = known_type
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else assertions read these checks
        builder.options = replace(builder.options, sanitize_overflow=False)
