"""What the build hook of the package (`hatch_build.py`) does, without Hatchling."""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiercel.errors import InstallationError
from tiercel.kernels.native.build import MACOS_VERSION, build, find_compiler
from tiercel.kernels.native.variants import (
    ERROR_FILE,
    LIBRARY_DIR,
    native_target,
    refuse_libraries,
    refuse_library,
    source_stamp,
)

_VARIABLE: Final = "TIERCEL_BUILD_NATIVE"
_ZIG: Final = "ziglang>=0.14"
_ZIG_SYSTEMS: Final = ("linux", "macos", "windows")  # with wheels of ziglang for:
_ZIG_ARCHITECTURES: Final = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class PackageBuild:
    """Outcome of a build.

    Attributes:
        files: what belongs into the wheel: libraries, their stamps, and the reason of a failure.
        has_library: whether there is a library, so that the wheel is for this platform alone.
        error: why a library is missing, in one line; "" if none is.
    """

    files: tuple[Path, ...]
    has_library: bool
    error: str


def build_requirements(environment: Mapping[str, str]) -> list[str]:
    """Python packages that the build needs: Zig, on a machine without a compiler.

    Raises:
        InstallationError: ``TIERCEL_BUILD_NATIVE`` has a value that cannot be.
    """
    target = native_target()
    has_zig = target.system in _ZIG_SYSTEMS and target.architecture in _ZIG_ARCHITECTURES
    if not has_zig or _wish(environment) or not refuse_libraries():
        return []
    try:
        is_zig = find_compiler(environment).is_zig
    except InstallationError:
        return [_ZIG]
    return [_ZIG] if is_zig and not environment.get("CC") else []


def build_for_package(environment: Mapping[str, str], out: Path = LIBRARY_DIR) -> PackageBuild:
    """Compile for this machine; a failure is written down in `out` and returned.

    Args:
        environment: CC, PATH and ``TIERCEL_BUILD_NATIVE``.
        out: folder of the libraries.

    Raises:
        InstallationError: ``TIERCEL_BUILD_NATIVE`` has a value that cannot be.
    """
    wish = _wish(environment)
    error = f"{_VARIABLE}={wish}" if wish else ""
    try:
        if not wish:
            build(out=out, compiler=lambda: find_compiler(environment))
    except (InstallationError, OSError) as failure:
        hint = failure.hint if isinstance(failure, InstallationError) else ""
        error = " ".join(f"{failure} {hint}".split())
    files: list[Path] = []
    target = native_target()
    for variant in () if wish else target.variants:
        library = out / target.library_name(variant)
        if not refuse_library(library, source_stamp(variant)):
            files += [library, library.with_suffix(".json")]
    has_library = bool(files)
    if error:
        out.mkdir(parents=True, exist_ok=True)
        (out / ERROR_FILE).write_text(error + "\n", encoding="utf-8")
        files.append(out / ERROR_FILE)
    return PackageBuild(tuple(files), has_library, error)


def platform_tag() -> str:
    """The platform in the name of a wheel. The library needs no version of Python."""
    target = native_target()
    if target.system == "macos":
        return f"macosx_{MACOS_VERSION.replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _wish(environment: Mapping[str, str]) -> str:
    """``TIERCEL_BUILD_NATIVE``: "", ``skip`` or ``fail``."""
    wish = environment.get(_VARIABLE, "")
    if wish not in ("", "skip", "fail"):
        raise InstallationError(
            f"{_VARIABLE}={wish!r} is unknown.", hint="Use skip, fail or nothing."
        )
    return wish
