"""An aarch64 machine that qemu emulates, in one folder: `make test-aarch64`.

    python -m tests.kernels.native.aarch64 .aarch64     makes it

    root/   files of Debian's packages for arm64: Python and the C library
    site/   the Python packages that the tests of the native library import
    zig/    Zig, which compiles the library for aarch64 on this machine

Nothing is installed on this machine; it needs Debian's packages `qemu-user` and `mmdebstrap`.
PyTorch 2.10 is the last one whose package for aarch64 needs no CUDA.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SUITE, PYTHON = "bookworm", "3.11"  # Debian 12 and its Python
DEBIAN = (
    *("libpython3.11-minimal", "libpython3.11-stdlib", "python3.11-minimal"),
    *("libc6", "libgcc-s1", "libstdc++6", "libgomp1", "zlib1g", "libexpat1", "libffi8", "libssl3"),
    *("libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1", "libcrypt1", "libatomic1"),
)
SITE = (
    *("torch==2.10.0", "numpy", "msgspec", "gguf", "pytest", "platformdirs", "pyyaml", "tqdm"),
    *("typing-extensions", "filelock", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *("fsspec", "iniconfig", "pluggy", "pygments", "packaging"),
)
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
ZIG = "ziglang==0.17.1"
TARGET = "aarch64-linux-gnu"


def make(folder: Path) -> None:
    """Fill the folder. Raises `CalledProcessError` where a package cannot be had."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--no-compile", "--only-binary=:all:"]
    foreign = [part for name in PLATFORMS for part in ("--platform", name)]
    foreign += ["--python-version", PYTHON, "--implementation", "cp"]
    debian = ["mmdebstrap", "--quiet", "--arch=arm64", "--variant=extract"]
    folder.mkdir(parents=True, exist_ok=True)
    for command in (
        [*debian, f"--include={','.join(DEBIAN)}", SUITE, str(folder / "root")],
        [*pip, *foreign, "--target", str(folder / "site"), *SITE],
        [*pip, "--target", str(folder / "zig"), ZIG],
    ):
        subprocess.run(command, check=True)


def zig(folder: Path) -> tuple[str, str]:
    """The words that start Zig's C compiler."""
    return str(folder / "zig/ziglang/zig"), "cc"


def run_python(
    folder: Path, tree: Path, arguments: Sequence[str], processor: str
) -> subprocess.CompletedProcess[str]:
    """Run the folder's Python on an emulated processor.

    Args:
        folder: of the machine.
        tree: packages `tiercel` and `tests`; the current directory.
        arguments: of Python.
        processor: one of ``qemu-aarch64 -cpu help``.
    """
    python = folder / f"root/usr/bin/python{PYTHON}"
    command = ["qemu-aarch64", "-cpu", processor, "-L", str(folder / "root"), str(python)]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHOME": str(folder / "root/usr"),
        "PYTHONPATH": os.pathsep.join((str(tree), str(folder / "site"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CC": " ".join(
            (*zig(folder), "-target", TARGET)
        ),  # of this machine: Linux starts it as it is
    }
    return subprocess.run(
        [*command, *arguments], cwd=tree, env=environment, capture_output=True, text=True
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute())
