"""Compiles the native library: `python -m tiercel.kernels.native.build`.

All variants of an architecture are compiled from the same sources, with $CC, a C compiler of the
system, or the one in the Python package `ziglang`, which also compiles for other systems
(``--target``). A library that is up to date is kept. The build hook of the package
(`hatch_build.py`) calls `build` before tiercel's dependencies are installed, so this file needs the
standard library alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiercel.errors import InstallationError
from tiercel.kernels.native import abi
from tiercel.kernels.native.variants import (
    COMMON_FLAGS,
    ERROR_FILE,
    LIBRARY_DIR,
    SOURCE_DIR,
    Target,
    Variant,
    native_target,
    refuse_library,
    source_stamp,
    write_stamp,
)

TARGETS: Final = (  # that a wheel is made for
    *("x86_64-linux-gnu", "aarch64-linux-gnu", "aarch64-macos", "x86_64-windows-gnu"),
    "x86_64-macos",
)
_COMPILERS: Final = ("cc", "gcc", "clang")
_WARNINGS: Final = ("-Wall", "-Wextra", "-Werror")
_GLIBC: Final = "2.28"  # the oldest that PyTorch's wheels run with
MACOS_VERSION: Final = "11.0"  # the first for Apple's processors
_LIBRARIES: Final = {
    "linux": ("-lm", "-pthread"),
    "windows": ("-lapi-ms-win-core-synch-l1-2-0",),  # WaitOnAddress
}
_TIMEOUT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler.

    Attributes:
        command: the words that start it.
        is_zig: whether it is `zig cc`, which must be told the target and names processors itself.
    """

    command: tuple[str, ...]
    is_zig: bool


def find_compiler(environment: Mapping[str, str], *, needs_zig: bool = False) -> Compiler:
    """The compiler to use: $CC, else one of the system, else Zig's.

    Args:
        environment: the variables CC and PATH.
        needs_zig: whether only Zig can compile for the target.

    Raises:
        InstallationError: there is none.
    """
    if not needs_zig and native_target().system != "windows":
        words = tuple(shlex.split(environment.get("CC", "")))
        if words:
            return Compiler(words, is_zig="zig" in Path(words[0]).name or "ziglang" in words)
        for name in _COMPILERS:
            path = shutil.which(name, path=environment.get("PATH"))
            if path is not None:
                return Compiler((path,), is_zig=False)
    if importlib.util.find_spec("ziglang") is None:
        raise InstallationError(
            "there is no C compiler.",
            hint="Install gcc or clang, or the Python package ziglang (pip install ziglang).",
        )
    return Compiler((sys.executable, "-m", "ziglang", "cc"), is_zig=True)


def compile_command(
    compiler: Compiler, target: Target, variant: Variant, sanitize: str, *, is_strict: bool
) -> list[str]:
    """The compiler's arguments for every source: all but the names of files."""
    command = [*compiler.command, *COMMON_FLAGS, *_target_flags(compiler, target)]
    command += variant.zig_flags if compiler.is_zig else variant.flags
    command += _WARNINGS if is_strict else ()
    command += () if target.system == "windows" else ("-fPIC",)
    return [*command, *_sanitizer_flags(sanitize), "-c"]


def link_command(compiler: Compiler, target: Target, sanitize: str) -> list[str]:
    """The arguments that join objects, without flags of a variant.

    With them Zig would build the C library's parts once for each variant, minutes on Windows.
    """
    command = [*compiler.command, *_target_flags(compiler, target), "-shared"]
    # Without names that are not exported. Apple's linker has no -s, and Zig's keeps some with it.
    strip = "-Wl,-x" if target.system == "macos" else "-s"
    return [*command, *(_sanitizer_flags(sanitize) or (strip,))]


def _sanitizer_flags(sanitize: str) -> tuple[str, ...]:
    return ("-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitize}") if sanitize else ()


def _target_flags(compiler: Compiler, target: Target) -> tuple[str, ...]:
    if compiler.is_zig:
        return ("-target", _zig_target(target))
    return (f"-mmacosx-version-min={MACOS_VERSION}",) if target.system == "macos" else ()


def _zig_target(target: Target) -> str:
    if target.system == "macos":
        return f"{target.architecture}-macos.{MACOS_VERSION}"
    return f"{target.triple}.{_GLIBC}" if target.triple.endswith("-linux-gnu") else target.triple


