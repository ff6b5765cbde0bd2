"""Memory that GPUs share: who gets none learns why, and all ranks learn the same."""

import importlib
import os
import types

import pytest
import torch
import torch.distributed as dist

from tiercel.kernels.collectives import symmetric_memory as symmetric

GPU = torch.device("cuda", 0)
HOST = "here"


class World:
    """Two ranks, of which the other one says what it is told to.

    Attributes:
        others: what the other rank says, one exchange after another.
        said: what this rank said.
    """

    def __init__(self, monkeypatch):
        self.others, self.said = [f"{HOST} GPU-1\n", "", ""], []
        self.has_access = True
        monkeypatch.setattr(symmetric, "_gather", self.gather)
        monkeypatch.setattr(symmetric.socket, "gethostname", lambda: HOST)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: (
                types.SimpleNamespace(uuid=f"GPU-{torch.device(device).index}")
                if not isinstance(device, int)
                else types.SimpleNamespace(uuid=f"GPU-{device}")
            ),
        )
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: self.has_access)
        stream = types.SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
        self.module = types.SimpleNamespace(empty=self.empty, rendezvous=self.rendezvous)
        imported = importlib.import_module
        own = {"torch.distributed._symmetric_memory": self.import_module}
        monkeypatch.setattr(
            symmetric.importlib,
            "import_module",
            lambda name: own.get(name, imported)(name),
        )
        monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
        monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")

    def gather(self, text, group, device):
        self.said.append(text)
        return [text, self.others[len(self.said) - 1]]

    def import_module(self, name):
        return self.module

    def empty(self, size, dtype, device):
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        self.buffer = torch.full((size,), 7, dtype=dtype)
        return self.buffer

    def rendezvous(self, buffer, name):
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        assert not buffer.any()  # no rank sees what memory held before
        return types.SimpleNamespace(rank=0, buffer_ptrs=[buffer.data_ptr(), 4096])

    def make(self, refusal=""):
        group = types.SimpleNamespace(group_name="0", size=lambda: 2)
        return symmetric.make_symmetric_memory(1 << 20, group, GPU, refusal)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_the_memory_has_the_addresses_of_all_ranks(world):
    memory = world.make()
    assert (memory.rank, memory.addresses) == (0, (world.buffer.data_ptr(), 4096))
    assert memory.buffer is world.buffer
    assert world.said == [f"{HOST} GPU-0\n", "", ""]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("there GPU-1\n", "the ranks are on several hosts"),
        (f"{HOST} GPU-0\n", "several ranks use one GPU"),
        (f"{HOST} GPU-1\nTIERCEL_SMALL_ALL_REDUCE=0", "TIERCEL_SMALL_ALL_REDUCE=0 (rank 1)"),
    ],
)
def test_what_the_other_rank_is_refuses_both(other, reason, world):
    world.others[0] = other
    assert world.make() == reason
    assert len(world.said) == 1


def test_this_ranks_own_reason_is_told_to_all(world):
    assert world.make("the GPU is older than Ampere") == "the GPU is older than Ampere (rank 0)"
    assert world.said == [f"{HOST} GPU-0\nthe GPU is older than Ampere"]


def test_gpus_that_cannot_reach_each_other(world):
    world.has_access = False
    assert world.make() == "GPU 0 cannot access GPU 1 (rank 0)"
    world.said.clear()
    world.others[0] = f"{HOST} GPU-7\n"  # not visible to this process
    assert not isinstance(world.make(), str)


def test_a_failure_of_the_other_rank_is_ours_too(world):
    world.others[2] = "PyTorch's symmetric memory fails: no room"
    assert world.make() == "PyTorch's symmetric memory fails: no room (rank 1)"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("no such module"), "no such module"),
        (AttributeError("it has no empty"), "it has no empty"),
        (TypeError("an argument more"), "an argument more"),
        (RuntimeError("CUDA driver error: 801\nframe 1"), "CUDA driver error: 801"),
    ],
    ids=str,
)
def test_what_pytorch_raises_is_a_reason_in_one_line(error, reason, world):
    def fail(*_, **__):
        raise error

    world.module.rendezvous = fail
    expected = f"PyTorch's symmetric memory fails: {reason}"
    assert world.make() == f"{expected} (rank 0)"
    assert world.said[-1] == expected  # all ranks learn of it


def test_memory_that_begins_elsewhere_is_not_used(world):
    handle = types.SimpleNamespace(rank=0, buffer_ptrs=[4096, 8192])
    world.module.rendezvous = lambda *_: handle
    assert "does not begin where its buffer does" in world.make()


def test_texts_are_exchanged_and_cut(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for text in ("", "a reason", "ä" * 600):
            (found,) = symmetric._gather(text, dist.group.WORLD, torch.device("cpu"))
            assert found == text[:256] if "ä" in text else found == text
    finally:
        dist.destroy_process_group()


def test_pytorch_has_what_is_used():
    module = importlib.import_module("torch.distributed._symmetric_memory")
    assert callable(module.empty)
    assert callable(module.rendezvous)
