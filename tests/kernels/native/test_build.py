"""Building, stamping, refusing and choosing the native library, and what pip's build does."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiercel.errors import ArgumentError, InstallationError
from tiercel.kernels.native import abi, build, library, packaging, variants

ROOT = Path(__file__).parents[3]
TARGET = variants.native_target()
HAS_ZIG = importlib.util.find_spec("ziglang") is not None
LINUX = variants.Target("x86_64", "linux", "gnu")
SOURCE = """
#include "native.h"
TC_EXPORT int tc_abi_version(void) { return TC_ABI_VERSION + IS_OTHER; }
TC_EXPORT int tc_cpu_features(void) { return 0; }
int hidden(void) { return 1; }
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree of sources with one small file, and an empty folder of libraries."""
    sources, out = tmp_path / "src", tmp_path / "lib"
    sources.mkdir()
    shutil.copy(variants.SOURCE_DIR / "native.h", sources)
    (sources / "small.c").write_text(SOURCE.replace("IS_OTHER", "0"))
    for module, name, value in (
        *((m, "LIBRARY_DIR", out) for m in (variants, build, library, packaging)),
        (build, "SOURCE_DIR", sources),
    ):
        monkeypatch.setattr(module, name, value)
    digest = variants.source_stamp
    for module in (variants, build, library, packaging):
        monkeypatch.setattr(module, "source_stamp", lambda v: digest(v, sources))
    for name in ("TIERCEL_CPU", "TIERCEL_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    clear()
    yield tmp_path
    clear()


def clear():
    for function in (library._find, library._load, library.make_pool):
        function.cache_clear()


def compiler():
    return build.find_compiler(os.environ)


def make(tree, **options):
    return build.build(out=tree / "lib", compiler=compiler, is_strict=True, **options)


def first(tree):
    """The library that this machine would load first: `plain`, which asks the processor."""
    return tree / "lib" / TARGET.library_name(variants.VARIANTS[-1])


def times(libraries):
    return [path.stat().st_mtime_ns for path in libraries]


def test_a_build_makes_all_variants_and_exports_functions_alone(tree):
    made = make(tree)
    assert [path.stem for path in made] == [v.name for v in TARGET.variants]
    for path in made:
        assert build.exported_symbols(path) == {"tc_abi_version", "tc_cpu_features"}
        assert path.stat().st_size < 40_000
    assert {p.suffix for p in (tree / "lib").iterdir()} == {made[0].suffix, ".json"}


@pytest.mark.parametrize("change", ["source", "header", "flags", "library", "stamp", "sanitize"])
def test_a_build_is_repeated_only_when_something_changed(tree, change, monkeypatch):
    made = make(tree)
    before = times(made)
    assert times(make(tree)) == before
    options = {}
    if change in ("source", "header"):
        path = tree / "src" / {"source": "small.c", "header": "native.h"}[change]
        path.write_text(path.read_text() + "/* more */\n")
    elif change == "flags":
        monkeypatch.setattr(variants, "COMMON_FLAGS", (*variants.COMMON_FLAGS, "-DMORE"))
    elif change == "library":
        for path in made:
            path.write_bytes(path.read_bytes()[:-1])
    elif change == "stamp":
        for path in made:
            path.with_suffix(".json").unlink()
    else:
        options = {"sanitize": "undefined"}
    after = times(make(tree, **options))
    assert all(new != old for new, old in zip(after, before, strict=True))
    assert times(make(tree, **options)) == after


def test_what_other_builds_left_is_removed(tree):
    (tree / "lib").mkdir()
    for name in ("old.so", "old.json", "neon.dll", "build_error.txt"):
        (tree / "lib" / name).touch()
    make(tree)
    left = {path.name for path in (tree / "lib").iterdir()}
    assert not left & {"old.so", "old.json", "neon.dll", "build_error.txt"}


def test_an_error_of_the_compiler_is_one_line_with_the_place(tree):
    (tree / "src/small.c").write_text("int f(void) { return nothing; }\n")
    with pytest.raises(InstallationError, match=r"plain\S*: .*small\.c:1.*nothing") as caught:
        make(tree)
    assert "\n" not in str(caught.value)


def test_a_warning_is_an_error_for_developers_alone(tree):
    (tree / "src/small.c").write_text(SOURCE.replace("IS_OTHER", "0") + "static int unused;\n")
    with pytest.raises(InstallationError, match="unused"):
        make(tree)
    assert build.build(out=tree / "lib", compiler=compiler)


def test_flags():
    avx512, avx2, plain = LINUX.variants
    gcc, zig = build.Compiler(("gcc",), is_zig=False), build.Compiler(("zig", "cc"), is_zig=True)
    line = build.compile_command(gcc, LINUX, avx2, "", is_strict=True)
    assert {"-mavx2", "-mfma", "-mf16c", "-mbmi2", "-ffp-contract=off", "-Werror"} <= {*line}
    assert "-mavx512vnni" in build.compile_command(gcc, LINUX, avx512, "", is_strict=False)
    line = build.compile_command(gcc, LINUX, plain, "", is_strict=False)
    assert not [flag for flag in line if flag.startswith(("-m", "-W"))]
    # Without a target Zig compiles for the machine that it runs on, with all its instructions.
    assert "x86_64-linux-gnu.2.28" in build.compile_command(zig, LINUX, plain, "", is_strict=False)
    assert "-s" in build.link_command(gcc, LINUX, "")
    line = build.link_command(gcc, LINUX, "address")
    assert "-fsanitize=address" in line
    assert "-s" not in line


def test_the_order_of_compilers(tmp_path, monkeypatch):
    found = build.find_compiler({"CC": "ccache gcc", "PATH": ""})
    assert found == build.Compiler(("ccache", "gcc"), is_zig=False)
    assert build.find_compiler({"CC": "python -m ziglang cc"}).is_zig
    for name in ("clang", "gcc", "cc"):
        path = tmp_path / name
        path.touch(0o755)
        found = build.find_compiler({"PATH": str(tmp_path)})
        assert found == build.Compiler((str(path),), is_zig=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InstallationError, match="no C compiler") as caught:
        build.find_compiler({"PATH": ""})
    assert "ziglang" in caught.value.hint
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert build.find_compiler({"PATH": ""}).is_zig
    assert build.find_compiler({"PATH": str(tmp_path)}, needs_zig=True).is_zig


def test_a_library_of_these_sources_is_loaded(tree):
    make(tree)
    names = library.variants()
    assert names[-1:] == ("plain",)
    for name in names:
        loaded = library.load_variant(name)
        assert loaded.variant == name
        assert loaded.lib.tc_abi_version() == abi.ABI_VERSION
    assert "lacks the function" in library.native_refusal()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("missing", "is not built"),
        ("no stamp", "is not built"),
        ("truncated", "is damaged"),
        ("foreign", "is damaged"),
        ("text for a stamp", "cannot be read"),
        ("older sources", "was built from other sources"),
        ("other interface", f"has interface {abi.ABI_VERSION + 1}, not {abi.ABI_VERSION}"),
        ("no library at all", "cannot be loaded"),
    ],
)
def test_what_is_refused(tree, damage, expected):
    """Each refusal is one line that says how to build, and nothing of the file has run."""
    make(tree)
    path = first(tree)
    if damage == "missing":
        path.unlink()
    elif damage == "no stamp":
        path.with_suffix(".json").unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "foreign":
        shutil.copy(sys.executable, path)
    elif damage == "text for a stamp":
        path.with_suffix(".json").write_text("yes")
    elif damage == "older sources":
        (tree / "src/more.c").write_text("int more(void);\n")
    elif damage == "other interface":
        (tree / "src/small.c").write_text(SOURCE.replace("IS_OTHER", "1"))
        make(tree)
    else:
        path.write_bytes(b"text")
        stamp = json.loads(path.with_suffix(".json").read_text())["sources"]
        variants.write_stamp(path, stamp, "")
    refusal = library.native_refusal()
    assert expected in refusal
    assert refusal.endswith("Run python -m tiercel.kernels.native.build.")
    assert "\n" not in refusal
    for read in (library.library, lambda: library.load_variant("plain")):
        with pytest.raises(InstallationError, match="plain"):
            read()
    assert library.variants() == ()
    assert library.describe_library(2) == f"not used: {refusal}"


def test_the_environment_chooses(tree, monkeypatch):
    make(tree)
    monkeypatch.setattr(abi, "FUNCTIONS", {"tc_abi_version": abi.FUNCTIONS["tc_abi_version"]})
    assert library.native_refusal() == ""
    assert library.library().variant == library.variants()[0]
    assert library.describe_library(1) == f"{library.variants()[0]}, 1 thread"
    monkeypatch.setenv("TIERCEL_CPU", "plain")
    assert library.library().variant == "plain"
    assert library.describe_library(2) == "plain, 2 threads"
    other = "neon" if TARGET.architecture == "x86_64" else "avx2"
    for name, message in ((other, "instructions that this processor lacks"), ("sse", "unknown")):
        monkeypatch.setenv("TIERCEL_CPU", name)
        for read in (library.library, library.native_refusal):
            with pytest.raises(ArgumentError, match=message) as caught:
                read()
            assert "plain" in caught.value.hint
    monkeypatch.setenv("TIERCEL_NATIVE", "0")
    assert library.native_refusal() == "TIERCEL_NATIVE=0"
    with pytest.raises(InstallationError, match="TIERCEL_NATIVE=0"):
        library.library()


def test_the_processor_decides_what_runs(tree, monkeypatch):
    """The small library reports no features: only `plain` runs. A slow variant replaces none."""
    make(tree)
    assert library.variants() == ("plain",)
    plain = library.load_variant("plain")
    plain.lib.tc_cpu_features = lambda: 0xFF
    assert library.variants() == tuple(v.name for v in TARGET.variants)
    fastest = tree / "lib" / TARGET.library_name(TARGET.variants[0])
    for path in (tree / "lib").glob(f"*{fastest.suffix}"):
        if path.stem != "plain":
            path.write_bytes(b"damaged")
    assert fastest.name in library.native_refusal()


def test_pools_are_made_once():
    native = library.load_variant("plain")
    pool = library.make_pool(2, native)
    assert library.make_pool(2, native) is pool
    assert library.make_pool(3, native).handle != pool.handle
    assert native.lib.tc_pool_size(pool.handle) == pool.num_threads == 2
    with pytest.raises(ArgumentError, match="num_threads=0"):
        library.make_pool(0, native)


def test_features_agree_with_what_linux_reports():
    path = Path("/proc/cpuinfo")
    if not path.exists() or TARGET.architecture != "x86_64":
        pytest.skip("reads Linux's list of an x86 processor")
    flags = set(path.read_text().partition("flags\t\t: ")[2].partition("\n")[0].split())
    needed = {"avx2": {"avx2", "fma", "f16c", "bmi2"}}
    needed["avx512"] = needed["avx2"] | {f"avx512{name}" for name in ("f", "vl", "bw", "dq")}
    needed["avx512"] |= {"avx512_vnni"}
    expected = [name for name in ("avx512", "avx2") if needed[name] <= flags]
    assert library.variants() == (*expected, "plain")


@pytest.mark.parametrize(
    ("environment", "has_compiler", "expected"),
    [
        ({}, True, []),
        ({}, False, ["ziglang>=0.14"]),
        ({"CC": "/opt/gcc"}, False, []),
        ({"TIERCEL_BUILD_NATIVE": "skip"}, False, []),
        ({"TIERCEL_BUILD_NATIVE": "fail"}, False, []),
    ],
    ids=str,
)
def test_zig_is_required_where_there_is_no_compiler(tree, environment, has_compiler, expected):
    (tree / "bin").mkdir()
    if has_compiler:
        (tree / "bin/gcc").touch(0o755)
    environment = {**environment, "PATH": str(tree / "bin")}
    assert packaging.build_requirements(environment) == expected
    make(tree)
    assert packaging.build_requirements(environment) == []


@pytest.mark.parametrize("value", ["skip", "fail"])
def test_a_build_that_makes_none_says_so_to_the_user(tree, value):
    built = packaging.build_for_package({"TIERCEL_BUILD_NATIVE": value}, tree / "lib")
    assert not built.has_library
    assert [path.name for path in built.files] == ["build_error.txt"]
    assert built.error == f"TIERCEL_BUILD_NATIVE={value}"
    assert f"is not built (TIERCEL_BUILD_NATIVE={value})" in library.native_refusal()
    clear()
    make(tree)
    assert not (tree / "lib/build_error.txt").exists()


def test_a_compiler_that_fails_leaves_the_installation_going(tree):
    built = packaging.build_for_package({"CC": "/no/such/compiler"}, tree / "lib")
    assert not built.has_library
    assert "/no/such/compiler" in built.error
    assert "/no/such/compiler" in library.native_refusal()


def test_what_belongs_into_a_wheel(tree):
    built = packaging.build_for_package(os.environ, tree / "lib")
    assert built.has_library
    assert not built.error
    names = {f"{v.name}{end}" for v in TARGET.variants for end in (first(tree).suffix, ".json")}
    assert {path.name for path in built.files} == names
    assert packaging.platform_tag().endswith(("x86_64", "aarch64", "arm64", "amd64"))


def test_a_wrong_value_for_the_build_is_an_error(tree):
    for function in (packaging.build_requirements, packaging.build_for_package):
        with pytest.raises(InstallationError, match="TIERCEL_BUILD_NATIVE='no' is unknown"):
            function({"TIERCEL_BUILD_NATIVE": "no", "PATH": ""})


def test_the_command(tree, capsys):
    out = str(tree / "lib")
    assert build.main(["--out", out, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert build.main(["--out", out]) == 0
    assert capsys.readouterr().out.count("bytes") == len(TARGET.variants)
    assert build.main(["--out", out, "--check-symbols"]) == 1
    assert "abi.py differ in " in capsys.readouterr().err
    (tree / "file").touch()
    assert build.main(["--out", str(tree / "file/lib")]) == 1
    shown = f"error: {tree}/file/lib: Not a directory. Check the path and the disk.\n"
    assert capsys.readouterr().err == shown
    with pytest.raises(SystemExit):
        build.main(["--target", "z80-cpm"])
    assert "x86_64-linux-gnu" in capsys.readouterr().err


def test_the_build_needs_the_standard_library_alone():
    """Pip runs it before Tiercel's requirements are installed."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    code += (
        "from tiercel.kernels.native import packaging; packaging.build_requirements({'CC': 'x'})"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_command_builds_the_library_whole(tmp_path):
    """The library that the other tests load was built by it too, before they began."""
    assert build.main(["--out", str(tmp_path), "--check-symbols"]) == 0


@pytest.mark.slow
@pytest.mark.skipif(not HAS_ZIG, reason="needs the package ziglang")
@pytest.mark.parametrize("target", build.TARGETS)
def test_libraries_of_other_systems_export_the_same_functions(tmp_path, target):
    assert build.main(["--target", target, "--out", str(tmp_path), "--check-symbols"]) == 0
