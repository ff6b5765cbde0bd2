"""Memory of each rank: planned from the header, read from the file, and nothing beside it."""

import gc
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.cli.harness import tiercel
from tests.dsv4_files import CONFIG, TINY
from tests.gguf_files import tiny_model
from tests.large_models import sparse_model
from tests.models.test_deepseek_v4_config import FLASH, PRO
from tests.models.test_footprint import loaded_bytes, tensors_of
from tests.parallel.shared_models import CPU, load_shared
from tests.test_deepseek_v4_docs import GIB, released
from tiercel.models.footprint import cache_bytes, gpus_that_fit, weight_footprint
from tiercel.models.sharding import WHOLE, Sharding
from tiercel.models.source import open_source
from tiercel.models.weights import WeightReader
from tiercel.parallel import Group
from tiercel.quant_types import QuantType

# Of the two kinds of layers, float32 of 400 positions.
ANGLES = 2 * 400 * CONFIG["qk_rope_head_dim"] * 4
SHARDINGS = [Sharding(rank, 2, expert_parallel=whole) for whole in (False, True) for rank in (0, 1)]


def held_bytes(model):
    return sum({s.data_ptr(): s.nbytes() for s in tensors_of(model, [])}.values())


@pytest.mark.parametrize("whole", [False, True], ids=["tensor", "experts"])
def test_a_rank_of_deepseek_v4_takes_what_the_plan_says(whole):
    source = open_source(TINY)
    for rank in range(2):
        model, _ = load_shared(Group(rank, 2), TINY, expert_parallel=whole)
        sharding = Sharding(rank, 2, expert_parallel=whole)
        planned = weight_footprint(source, "float32", "cpu", has_draft_head=True, sharding=sharding)
        # Scales of FP8 blocks that are cut are repeated: bytes here, none at true sizes.
        assert held_bytes(model) - ANGLES == pytest.approx(planned.nbytes, rel=0.02)
        assert 0 < planned.whole_bytes < planned.nbytes
        del model
        gc.collect()


def test_a_rank_of_a_dense_model_takes_what_the_plan_says(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", "llama", qtype="Q8_0")
    for rank in range(2):
        model, _ = load_shared(Group(rank, 2), path)
        planned = weight_footprint(open_source(path), "float32", "cpu", sharding=Sharding(rank, 2))
        runner = SimpleNamespace(runner=SimpleNamespace(model=model))
        assert loaded_bytes(SimpleNamespace(_engine=runner)) == planned.nbytes
        del model
        gc.collect()


def names_of(source):
    return list(source.stored or source.names)


def read(reader, source, name):
    """The rank's part of one weight, as bytes."""
    if not source.stored:
        return [reader.file_tensor(name).planes["data"].numpy().copy()]
    stored = source.stored[name]
    if stored.limit:
        return [reader.integers(name).numpy()]
    if len(stored.shape) == 1 or not name.endswith(".weight"):
        return [(reader.vector if len(stored.shape) == 1 else reader.floats)(name).numpy()]
    return [plane.view(torch.uint8).numpy() for plane in reader.weight(name).planes.values()]


@pytest.mark.parametrize("file", ["dsv4", "llama", "qwen2"])
def test_ranks_read_parts_that_together_are_the_file(tmp_path, file):
    """Bytes of what two ranks read: the whole once where it is split, twice where it is not."""
    path = TINY if file == "dsv4" else tiny_model(tmp_path / "m.gguf", file, qtype="Q8_0")
    source = open_source(path)
    for name in names_of(source):
        whole = WeightReader(source, CPU)
        read(whole, source, name)
        for kind in (SHARDINGS[:2], SHARDINGS[2:] if file == "dsv4" else []):
            sizes = []
            for sharding in kind:
                reader = WeightReader(source, CPU, sharding=sharding)
                read(reader, source, name)
                sizes.append(reader.read_bytes)
            is_split = reader._cut(name) is not None
            if sizes and is_split:  # scales of a block that is cut are counted by both ranks
                assert whole.read_bytes <= sum(sizes) <= 1.1 * whole.read_bytes, name
                assert max(sizes) <= 0.6 * whole.read_bytes, name
            elif sizes:
                assert sizes == [whole.read_bytes] * 2, name


class Poisoned:
    """A checked file whose tensors are overwritten but for the bytes that a rank may read."""

    def __init__(self, source, name, kept):
        self._source, self._name, self._kept = source, name, kept

    def __getattr__(self, attribute):
        return getattr(self._source, attribute)

    def data(self, name):
        data = self._source.data(name)
        if name != self._name:
            return data
        poisoned = np.full_like(data, 0xA5)
        poisoned[self._kept] = data[self._kept]
        return poisoned


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("blk.0.attn_q.weight", lambda rank: np.s_[rank * 32 : rank * 32 + 32]),
        ("blk.0.attn_k.weight", lambda rank: np.s_[rank * 16 : rank * 16 + 16]),
        # 64 columns are two blocks of 34 bytes.
        ("blk.0.attn_output.weight", lambda rank: np.s_[:, rank * 34 : rank * 34 + 34]),
        ("blk.1.ffn_gate.weight", lambda rank: np.s_[rank * 64 : rank * 64 + 64]),
        ("blk.1.ffn_down.weight", lambda rank: np.s_[:, rank * 68 : rank * 68 + 68]),
    ],
)
def test_bytes_of_other_ranks_do_not_matter(tmp_path, name, kept, rank):
    """What a rank has of a matrix is the same whatever the bytes of the other parts are."""
    path = tiny_model(tmp_path / "m.gguf", "qwen3", qtype="Q8_0")
    source = open_source(path)
    (ours,) = (own for own, theirs in source.names.items() if theirs == name)
    sharding = Sharding(rank, 2)
    wanted = read(WeightReader(source, CPU, sharding=sharding), source, ours)
    poisoned = Poisoned(source, name, kept(rank))
    found = read(WeightReader(poisoned, CPU, sharding=sharding), source, ours)
    assert np.array_equal(found[0], wanted[0])
    other = Sharding(1 - rank, 2)
    assert not np.array_equal(
        read(WeightReader(poisoned, CPU, sharding=other), source, ours)[0],
        read(WeightReader(source, CPU, sharding=other), source, ours)[0],
    )


