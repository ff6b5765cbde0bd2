"""Hatchling's build hook: pip compiles the native library when it builds or installs Tiercel.

Without a C compiler the package `ziglang` is a requirement of the build. After a failure Tiercel
has no library and `tiercel doctor` says why. ``TIERCEL_BUILD_NATIVE=skip`` builds none, and
``fail`` behaves as if the compiler failed, for tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

from tiercel.kernels.native import packaging  # found through the line above


class NativeBuildHook(BuildHookInterface[Any]):
    """Compiles the library before a wheel, or an editable installation, is made."""

    def dependencies(self) -> list[str]:
        """Requirements of the build beside Hatchling."""
        return packaging.build_requirements(os.environ)

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put what was compiled into the wheel."""
        built = packaging.build_for_package(os.environ)
        if built.error:
            self.app.display_warning(f"Tiercel's native library: {built.error}")
        root = Path(self.root)
        build_data["artifacts"] += [f"/{p.relative_to(root).as_posix()}" for p in built.files]
        if built.has_library and version == "standard":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{packaging.platform_tag()}"
