"""A model that ranks share gives the logits of one process, and the same bits on every rank."""

import functools

import numpy as np
import pytest

from tests.dsv4_engine import TOLERANCE
from tests.dsv4_files import TINY, write_gguf_mxfp4, write_nvfp4, write_transformers_memory
from tests.gguf_files import tiny_model
from tests.mtp_model import mtp_model
from tests.parallel.shared_models import compute, write_dense_folder, write_v4
from tiercel.parallel import SINGLE

TENSOR = {}
EXPERT = {"tensor_parallel": False, "expert_parallel": True}
KINDS = {"tensor": TENSOR, "expert": EXPERT, "both": {"expert_parallel": True}}
V4_LENGTH = 150  # past the first HCA entry, and past what the indexer may choose
LENGTH = 40


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def alone(path, length):
    """What one process computes."""
    return compute(SINGLE, path, length, {})


def check(pool, path, length, kinds=TENSOR):
    """Ranks agree with each other to the bit, and with one process to rounding."""
    whole = alone(path, length)
    ranks = pool.run(compute, path, length, kinds)
    assert np.abs(whole.logits).max() > 1, "logits that say something"
    for rank in ranks:
        assert np.array_equal(rank.logits, ranks[0].logits)
        assert np.array_equal(rank.drafts, ranks[0].drafts)
        assert rank.token_ids == whole.token_ids
        np.testing.assert_allclose(rank.logits, whole.logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(rank.drafts, whole.drafts, atol=TOLERANCE, rtol=0)
        assert rank.read_bytes < whole.read_bytes
    return whole, ranks


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_two_ranks_of_the_released_deepseek_v4(two_ranks, kinds):
    """FP8 blocks of its 2 groups are cut inside; the draft head is shared as well."""
    whole, _ = check(two_ranks, TINY, V4_LENGTH, kinds)
    assert len(whole.drafts)


@pytest.fixture(scope="module")
def v4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4")
    return {
        "float": write_v4(folder / "float", formats=False),
        "formats": write_v4(folder / "formats", formats=True),
    }


@pytest.mark.parametrize("formats", [pytest.param("float", marks=pytest.mark.slow), "formats"])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_four_ranks_of_deepseek_v4(four_ranks, v4, formats, kinds):
    check(four_ranks, v4[formats], V4_LENGTH, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("formats", ["float", "formats"])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_two_ranks_of_a_wider_deepseek_v4(two_ranks, v4, formats, kinds):
    check(two_ranks, v4[formats], V4_LENGTH, kinds)


OTHER_FILES = [
    pytest.param(write, kind, marks=() if is_quick else pytest.mark.slow)
    for write, kind, is_quick in (
        (write_nvfp4, "tensor", True),
        (write_nvfp4, "both", True),
        (write_transformers_memory, "tensor", True),
        (write_transformers_memory, "both", False),
        (write_gguf_mxfp4, "tensor", False),
        (write_gguf_mxfp4, "both", True),
    )
]


@pytest.mark.parametrize(("write", "kind"), OTHER_FILES)
def test_two_ranks_of_deepseek_v4_in_other_files(two_ranks, tmp_path, write, kind):
    """Experts in one tensor, gate and up joined, NVFP4, blocks of GGUF."""
    path = tmp_path / "m.gguf" if write is write_gguf_mxfp4 else tmp_path
    check(two_ranks, write(path), 40, KINDS[kind])


QUICK = {("llama", "F32"), ("qwen2", "Q8_0"), ("qwen3", "Q4_K"), ("gemma3", "F32")}
DENSE = [
    pytest.param(arch, qtype, marks=() if (arch, qtype) in QUICK else pytest.mark.slow)
    for arch in ("llama", "qwen2", "qwen3", "gemma3")
    for qtype in ("F32", "Q8_0", "Q4_K")
]


@pytest.mark.parametrize(("arch", "qtype"), DENSE)
def test_two_ranks_of_a_dense_gguf(two_ranks, tmp_path, arch, qtype):
    check(two_ranks, tiny_model(tmp_path / "m.gguf", arch, qtype=qtype, **sizes_for(qtype)), LENGTH)


def sizes_for(qtype):
    """Sizes that two ranks can cut between blocks of a type."""
    return {"hidden": 256, "head_dim": 128, "ff": 512} if qtype.endswith("_K") else {}


@pytest.mark.parametrize(("qtype", "ff"), [("Q8_0", 96), ("Q4_K", 768)])
def test_two_ranks_with_unequal_parts(two_ranks, tmp_path, qtype, ff):
    """Three blocks of the inner width: the first rank has two of them."""
    sizes = sizes_for(qtype) | {"ff": ff}
    check(two_ranks, tiny_model(tmp_path / "m.gguf", "llama", qtype=qtype, **sizes), LENGTH)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_two_ranks_of_a_dense_folder(two_ranks, tmp_path, family):
    check(two_ranks, write_dense_folder(tmp_path, family), LENGTH)


@pytest.mark.parametrize("arch", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_four_ranks_share_two_key_heads(four_ranks, tmp_path, arch):
    path = tiny_model(tmp_path / "m.gguf", arch, qtype="Q8_0", heads=8)
    check(four_ranks, path, LENGTH)


def test_two_ranks_of_a_dense_draft_head(two_ranks, tmp_path):
    whole, _ = check(two_ranks, mtp_model(tmp_path / "m.gguf"), LENGTH)
    assert len(whole.drafts)


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("qtype", ["Q4_0", "Q6_K"])
def test_one_process_without_the_native_library_agrees(two_ranks, tmp_path, qtype):
    """Ranks have the library, this process does not: another way to the same logits."""
    path = tiny_model(tmp_path / "m.gguf", "qwen3", qtype=qtype, **sizes_for(qtype))
    check(two_ranks, path, LENGTH)
