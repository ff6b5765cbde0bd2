"""On which GPU a runner launches."""

from types import SimpleNamespace

import pytest
import torch

from tiercel.runner.runner import ModelRunner


class FirstWriteError(Exception):
    """The step would now write to the device."""


@pytest.mark.parametrize("run", ["launch", "run_scratch"])
def test_a_step_makes_its_models_gpu_that_of_the_thread_first(monkeypatch, run):
    """Models on two GPUs take turns in one process; Triton launches on the thread's GPU."""

    def write(*_):
        raise FirstWriteError

    entered = []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    runner = ModelRunner.__new__(ModelRunner)
    runner.config = SimpleNamespace(device=torch.device("cuda", 1))
    runner._copy_stream, runner._batches = object(), SimpleNamespace()
    runner._write_rows = write
    runner.rows = property()  # has no scratch row
    given = SimpleNamespace(scheduled=()) if run == "launch" else (1,)
    with pytest.raises((FirstWriteError, AttributeError)):
        getattr(runner, run)(given)
    assert entered == [torch.device("cuda", 1)]
