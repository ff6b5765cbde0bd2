"""The variants of the native library, and the stamp that says which sources a library is from.

A variant is one shared library: all sources compiled for one set of instructions. Beside it is its
stamp, a JSON file with the digest of the sources and flags and the digest of the library itself, so
that a library of older sources, of another project or with missing bytes is refused before it is
loaded. Free of tiercel's dependencies: it runs while pip builds the package.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiercel.kernels.native import abi

SOURCE_DIR: Final = Path(__file__).parent / "src"
LIBRARY_DIR: Final = Path(__file__).parent / "lib"
ERROR_FILE: Final = "build_error.txt"  # in LIBRARY_DIR: why pip's build made no library
HOW_TO_BUILD: Final = "Run python -m tiercel.kernels.native.build."
COMMON_FLAGS: Final = ("-std=c17", "-O3", "-ffp-contract=off", "-fvisibility=hidden")
_ARCHITECTURES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_SUFFIXES: Final = {"windows": ".dll", "macos": ".dylib"}
_SYSTEMS: Final = {"win32": "windows", "darwin": "macos"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One set of instructions.

    Attributes:
        architecture: as in the names of targets; "" for any.
        features: bits of `tc_cpu_features` that the machine needs.
        flags: of GCC and Clang.
        zig_flags: of `zig cc`, which names processors in its own way.
    """

    name: str
    architecture: str
    features: int
    flags: tuple[str, ...] = ()
    zig_flags: tuple[str, ...] = ()


_AVX2: Final = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512: Final = (
    *_AVX2,
    *(f"-mavx512{part}" for part in ("f", "vl", "bw", "dq", "vnni")),
)
VARIANTS: Final = (  # the fastest first
    Variant("avx512", "x86_64", abi.CPU_AVX2 | abi.CPU_AVX512, _AVX512, _AVX512),
    Variant("avx2", "x86_64", abi.CPU_AVX2, _AVX2, _AVX2),
    Variant(
        *("neon", "aarch64", abi.CPU_NEON),
        flags=("-march=armv8.2-a+dotprod+fp16",),
        zig_flags=("-mcpu=generic+v8_2a+dotprod+fullfp16",),
    ),
    Variant("plain", "", 0),
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a library is compiled for.

    Attributes:
        architecture: ``x86_64``, ``aarch64`` or another that has the plain variant alone.
        system: ``linux``, ``macos`` or ``windows``.
        abi: the rest of Zig's name of the target: ``gnu``, ``musl``, or "" on macOS.
    """

    architecture: str
    system: str
    abi: str

    @property
    def triple(self) -> str:
        """The target's name for Zig."""
        return "-".join(part for part in (self.architecture, self.system, self.abi) if part)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants of the architecture, the fastest first."""
        return tuple(v for v in VARIANTS if v.architecture in ("", self.architecture))

    def library_name(self, variant: Variant) -> str:
        """File name of a variant's library."""
        return variant.name + _SUFFIXES.get(self.system, ".so")


def native_target() -> Target:
    """The machine that this process runs on."""
    machine = platform.machine().lower()
    system = _SYSTEMS.get(sys.platform, "linux")
    names = {"windows": "gnu", "macos": ""}
    is_glibc = system != "linux" or platform.libc_ver()[0] == "glibc"
    return Target(
        _ARCHITECTURES.get(machine, machine),
        system,
        names.get(system, "gnu" if is_glibc else "musl"),
    )


def source_stamp(variant: Variant, sources: Path = SOURCE_DIR) -> str:
    """Digest of all sources and of the flags that they are compiled with."""
    digest = hashlib.sha256(" ".join((*COMMON_FLAGS, *variant.flags)).encode())
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_stamp(library: Path, stamp: str, sanitize: str) -> None:
    """Describe a library that was just made, in the file beside it."""
    facts = {"sources": stamp, "library": _digest(library), "sanitize": sanitize}
    temporary = library.with_suffix(".json.part")
    temporary.write_text(json.dumps(facts, indent=1) + "\n")
    temporary.replace(library.with_suffix(".json"))


def refuse_library(library: Path, stamp: str, sanitize: str | None = None) -> str:
    """Why a file is not the library of these sources; "" if it is.

    Args:
        library: file of the library; its stamp is beside it.
        stamp: from `source_stamp`.
        sanitize: what it must have been built to find; None: anything.
    """
    try:
        facts = json.loads(library.with_suffix(".json").read_text())
        digest = _digest(library)
    except FileNotFoundError:
        return "is not built"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    if not isinstance(facts, dict) or facts.get("library") != digest:
        return "is damaged or is not what was built"
    if facts.get("sources") != stamp:
        return "was built from other sources"
    if sanitize is not None and facts.get("sanitize") != sanitize:
        return "was built with other sanitizers"
    return ""


def refuse_libraries() -> str:
    """Why a library of this machine is not that of the sources; "" if all are."""
    target = native_target()
    for variant in target.variants:
        name = target.library_name(variant)
        refusal = refuse_library(LIBRARY_DIR / name, source_stamp(variant))
        if refusal:
            return f"{name} {refusal}"
    return ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
