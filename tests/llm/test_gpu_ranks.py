"""`LLM` on two GPUs: the answers of one, model after model in one process."""

from threading import Thread

import pytest

from tests.engine_process import is_alive
from tests.gguf_files import tiny_model
from tests.patience import wait_for
from tests.tiny_llm import PROMPTS, greedy, ids_of, open_on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]


def test_models_one_after_the_other_answer_as_on_one_gpu(tmp_path):
    """The second one meets its own ranks, and no process is left."""
    sizes = {"hidden": 256, "head_dim": 128, "ff": 512}
    path = tiny_model(tmp_path / "m.gguf", "qwen3", qtype="Q4_K", **sizes)
    with open_on_gpu(path, dtype="float32") as alone:
        expected = ids_of(alone.generate(PROMPTS, greedy(40)))
    for _ in range(2):
        with open_on_gpu(path, dtype="float32", tensor_parallel_size=2) as llm:
            pids = llm._engine._ranks.pids
            assert ids_of(llm.generate(PROMPTS, greedy(40))) == expected
        wait_for(lambda pids=pids: not any(map(is_alive, pids)))


def test_models_on_two_gpus_take_turns_in_one_process(tmp_path):
    """Each launches on its own GPU, from whichever thread."""
    sizes = {"hidden": 256, "head_dim": 128, "ff": 512}
    path = tiny_model(tmp_path / "m.gguf", "qwen3", qtype="Q4_K", **sizes)
    with open_on_gpu(path) as first, open_on_gpu(path, device="cuda:1") as second:
        expected = ids_of(first.generate(PROMPTS, greedy(40)))
        for llm in (second, first, second):
            assert ids_of(llm.generate(PROMPTS, greedy(40))) == expected
        found = []
        thread = Thread(target=lambda: found.append(second.generate(PROMPTS, greedy(40))))
        thread.start()
        thread.join()
        assert ids_of(found[0]) == expected
