"""Chooses interpreter or GPU once, before any kernel module is imported; shared fixtures."""

import functools
import gc
import importlib.util
import io
import logging
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IN_WORKER:  # the workers share the cores; child processes inherit this too
    os.environ["OMP_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; children inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("TIERCEL_MODEL", None)  # a developer's own model must not replace the default one

import pytest
import torch

from tests.engine_forks import EngineForks

if importlib.util.find_spec("hypothesis"):  # a machine that runs tests of kernels alone may lack it
    from hypothesis import HealthCheck, settings

    # The same examples in each run, however slow; `--hypothesis-profile default` tries others.
    settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("repeatable")

# Workers take whole files in this order (--no-loadscope-reorder), so that no long file begins last.
LONG_FILES = (
    "tests/kernels/test_rtc.py",
    "tests/serve/lifecycle/test_lifecycle.py",
    "tests/ops/test_fused_decode_step.py",
    "tests/serve/lifecycle/test_replicas.py",
    "tests/ops/test_decode_attention.py",
    "tests/ops/test_moe_experts_tiles_on_cpu.py",
    "tests/models/test_deepseek_v4_steps.py",
    "tests/serve/web/test_page.py",
    "tests/cli/test_main.py",
    "tests/ipc/test_supervisor.py",
    "tests/llm/test_deepseek_v4_cache.py",
    "tests/scheduler/test_scheduler.py",
    "tests/ops/test_ngram_on_cpu.py",
    "tests/cli/test_chat.py",
    "tests/ops/test_latent_step_write.py",
    "tests/ops/test_fused_layer_tail.py",
    "tests/ops/test_prefill_attention.py",
    "tests/runner/test_row_state.py",
    "tests/cli/test_bench.py",
    "tests/ops/test_verify_accept.py",
    "tests/ops/test_all_reduce.py",
    "tests/kernels/test_triton_launch.py",
    "tests/serve/generation/tools/test_tools.py",
    "tests/llm/test_data_parallel.py",
    "tests/serve/test_spec.py",
    "tests/llm/test_speculation.py",
    "tests/llm/test_deepseek_v4_speculation.py",
    "tests/test_deepseek_v4_docs.py",
    "tests/cli/test_generate.py",
    "tests/ops/test_moe_experts_gemm_on_cpu.py",
    "tests/serve/http/test_tracing.py",
    "tests/kernels/native/test_attention.py",
    "tests/ipc/test_slow_steps.py",
    "tests/serve/test_surroundings.py",
    "tests/serve/test_soak.py",
    "tests/models/test_deepseek_v4_bad_input.py",
    "tests/cli/test_hostile.py",
)

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # Triton reads this when a kernel is decorated, so it must be set before imports
    os.environ["TRITON_INTERPRET"] = "1"
if IN_WORKER:
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: nearly all objects stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first; skip, visibly, tests that this machine cannot run."""
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.location[0], len(places)))
    for item in items:
        needs_one = item.get_closest_marker("gpu") is not None
        need = 2 if item.get_closest_marker("multigpu") else int(needs_one)
        if need > torch.cuda.device_count():
            item.add_marker(pytest.mark.skip(reason=f"needs {need} GPU(s)"))


def pytest_collection_finish() -> None:
    """Interpret kernels without waste, and read certificates once.

    Tests may import kernels as they run: interpreted, products of bfloat16 would be garbage.
    Each HTTP client reads certificates, which takes 20 ms, and tests make thousands, none for TLS.
    Pytest adds handlers to each logger that does not propagate, six times a test: PyTorch has 42.
    """
    ssl.create_default_context = functools.cache(ssl.create_default_context)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    if not HAS_GPU and importlib.util.find_spec("triton"):
        from tests.quick_interpreter import quicken

        quicken()


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's operators on the CPU, as where the native library could not be built."""
    monkeypatch.setenv("TIERCEL_NATIVE", "0")


@pytest.fixture
def device() -> torch.device:
    """The device on which kernels run here; on a CPU they run in Triton's interpreter."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, downloaded into the user's cache the first time."""
    from tiercel.loader.hub import resolve

    return resolve("smollm2", offline=False, report=None)


@pytest.fixture
def here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command line in this process; what it returns is like that of `harness.tiercel`."""
    from tiercel.cli.main import run

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        status = run(list(map(str, arguments)))
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, shown.out, shown.err)

    return call


@pytest.fixture(scope="session")
def engine_forks() -> EngineForks:
    """Starts engine processes as forks of one that has imported PyTorch."""
    return EngineForks()


@pytest.fixture(scope="module")
def forked_engines(engine_forks: EngineForks) -> Iterator[None]:
    """Engine processes of this module are forks; see `tests/engine_forks.py`."""
    with engine_forks.in_place_of_processes():
        yield


@pytest.fixture
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes of this test are no forks."""
    monkeypatch.setattr("tiercel.ipc.spawn.subprocess", subprocess)


@pytest.fixture(scope="module", autouse=True)
def _memory() -> Iterator[None]:
    """Keep garbage collections short, and release memory that tests leave in PyTorch's cache.

    Loading a model collects garbage, which takes 0.1 s and more if the objects of all test modules
    are visited. Other workers use the same GPU.
    """
    gc.collect()
    gc.freeze()
    yield
    if HAS_GPU:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Signals and logs as they were: a command that a test runs in this process sets up its own."""
    on_end = signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(name) for name in ("tiercel", "uvicorn", "opentelemetry")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    if signal.getsignal(signal.SIGTERM) is not on_end:
        signal.signal(signal.SIGTERM, on_end)
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        if logger.level != level:  # to set one takes a walk over all loggers
            logger.setLevel(level)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Without a GPU only the CPU's generator: for each other one a stack is formatted, and kept."""
    if HAS_GPU:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)
