"""Memory and processors within the limits of control groups: fake trees, and a real group."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.harness import COMMAND, environment
from tests.large_models import sparse_model
from tiercel.machine import read_memory, usable_cpus

GB = 10**9
UNLIMITED_V1 = 9223372036854771712
LIMITS = ("memory.max", "memory.limit_in_bytes")
WITHOUT_NATIVE = {"TIERCEL_NATIVE": "0"}  # 6.8 GiB are what PyTorch's forms take


@pytest.fixture
def host(monkeypatch):
    """A machine of 24 GB, 20 of which are available, with 8 processors."""
    memory = psutil.virtual_memory()._replace(total=24 * GB, available=20 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def tree(root, own, files):
    """A root with `proc/self/cgroup` and files below `sys/fs/cgroup`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group_v2(name, limit, used, *, inactive=0, active=0, high="max"):
    return {
        f"{name}/memory.max": limit,
        f"{name}/memory.high": high,
        f"{name}/memory.current": used,
        f"{name}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file {active}\nslab 7",
    }


def test_without_groups_the_machine_counts(host, tmp_path):
    found = read_memory(tmp_path)
    assert (found.available, found.total, found.limit) == (20 * GB, 24 * GB, None)
    assert usable_cpus(tmp_path) == 8


def test_a_container_of_6_gb_on_a_host_of_24(host, tmp_path):
    """Version 2 with a namespace: the container's group is the root that it sees."""
    root = tree(tmp_path, "0::/\n", group_v2(".", 6 * GB, GB))
    found = read_memory(root)
    assert (found.available, found.limit) == (5 * GB, 6 * GB)


def test_the_page_cache_of_a_mapped_file_counts_as_free(host, tmp_path):
    files = group_v2(".", 6 * GB, 5_900_000_000, inactive=4 * GB, active=GB)
    assert read_memory(tree(tmp_path, "0::/\n", files)).available == 5_100_000_000


def test_more_than_the_limit_is_used(host, tmp_path):
    files = group_v2(".", 6 * GB, 7 * GB)
    assert read_memory(tree(tmp_path, "0::/\n", files)).available == 0


def test_the_tightest_of_the_groups_above_counts(host, tmp_path):
    files = group_v2("a", 8 * GB, 4 * GB) | group_v2("a/b", "max", GB) | group_v2("c", GB, 0)
    found = read_memory(tree(tmp_path, "0::/a/b\n", files))
    assert (found.available, found.limit) == (4 * GB, 8 * GB), "a holds more than b does"


def test_a_group_is_slowed_down_above_its_high_mark(host, tmp_path):
    files = group_v2("a", 8 * GB, GB, high=3 * GB)
    found = read_memory(tree(tmp_path, "0::/a\n", files))
    assert (found.available, found.limit) == (2 * GB, 3 * GB)


@pytest.mark.parametrize(
    ("own", "folder"),
    [("4:memory:/docker/x\n0::/\n", "memory"), ("4:cpu,memory:/docker/x\n", "memory/docker/x")],
    ids=["the mount is the container's", "the host's path"],
)
def test_version_1(host, tmp_path, own, folder):
    files = {
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "memory/memory.usage_in_bytes": 0,
        f"{folder}/memory.limit_in_bytes": 6 * GB,
        f"{folder}/memory.usage_in_bytes": 5 * GB,
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {4 * GB}\n",
    }
    found = read_memory(tree(tmp_path, own, files))
    assert (found.available, found.limit) == (5 * GB, 6 * GB)


def test_version_1_without_a_limit(host, tmp_path):
    files = {"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/memory.usage_in_bytes": 9 * GB}
    found = read_memory(tree(tmp_path, "4:memory:/\n", files))
    assert (found.available, found.limit) == (20 * GB, None)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/cpu.max": "200000 100000"}, 2),
        ({"a/cpu.max": "150000 100000"}, 2),
        ({"a/cpu.max": "10000 100000"}, 1),
        ({"a/cpu.max": "max 100000"}, 8),
        ({"a/cpu.max": "9900000 100000"}, 8),
        ({"cpu.max": "300000 100000", "a/cpu.max": "max 100000"}, 3),
        ({"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 1),
        ({"a/cpu.max": "garbage"}, 8),
        ({}, 8),
    ],
    ids=str,
)
def test_processors(host, tmp_path, files, expected):
    assert usable_cpus(tree(tmp_path, "3:cpu,cpuacct:/a\n0::/a\n", files)) == expected


def test_affinity_counts(host, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert usable_cpus(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS, Windows
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_cpus(tmp_path) == 12


def test_without_proc_the_system_is_asked_otherwise(tmp_path, monkeypatch):
    def refuse():
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    found = read_memory(tmp_path)
    assert 0 < found.available <= found.total
    monkeypatch.setattr(os, "sysconf_names", {})
    assert read_memory(tmp_path) is None


def own_memory_group():
    """The folder of this process's group with a memory controller, where a group can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        mount = "memory" if "memory" in names.split(",") else ""
        folder = Path("/sys/fs/cgroup", mount, path.strip("/"))
        limit = "memory.limit_in_bytes" if mount else "memory.max"
        if (mount or not names) and (folder / "cgroup.procs").exists():
            yield folder, limit


@pytest.fixture
def real_group():
    """A control group of this kernel with a limit of 400 MB."""
    for folder, limit in own_memory_group():
        group = folder / f"tiercel-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(400 << 20))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("this process may make no control group with a limit of memory")


IN_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from tiercel.machine import read_memory
before = read_memory()
with open(sys.argv[2], "rb") as file:
    file.read()
after = read_memory()
print(before.limit, before.available, after.available)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_real_group(real_group, tmp_path):
    """Its limit is detected, and a file of half its size in the page cache uses nothing up."""
    file = tmp_path / "file"
    file.write_bytes(bytes(200 << 20))
    done = subprocess.run(
        [sys.executable, "-c", IN_GROUP, real_group, file],
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    limit, before, after = map(int, done.stdout.split())
    assert limit == 400 << 20
    assert (250 << 20) < before <= limit
    assert after > before - (20 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_container_of_6_gb_refuses_a_model_with_the_numbers(real_group, tmp_path):
    """Instead of being killed while it loads: weights of 6.8 GiB, or 28.5 in float32."""
    limit = next(path for path in LIMITS if (real_group / path).exists())
    try:
        (real_group / limit).write_text(str(6 * GB))
    except OSError:
        pytest.skip("the group above has a tighter limit")
    if psutil.virtual_memory().available < 7 * GB:
        pytest.skip("the machine itself has no more")
    model = sparse_model(tmp_path / "8b.gguf", "qwen3-8b")
    enter = f'echo $$ > "{real_group}/cgroup.procs"; exec "$@"'
    arguments = ["generate", "x", "-m", str(model), "--dtype", "bfloat16", "--device", "cpu"]
    done = subprocess.run(
        ["bash", "-c", enter, "bash", *COMMAND, *arguments],
        env=environment() | WITHOUT_NATIVE, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(
        r"the weights need about 6\.8 GiB in bfloat16 and one sequence of", done.stderr
    )
    assert re.search(r"80% of the 5\.\d GiB available within a limit of 5\.6 GiB", done.stderr)
    assert "It takes 15.5 GiB of free memory" in done.stderr
