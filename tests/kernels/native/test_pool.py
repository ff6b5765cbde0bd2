"""The thread pool: each piece runs once and in order of the tasks, whatever the threads do."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, wait_for
from tiercel.errors import InstallationError
from tiercel.kernels.native import build, variants

HERE = Path(__file__).parent
FLAGS = ("-std=c17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{variants.SOURCE_DIR}")


def compile_tasks(out, *flags):
    """Compile `pool_tasks.c` with the pool; skips where there is no compiler."""
    try:
        compiler = build.find_compiler(os.environ)
    except InstallationError as error:
        pytest.skip(str(error))
    line = [*compiler.command, *FLAGS, *flags, str(HERE / "pool_tasks.c"), "-o", str(out)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "pool_tasks.so"
    lib = ctypes.CDLL(str(compile_tasks(path, "-shared", "-fPIC")))
    lib.tc_pool_create.restype = ctypes.c_void_p
    for name in ("tc_pool_destroy", "tc_pool_size"):
        getattr(lib, name).argtypes = (ctypes.c_void_p,)
    lib.pool_check.restype = lib.pool_check_many.restype = ctypes.c_int64
    lib.pool_check.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    lib.pool_check_many.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    return lib


@pytest.fixture
def make_pool(lib):
    pools = []

    def make(num_threads):
        pools.append(lib.tc_pool_create(num_threads))
        return pools[-1]

    yield make
    for pool in pools:
        lib.tc_pool_destroy(pool)


def faults(lib, pool, *num_pieces, delays=0):
    array = (ctypes.c_int64 * len(num_pieces))(*num_pieces)
    return lib.pool_check(pool, array, len(num_pieces), delays)


def workers():
    """State and blocked signals of the pool's threads, in the kernel's words."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            text = (task / "status").read_text()
        except OSError:  # it ended
            continue
        lines = dict(line.split(":\t") for line in text.splitlines())
        if lines["Name"] == "tiercel":
            found.append((lines["State"][0], int(lines["SigBlk"], 16)))
    return found


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_each_piece_runs_once_after_the_tasks_before_it(lib, make_pool, num_threads):
    pool = make_pool(num_threads)
    assert lib.tc_pool_size(pool) == num_threads
    for delays in (0, 1, 2, 3):
        assert faults(lib, pool, 5, 1, 0, 37, 2, 1, 1, 8, delays=delays) == 0


def test_ten_thousand_runs(lib, make_pool):
    pool = make_pool(3)
    assert lib.pool_check_many(pool, 10_000, 7) == 0


def test_more_threads_than_processors(lib, make_pool):
    assert lib.pool_check_many(make_pool(8), 500, 8) == 0
    assert lib.pool_check_many(make_pool(4 * (os.cpu_count() or 1)), 100, 9) == 0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_nothing_to_do(lib, make_pool, num_threads):
    pool = make_pool(num_threads)
    for num_pieces in ((), (0,), (0, 0, 0), (-1, 0), (0, 3, 0), (2, 0, 0, 1)):
        assert faults(lib, pool, *num_pieces) == 0


def test_fewer_than_one_thread_is_one(lib, make_pool):
    assert [lib.tc_pool_size(make_pool(count)) for count in (0, -3)] == [1, 1]


def test_two_callers_take_turns(lib, make_pool):
    pool = make_pool(2)
    found = []

    def call(seed):
        found.append(lib.pool_check_many(pool, 300, seed))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [0, 0, 0]


@pytest.mark.parametrize("is_running", [False, True], ids=["between runs", "within a run"])
def test_a_child_process_has_threads_of_its_own(lib, make_pool, is_running):
    pool = make_pool(3)
    assert faults(lib, pool, 4, 4) == 0
    found = []
    caller = threading.Thread(target=lambda: found.append(lib.pool_check_many(pool, 2000, 5)))
    if is_running:
        caller.start()
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)  # a child that waits for a thread of its parent ends
        try:
            is_right = lib.pool_check_many(pool, 50, 6) == 0
            wait_for(lambda: len(workers()) == 2)  # a thread takes its name when it first runs
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    if is_running:
        caller.join()
        assert found == [0]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert faults(lib, pool, 4, 4) == 0


def test_a_child_process_may_destroy_what_it_inherits(lib):
    pool = lib.tc_pool_create(3)
    assert faults(lib, pool, 4, 4) == 0
    child = os.fork()
    if child == 0:
        lib.tc_pool_destroy(pool)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lib.tc_pool_destroy(pool)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into Linux's /proc")
def test_threads_come_with_the_first_run_sleep_between_runs_and_end(lib):
    before = len(workers())
    pool = lib.tc_pool_create(4)
    assert len(workers()) == before
    assert faults(lib, pool, 9, 9) == 0
    wait_for(lambda: len(workers()) == before + 3)
    wait_for(lambda: {state for state, _ in workers()} == {"S"})
    for number in (2, 10, 15, 17):  # SIGINT, SIGUSR1, SIGTERM, SIGCHLD are for Python's threads
        assert all(blocked >> (number - 1) & 1 for _, blocked in workers())
    assert faults(lib, pool, 9, 9) == 0
    wait_for(lambda: {state for state, _ in workers()} == {"S"})
    lib.tc_pool_destroy(pool)
    wait_for(lambda: len(workers()) == before)


def test_a_pool_without_a_run_can_be_destroyed(lib):
    lib.tc_pool_destroy(lib.tc_pool_create(4))
    lib.tc_pool_destroy(None)


def test_a_pool_can_be_destroyed_while_its_threads_wait(lib):
    for _ in range(200):
        pool = lib.tc_pool_create(3)
        assert faults(lib, pool, 2) == 0
        lib.tc_pool_destroy(pool)


@pytest.mark.parametrize("num_granted", [0, 1])
def test_a_system_that_refuses_threads(lib, make_pool, num_granted):
    pool = make_pool(4)
    lib.pool_limit_threads(num_granted)
    try:
        assert faults(lib, pool, 5, 0, 7, delays=1) == 0
    finally:
        lib.pool_limit_threads(1 << 30)
    assert faults(lib, pool, 5, 0, 7) == 0
    assert lib.tc_pool_size(pool) == 4


@pytest.mark.slow
@pytest.mark.parametrize("sanitize", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(tmp_path, sanitize):
    flags = ("-g", "-DPOOL_MAIN", f"-fsanitize={sanitize}", "-fno-sanitize-recover=all")
    program = compile_tasks(tmp_path / "pool_tasks", *flags)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 faults\n"), done.stderr
