"""Two GPUs that share a model: NCCL, CUDA graphs, and the ids of one GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.dsv4_engine import Steps
from tests.dsv4_files import TINY
from tests.engine.test_gpu_fused_decode_step import NMSE
from tests.engine.wide_model import write_wide_model
from tests.gguf_files import tiny_model
from tests.parallel.ranks import rank_pool
from tests.parallel.shared_models import FINITE, compute, load_shared, write_v4
from tiercel.ops.all_reduce import make_small_all_reduce
from tiercel.parallel import SINGLE

pytestmark = pytest.mark.multigpu
# Float32 sums in another order.
TOLERANCE = 2e-3
KINDS = {"tensor": {}, "both": {"expert_parallel": True}}


@pytest.fixture(scope="module")
def two_gpus():
    with rank_pool(2, 120.0, "cuda") as pool:
        yield pool


def check(pool, path, length, kinds, dtype):
    """Ranks agree to the bit; in float32 with one GPU as well."""
    ranks = pool.run(compute, path, length, kinds, "cuda", dtype)
    assert np.array_equal(ranks[0].logits, ranks[1].logits)
    assert np.array_equal(ranks[0].drafts, ranks[1].drafts)
    assert ranks[0].token_ids == ranks[1].token_ids
    alone = compute(SINGLE, path, length, {}, "cuda", dtype)
    if dtype == "float32":
        assert ranks[0].token_ids == alone.token_ids
        np.testing.assert_allclose(ranks[0].logits, alone.logits, atol=TOLERANCE, rtol=0)
    else:
        error = np.abs(ranks[0].logits - alone.logits).mean()
        assert error < 0.05 * np.abs(alone.logits).mean()


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deepseek_v4(two_gpus, tmp_path, kinds, dtype):
    check(two_gpus, write_v4(tmp_path, formats=True), 40, kinds, dtype)


def test_the_released_deepseek_v4(two_gpus):
    check(two_gpus, TINY, 40, {}, "float32")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_dense_models(two_gpus, tmp_path, arch, dtype):
    sizes = {"hidden": 256, "head_dim": 128, "ff": 512}
    path = tiny_model(tmp_path / "m.gguf", arch, qtype="Q4_K", **sizes)
    check(two_gpus, path, 40, {}, dtype)


def replay(group, path, dtype):
    """Logits and best ids of a decode step, eager and replayed from a graph."""
    device = torch.device("cuda", group.rank)
    model, _ = load_shared(group, path, device, dtype)
    with torch.inference_mode():
        return replay_steps(group, model, device)


def replay_steps(group, model, device):
    ids = list(range(5, 25))
    steps = Steps(model, [ids], device=device, unwritten=FINITE)
    batch, hidden = steps.step({0: 19})
    batch, hidden = steps.step({0: 1})
    eager = model.logits(hidden).clone()
    for _ in range(2):  # steps write what they wrote before
        model.best_tokens(model.forward(batch), 1)
    torch.cuda.synchronize()
    group.meet("warming up", 60.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        states = model.forward(batch)
        logits, best = model.logits(states), model.best_tokens(states, 1)[1]
    found = []
    for _ in range(8):
        logits.zero_()
        graph.replay()
        found.append((torch.equal(logits, eager), int(best) == int(eager.argmax())))
    return found, eager.cpu().numpy()


@pytest.mark.parametrize("family", ["v4", "dense"])
def test_replays_of_a_graph_are_eager_steps(two_gpus, tmp_path, family):
    if family == "v4":
        path, dtype = write_v4(tmp_path, formats=True), torch.bfloat16
    else:
        sizes = {"hidden": 256, "head_dim": 128, "ff": 512}
        path = tiny_model(tmp_path / "m.gguf", "qwen3", qtype="Q4_K", **sizes)
        dtype = torch.float16
    (first, logits), (second, others) = two_gpus.run(replay, path, dtype)
    assert first == second == [(True, True)] * 8
    assert np.array_equal(logits, others)


def single_tokens(group, path):
    """Which kernel steps of one token take, and their logits after a prompt."""
    device = torch.device("cuda", group.rank)
    if group.size > 1:
        group = replace(group, small_sums=make_small_all_reduce(group.processes, device))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setenv("TIERCEL_MEGAKERNEL", "1")
        model, _ = load_shared(group, path, device, torch.float16)
        steps = Steps(model, [list(range(5, 105))], device=device, unwritten=FINITE)
        steps.step({0: 60})
        logits = [model.logits(steps.step({0: 1})[1]).clone() for _ in range(40)]
    return model.fused_paths["fused_decode_step"], torch.cat(logits).cpu().numpy()


def test_single_tokens_in_one_kernel(two_gpus, tmp_path):
    """Where a token's lead exceeds what rounding moves, it is that of one GPU."""
    path = write_wide_model(tmp_path / "m.gguf")
    (used, logits), (others_used, others) = two_gpus.run(single_tokens, path)
    alone_used, alone = single_tokens(SINGLE, path)
    assert {used, others_used, alone_used} == {"used"}
    assert np.array_equal(logits, others)
    errors = ((logits - alone) ** 2).sum(1) / (alone**2).sum(1)
    assert errors.max() <= NMSE
    lead = np.diff(np.sort(alone, axis=1)[:, -2:], axis=1)[:, 0]
    is_clear = lead > 2 * np.abs(logits - alone).max(axis=1)
    assert is_clear.any()
    assert np.array_equal(logits.argmax(1)[is_clear], alone.argmax(1)[is_clear])
