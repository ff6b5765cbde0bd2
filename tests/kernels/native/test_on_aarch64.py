"""The native library for aarch64 under qemu: its tests, and the bits of x86. `make test-aarch64`.

Each test is a process of the emulated machine (`aarch64.py`). It runs the tests of this folder and
those of the operators on the library as they are, with all variants.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.native import aarch64
from tiercel.kernels.native import abi, build, library, variants

ROOT = Path(__file__).parents[3]
FILES = (
    *(f"tests/kernels/native/test_{name}.py" for name in ("rows", "products", "attention")),
    *("tests/kernels/native/test_floats.py", "tests/kernels/native/test_pool.py"),
    *("tests/ops/test_linear_native.py", "tests/ops/test_decoder_layers.py"),
)
# Threads of a forked process are an assertion in qemu 7.2 (`qemu_plugin_vcpu_init_hook`).
BREAKS_QEMU = "tests/kernels/native/test_pool.py::test_a_child_process_has_threads_of_its_own"
NEON = "cortex-a76"  # products of 8-bit integers and float16 arithmetic, and nothing that is newer
OLDER, NEWER = "cortex-a53", "max"  # PyTorch needs more than the older one
pytestmark = pytest.mark.qemu


@pytest.fixture(scope="module")
def machine():
    folder = (ROOT / os.environ.get("AARCH64_MACHINE", ".aarch64")).absolute()
    if not folder.exists() or shutil.which("qemu-aarch64") is None:
        pytest.skip(f"no {folder} or no qemu-aarch64: run make test-aarch64")
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory, machine):
    """A copy of the sources, with libraries for aarch64."""
    tree = tmp_path_factory.mktemp("aarch64")
    hidden = shutil.ignore_patterns("lib", "__pycache__", "*.gguf", "*.safetensors")
    for name in ("tiercel", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=hidden)
    shutil.copy(ROOT / "pyproject.toml", tree)
    target = variants.Target(*aarch64.TARGET.split("-"))
    compiler = build.Compiler(aarch64.zig(machine), is_zig=True)
    out = tree / variants.LIBRARY_DIR.relative_to(ROOT)
    build.build(target, out, compiler=lambda: compiler, is_strict=True)
    return tree


@pytest.fixture
def run(machine, tree):
    def run(*arguments, processor):
        done = aarch64.run_python(machine, tree, arguments, processor)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("processor", "features", "expected"),
    [
        (OLDER, 0, ["plain"]),
        (NEON, abi.CPU_NEON, ["neon", "plain"]),
        (NEWER, abi.CPU_NEON | abi.CPU_I8MM, ["neon", "plain"]),
    ],
)
def test_variants_that_a_processor_runs(run, processor, features, expected):
    code = "import json; from tiercel.kernels.native import library; "
    code += "found = library.load_variant('plain').lib.tc_cpu_features(), library.variants(); "
    code += "print(json.dumps((*found, library.library().variant)))"
    assert json.loads(run("-c", code, processor=processor)) == [features, expected, expected[0]]


@pytest.mark.parametrize("name", FILES)
def test_tests_pass(run, name):
    options = ("-q", "-p", "no:cacheprovider", "--deselect", BREAKS_QEMU)
    assert " passed" in run("-m", "pytest", *options, name, processor=NEON)


def digests(start, path, variant):
    start("-m", "tests.kernels.native.variant_bits", variant, str(path))
    return json.loads(path.read_text())


def test_neon_has_the_bits_of_x86(run, tmp_path):
    def start_here(*arguments):
        subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)

    fused = [name for name in library.variants() if name != "plain"]
    if variants.native_target().architecture != "x86_64" or not fused:
        pytest.skip("This machine has no fused variant of x86.")

    def start_there(*arguments):
        run(*arguments, processor=NEON)

    found = digests(start_there, tmp_path / "neon.json", "neon")
    for name in fused:
        assert digests(start_here, tmp_path / f"{name}.json", name) == found
