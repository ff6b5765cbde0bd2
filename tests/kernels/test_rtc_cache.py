"""The disk cache of cubins holds what it says, with a compiler that counts."""

import ctypes
import hashlib
import threading

import pytest
import torch

from tests.kernels.test_rtc import ARCH, SOURCES
from tests.patience import PATIENCE_S
from tiercel.errors import InternalError
from tiercel.kernels.runtime import rtc


@pytest.fixture
def compiled(monkeypatch):
    """The sources compiled so far; the n-th cubin is 1,000 bytes of n."""
    calls = []

    def compile_cubin(source, arch):
        calls.append((source, arch))
        return bytes([len(calls)]) * 1000

    monkeypatch.setattr(rtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(rtc, "compiler_version", lambda: "nvrtc 13.0")
    return calls


def test_a_cubin_is_compiled_once(compiled, tmp_path):
    folder = tmp_path / "not" / "there yet"
    first = rtc.load_cubin(SOURCES[0], ARCH, folder)
    assert rtc.load_cubin(SOURCES[0], ARCH, folder) == first
    assert len(compiled) == 1
    (entry,) = folder.iterdir()  # nothing half-written stays
    assert entry.read_bytes() == hashlib.sha256(first).digest() + first


def test_several_are_compiled_side_by_side_and_once(compiled, tmp_path):
    """All that are missing are under way before any ends."""
    rtc.load_cubin(SOURCES[0], ARCH, tmp_path)
    waiting = threading.Barrier(len(SOURCES) - 1, timeout=PATIENCE_S)
    compile_one = rtc.compile_cubin

    def compile_cubin(source, arch):
        waiting.wait()
        return compile_one(source, arch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rtc, "compile_cubin", compile_cubin)
        rtc.fill_cache([*SOURCES, *SOURCES], ARCH, tmp_path)
        rtc.fill_cache(SOURCES, ARCH, tmp_path)
    assert len(compiled) == len(SOURCES)
    for source in SOURCES:
        rtc.load_cubin(source, ARCH, tmp_path)
    assert len(compiled) == len(SOURCES)


def test_a_refused_source_among_several_is_an_error(compiled, tmp_path, monkeypatch):
    def compile_cubin(source, arch):
        if source == SOURCES[1]:
            raise InternalError("refused")
        return b"\0" * 100

    monkeypatch.setattr(rtc, "compile_cubin", compile_cubin)
    with pytest.raises(InternalError, match="refused"):
        rtc.fill_cache(SOURCES, ARCH, tmp_path)


def test_the_cache_is_in_tiercels_folder_by_default(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path))
    rtc.load_cubin(SOURCES[0], ARCH)
    assert [path.name[:18] for path in (tmp_path / "cubins").iterdir()] == ["prefill_attention-"]


@pytest.mark.reliability
@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 32, b"\1" * 1032])
def test_a_damaged_entry_is_built_again(damage, compiled, tmp_path):
    rtc.load_cubin(SOURCES[0], ARCH, tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage)
    assert rtc.load_cubin(SOURCES[0], ARCH, tmp_path) == b"\2" * 1000
    assert rtc.load_cubin(SOURCES[0], ARCH, tmp_path) == b"\2" * 1000
    assert len(compiled) == 2


@pytest.mark.reliability
def test_a_folder_that_cannot_be_written_costs_compilations_only(compiled, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for count in (1, 2):
        assert rtc.load_cubin(SOURCES[0], ARCH, file / "cubins") == bytes([count]) * 1000
    entry = rtc.cubin_path(SOURCES[0], ARCH, "nvrtc 13.0", tmp_path)
    entry.mkdir()  # in the entry's place: neither readable nor replaceable
    assert rtc.load_cubin(SOURCES[0], ARCH, tmp_path) == b"\3" * 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["file", entry.name])


def with_change(changed):
    """`read_source` with a comment more in one file."""
    read = rtc.read_source
    return lambda path: read(path) + "// more" * (path == changed)


def test_everything_that_decides_a_cubin_is_in_its_name(tmp_path, monkeypatch):
    def name(source=SOURCES[0], arch=ARCH, compiler="nvrtc 13.0"):
        return rtc.cubin_path(source, arch, compiler, tmp_path).name

    names = [*map(name, SOURCES), name(arch="sm_100a"), name(compiler="nvrtc 13.1")]
    for changed in ("attention/prefill_attention.cu", "include/types.cuh"):
        with monkeypatch.context() as patch:
            patch.setattr(rtc, "read_source", with_change(changed))
            rtc._source_hash.cache_clear()
            names.append(name())
    rtc._source_hash.cache_clear()
    assert len(set(names)) == len(names)
    assert names[0] == name()


# ---- on a device


@pytest.mark.gpu
def test_the_driver_refuses_in_words(device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is built for Hopper")
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(InternalError, match="shared memory: CUDA driver error 1, invalid argument"):
        rtc.load_kernel(SOURCES[0], device, 1 << 20)
    kernel = rtc.load_kernel(SOURCES[0], device, 0)
    with pytest.raises(InternalError, match="launching 0 x 384 threads: CUDA driver error 1"):
        rtc.launch(kernel, 0, 384, [rtc.TensorMap()] * 5 + [ctypes.c_void_p(0)] * 11)
    x = torch.zeros(4, 2, 128, dtype=torch.bfloat16, device=device)
    with pytest.raises(InternalError, match=r"describing .* error 1, invalid argument"):
        rtc.make_tensor_map(x, (128, 2, 4), (3, 256), (64, 1, 4))