# --- True shapes -------------------------------------------------------------------------------


def gib(source, size, **kinds):
    rank = Sharding(0, size, **kinds)
    return weight_footprint(source, "bfloat16", "cuda", sharding=rank).nbytes / GIB


def test_deepseek_v4_on_several_gpus():
    """Both ways to split the experts take the same bytes; a part of attention is on every GPU."""
    flash = released(FLASH, QuantType.MXFP4)
    whole = gib(flash, 1)
    for size in (2, 4, 8):
        parts = gib(flash, size)
        assert parts == pytest.approx(gib(flash, size, expert_parallel=True), rel=1e-3)
        assert whole / size < parts < whole / size + 2
    assert gpus_that_fit(flash, "bfloat16", 131_072, 125 * GIB) == [2, 4, 8]
    assert gpus_that_fit(flash, "bfloat16", 131_072, 70 * GIB) == [4, 8]
    pro = released(PRO, QuantType.MXFP4)
    assert gpus_that_fit(pro, "bfloat16", 131_072, 125 * GIB) == [8, 16]


def test_the_cache_of_a_dense_model_is_split_by_its_heads(tmp_path):
    config = open_source(sparse_model(tmp_path / "m.gguf", "qwen3-8b")).config
    whole = cache_bytes(config, 4096, "float16", sharding=WHOLE)
    parts = [
        cache_bytes(config, 4096, "float16", sharding=Sharding(0, size)) for size in (2, 8, 16)
    ]
    assert parts == [whole // 2, whole // 8, whole // 8]  # 8 heads: two of 16 ranks share one


def test_inspect_shows_each_gpu(tmp_path):
    path = sparse_model(tmp_path / "m.gguf", "qwen3-8b")
    facts = json.loads(tiercel("inspect", path, "--tensor-parallel-size", "2", "--json").stdout)
    gpus = facts["gpus"]
    assert gpus["bytes_per_gpu"] == (
        gpus["split_weight_bytes"] + gpus["whole_weight_bytes"] + gpus["kv_bytes_full_context"]
    )
    whole = facts["memory"]["at_rest"]["cuda"]["float16"]["weight_bytes"]
    assert 2 * gpus["split_weight_bytes"] + gpus["whole_weight_bytes"] == whole
    assert gpus["fits"] == {"H100, 80 GB": [1, 2, 4, 8, 16], "H200, 141 GB": [1, 2, 4, 8, 16]}
    shown = tiercel("inspect", path, "--tensor-parallel-size", "4").stdout
    assert "Each of 4 GPUs (tensor parallel, float16)" in shown
    assert "H100, 80 GB            fits on 1 or 2 or 4 or 8 or 16 of them" in shown


def test_inspect_shows_gpus_with_requests_of_their_own():
    """Attention and cache are whole on each of them, experts are not."""
    options = ("--tensor-parallel-size", "2", "--data-parallel-attention")
    gpus = json.loads(tiercel("inspect", TINY, *options, "--json").stdout)["gpus"]
    shared = json.loads(tiercel("inspect", TINY, *options[:2], "--json").stdout)["gpus"]
    assert (gpus["data_parallel_attention"], shared["data_parallel_attention"]) == (True, False)
    assert gpus["whole_weight_bytes"] > shared["whole_weight_bytes"]
    assert gpus["split_weight_bytes"] < shared["split_weight_bytes"]
    rank = Sharding(0, 2, tensor_parallel=False, expert_parallel=True)
    planned = weight_footprint(open_source(TINY), "bfloat16", "cuda", sharding=rank)
    assert gpus["split_weight_bytes"] + gpus["whole_weight_bytes"] == planned.nbytes
    assert gpus["kv_bytes_full_context"] == shared["kv_bytes_full_context"]
    shown = tiercel("inspect", TINY, *options).stdout
    assert "Each of 2 GPUs (requests of its own, whole experts, bfloat16)" in shown


def test_inspect_refuses_in_one_line():
    process = tiercel("inspect", TINY, "--tensor-parallel-size", "4")
    assert process.returncode == 1
    assert "4 does not divide its 2 output groups" in process.stderr
    assert "Traceback" not in process.stderr
