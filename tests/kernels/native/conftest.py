"""The tests of this folder use the library of the sources as they are now.

A library that is up to date stays, with sanitizers too. Without a compiler the tests are skipped.
"""

import os
import warnings

from tiercel.errors import InstallationError
from tiercel.kernels.native import build
from tiercel.kernels.native.variants import refuse_libraries

if refuse_libraries():
    try:
        build.build(compiler=lambda: build.find_compiler(os.environ), is_strict=True)
    except InstallationError as error:
        collect_ignore_glob = ["test_*.py"]
        warnings.warn(f"tests/kernels/native is not run: {error} {error.hint}", stacklevel=1)
