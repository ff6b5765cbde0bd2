"""The operator cases of DeepSeek-V4: tensors of an independent reference, by name.

tests/data/dsv4/README.md says what each holds.
"""

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file

from tiercel.quant import QuantTensor
from tiercel.quant_types import FP4_GROUPS, Layout, QuantType

PATH = Path(__file__).parent / "data/dsv4/ops.safetensors"

FORMATS = (QuantType.FP8_BLOCK, QuantType.MXFP4, QuantType.NVFP4)


@functools.cache
def _tensors():
    return load_file(PATH)


def case(prefix, device="cpu"):
    """All tensors under `prefix.`, by the rest of their names, copied to the device."""
    start = prefix + "."
    found = {k.removeprefix(start): v for k, v in _tensors().items() if k.startswith(start)}
    assert found, prefix
    return {name: tensor.clone().to(device) for name, tensor in found.items()}


def blocks_of(qtype, q, scale, block=(128, 128), **others):
    """A tensor of a block format over its planes."""
    columns = q.shape[-1] * (2 if qtype in FP4_GROUPS else 1)
    block = (1, 1) if qtype in FP4_GROUPS else block
    planes = {"q": q, "scale": scale, **others}
    return QuantTensor(qtype, Layout.BLOCKS, (*q.shape[:-1], columns), planes, block)


def poison(device):
    """Fill the allocator's free blocks with NaN, so that unwritten memory shows."""
    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20):
        torch.full((size,), float("nan"), device=device)


def strided(tensor):
    """The same values in rows with a gap of three elements after each."""
    wide = torch.empty((*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype)
    wide = wide.to(tensor.device)
    wide.fill_(float("nan") if tensor.is_floating_point() else 77)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def captured(run):
    """What `run()` gives when replayed from a CUDA graph; needs a GPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    graph.replay()
    return result
