"""The library's files of rows and attention, compiled for the tests that need no other file."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from tiercel.kernels.native import abi

_SOURCES = Path(abi.__file__).parent / "src"
_FILES = ("rows.c", "attention.c", "attention_block.c", "attention_rotate.c")
_FLAGS = {"avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"), "plain": ()}
_POOL = """
#include <stdlib.h>
#include "native.h"
struct tc_pool { int size; };
TC_EXPORT tc_pool *tc_pool_create(int n) {
    tc_pool *pool = malloc(sizeof *pool);
    pool->size = n;
    return pool;
}
TC_EXPORT void tc_pool_destroy(tc_pool *pool) { free(pool); }
TC_EXPORT int tc_pool_size(const tc_pool *pool) { return pool->size; }
void tc_pool_run(tc_pool *pool, const tc_task *tasks, int num_tasks) {
    for (int i = 0; i < num_tasks; ++i)
        for (int64_t p = 0; p < tasks[i].num_pieces; ++p)
            tasks[i].fn(tasks[i].arg, p, (int)(p % pool->size));
}
"""


def variants() -> tuple[str, ...]:
    """Those that this machine runs."""
    return tuple(_FLAGS)


@functools.cache
def load_variant(name: str) -> ctypes.CDLL:
    """Compile and load a variant."""
    folder = Path(tempfile.mkdtemp())
    (folder / "stub.c").write_text(_POOL)
    pool = _SOURCES / "pool.c"
    files = [str(_SOURCES / file) for file in _FILES]
    out = str(folder / f"rows-{name}.so")
    flags = "-std=c17 -O3 -ffp-contract=off -fvisibility=hidden -fPIC -Wall -Wextra -Werror -shared"
    files.append(str(pool if pool.exists() else folder / "stub.c"))
    command = ["cc", *flags.split(), *_FLAGS[name], f"-I{_SOURCES}", *files, "-o", out]
    subprocess.run([*command, "-lm", "-pthread"], check=True)
    lib = ctypes.CDLL(out)
    for function, (result, arguments) in abi.FUNCTIONS.items():
        if hasattr(lib, function):
            getattr(lib, function).restype = result
            getattr(lib, function).argtypes = arguments
    return lib


@functools.cache
def make_pool(name: str, num_threads: int) -> int:
    """A pool of a variant."""
    return int(load_variant(name).tc_pool_create(num_threads))
