"""`LLM` on two GPUs: the answers of one, model after model in one process."""

from threading import Thread

import pytest

from tests.engine.wide_model import open_wide, write_wide_model
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


def test_a_lone_request_takes_one_kernel_on_two_gpus(tmp_path, monkeypatch):
    """Its steps are replays of a graph: twice the same answer, which begins as on one GPU."""
    monkeypatch.setenv("TIERCEL_PREFIX_CACHE", "0")  # else the second prompt has other bits
    path = write_wide_model(tmp_path / "m.gguf")
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 90)]
    firsts = []
    for size in (1, 2):
        with open_wide(path, max_num_seqs=4, tensor_parallel_size=size) as llm:
            assert llm._engine.runner.model.fused_paths["fused_decode_step"] == "used"
            found = [[ids_of(llm.generate(p, greedy(60))) for p in prompts] for _ in range(2)]
        assert found[0] == found[1]
        firsts.append([answers[0][0][0] for answers in found[0]])
    assert firsts[0] == firsts[1]