def build(
    target: Target | None = None,
    out: Path = LIBRARY_DIR,
    *,
    compiler: Callable[[], Compiler],
    sanitize: str = "",
    is_strict: bool = False,
) -> list[Path]:
    """Compile the variants that are missing or outdated.

    Args:
        target: None: this machine.
        out: folder of the libraries; what is in it from other builds is removed.
        compiler: calls `find_compiler`, if anything is to be compiled.
        sanitize: what the compiler's sanitizers shall find, e.g. ``address,undefined``.
        is_strict: whether a warning is an error.

    Returns:
        The libraries, the fastest first.

    Raises:
        InstallationError: a variant cannot be compiled; the others are there.
    """
    target = target or native_target()
    out.mkdir(parents=True, exist_ok=True)
    libraries = {variant: out / target.library_name(variant) for variant in target.variants}
    wanted = {p for library in libraries.values() for p in (library, library.with_suffix(".json"))}
    for path in out.iterdir():
        if path.suffix in (".so", ".dylib", ".dll", ".json") and path not in wanted:
            path.unlink()

    outdated = [
        variant
        for variant, library in libraries.items()
        if refuse_library(library, source_stamp(variant), sanitize)
    ]
    chosen = compiler() if outdated else None

    def make(variant: Variant) -> str:
        assert chosen is not None
        library, stamp = libraries[variant], source_stamp(variant)
        error = _make(
            compile_command(chosen, target, variant, sanitize, is_strict=is_strict),
            link_command(chosen, target, sanitize),
            _LIBRARIES.get(target.system, ()),
            library,
        )
        if not error:
            write_stamp(library, stamp, sanitize)
        return f"{library.name}: {error}" if error else ""

    errors = [error for error in map(make, outdated) if error]
    if errors:
        raise InstallationError("; ".join(errors))
    (out / ERROR_FILE).unlink(missing_ok=True)
    return list(libraries.values())


def _make(
    compile_line: Sequence[str], link_line: Sequence[str], libraries: Sequence[str], library: Path
) -> str:
    """Make one library; returns the compiler's first complaint, "" if there is none."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        sources = sorted(path.absolute() for path in SOURCE_DIR.glob("*.c"))
        objects = [f"{path.stem}.o" for path in sources]
        lines = [
            [*compile_line, str(source), "-o", name]
            for source, name in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            error = next(filter(None, pool.map(lambda line: _run(line, folder), lines)), "")
        made = Path(folder).absolute() / library.name
        error = error or _run([*link_line, *objects, "-o", str(made), *libraries], folder)
        if not error:
            made.replace(library)
    return error


def _run(line: Sequence[str], folder: str) -> str:
    try:
        done = subprocess.run(
            line, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"{line[0]} ended with {done.returncode}"]
    return next((text for text in lines if "error:" in text), lines[0])


def exported_symbols(library: Path) -> set[str]:
    """The functions of ours that a stripped library exports: no other names are left in it."""
    return {name.decode() for name in re.findall(rb"\0_?(tc_\w+)(?=\0)", library.read_bytes())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tiercel.kernels.native.build", description=__doc__
    )
    parser.add_argument(
        "--target", help=f"compile for another system with Zig: {', '.join(TARGETS)}"
    )
    parser.add_argument("--out", type=Path, default=LIBRARY_DIR, help="folder of the libraries")
    parser.add_argument("--check-symbols", action="store_true", help="check the exported functions")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--sanitize", default="", help="address,undefined or thread")
    options = parser.parse_args(arguments)
    if options.target and options.target not in TARGETS:
        parser.error(f"no target {options.target!r}: use {', '.join(TARGETS)}")
    target = Target(*(*options.target.split("-"), "")[:3]) if options.target else native_target()
    is_foreign = target != native_target()
    try:
        libraries = build(
            target,
            options.out,
            compiler=lambda: find_compiler(os.environ, needs_zig=is_foreign),
            sanitize=options.sanitize,
            is_strict=True,
        )
    except InstallationError as error:
        print(f"error: {error} {error.hint}".rstrip(), file=sys.stderr)
        return 1
    except OSError as error:  # for instance packages of the system, which this user cannot write
        where = f"{error.filename or options.out}: {error.strerror}"
        print(f"error: {where}. Check the path and the disk.", file=sys.stderr)
        return 1
    for library in libraries:
        if not options.quiet:
            print(f"{library}  {library.stat().st_size:,} bytes")
        wrong = sorted(abi.FUNCTIONS.keys() ^ exported_symbols(library))
        if options.check_symbols and wrong:
            print(f"error: {library.name} and abi.py differ in {', '.join(wrong)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
