"""Counts the launches of DeepSeek-V4's layers in a step, without a GPU.

Tensors have shapes and a device alone (PyTorch's fake tensors), so layers of true size take no
memory, and ops choose their kernels as on an H200. What would be launched is written down: CUDA C++
and Triton kernels by name, PyTorch's operators that compute by theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import deepseek_v4_layers as slices
from tiercel.cache.spec import group_specs
from tiercel.config import ModelOptions
from tiercel.kernels.runtime import rtc
from tiercel.kernels.runtime.triton_launch import TritonLaunch
from tiercel.layers.mhc import Residual
from tiercel.models import deepseek_v4_build
from tiercel.models.deepseek_v4_model import DeepseekV4
from tiercel.ops import moe_experts
from tiercel.ops.step_index import step_index
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType
from tiercel.runner.step_inputs import make_timing_batch

DEVICE, SMS, SMEM_BYTES, ROTARY = torch.device("cuda", 0), 132, 227 << 10, 64
_CREATES = {
    "prim::device",
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::empty_strided",
}


class _Operators(TorchDispatchMode):
    """Writes down operators of PyTorch that would launch kernels."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        aliases = [one.alias_info for one in func._schema.returns]
        is_view = bool(aliases) and all(one is not None and not one.is_write for one in aliases)
        if not is_view and func._schema.name not in _CREATES:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _item(x: torch.Tensor, index: Any) -> torch.Tensor:
    """`x[index]`, for which PyTorch without CUDA asks for a device that it does not have."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        known = sum(part is not None and part is not Ellipsis for part in parts)
        parts[place : place + 1] = [slice(None)] * (x.dim() - known)
    dim = 0
    for part in parts:
        if isinstance(part, int):
            x = x.select(dim, part)
            continue
        if isinstance(part, slice):
            x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
        elif part is None:
            x = x.unsqueeze(dim)
        else:
            x = x.index_select(dim, part)
        dim += 1
    return x


class _Weights(slices.RandomWeights):
    """Weights without values, in the formats of files."""

    def _quantised(self, qtype: QuantType, shape: tuple[int, ...]) -> QuantTensor:
        *stack, rows, columns = shape

        def plane(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
            return torch.empty((*stack, *sizes), dtype=dtype, device=self.device)

        if qtype is QuantType.FP8_BLOCK:
            scale = plane(torch.uint8, -(-rows // 128), -(-columns // 128))
            planes = {"q": plane(torch.float8_e4m3fn, rows, columns), "scale": scale}
            return QuantTensor(qtype, Layout.BLOCKS, shape, planes, (128, 128))
        if qtype is QuantType.Q2_K:
            data = plane(torch.uint8, rows, columns // 256 * qtype.block_bytes)
            return QuantTensor(qtype, Layout.FILE, shape, {"data": data})
        planes = {"q": plane(torch.uint8, rows, columns // 2)}
        if qtype is QuantType.MXFP4:
            planes["scale"] = plane(torch.uint8, rows, columns // 32)
        else:
            planes["scale"] = plane(torch.float8_e4m3fn, rows, columns // 16)
            planes["global_scale"] = plane(torch.float32)
        return QuantTensor(qtype, Layout.BLOCKS, shape, planes)


@contextmanager
def fake_h200() -> Iterator[list[str]]:
    """A GPU of which there are shapes alone; the launches so far."""
    found: list[str] = []

    def launch(kernel: str, *_: object, **__: object) -> None:
        found.append(kernel)

    def launch_triton(self: TritonLaunch, *_: object) -> None:
        found.append(self._kernel.__name__)

    no_generator = SimpleNamespace(manual_seed=lambda seed: None)
    properties = SimpleNamespace(multi_processor_count=SMS)
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(torch, "Generator", lambda device: no_generator)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(FakeTensor, "__getitem__", _item)
        patch.setattr(FakeTensor, "__setitem__", lambda *_: found.append("setitem"))
        patch.setattr(FakeTensor, "copy_", lambda self, *_: found.append("copy_") or self)
        patch.setattr(FakeTensor, "data_ptr", lambda self: 1 << 20, raising=False)
        patch.setattr(rtc, "max_smem_bytes", lambda device: SMEM_BYTES)
        patch.setattr(rtc, "is_dependent", lambda device: False)
        patch.setattr(rtc, "load_kernel", lambda source, *_: source.name)
        patch.setattr(rtc, "launch", launch)
        patch.setattr(TritonLaunch, "__call__", launch_triton)
        patch.setattr(
            deepseek_v4_build,
            "rope_table",
            lambda rope, count: torch.empty((count, 2, ROTARY // 2)),
        )
        # Of no use without values: whether scales are too large, and the order of codes.
        patch.setattr(moe_experts, "_is_mxfp4", lambda stack: False)
        patch.setattr(moe_experts, "tile_stack", lambda stack: replace(stack, layout=Layout.TILES))
        yield found


def layer_launches(part: slices.Slice, num_tokens: int, context_len: int = 8192) -> list[str]:
    """The launches of the last layer of a slice, between two others, for some requests."""
    with fake_h200() as found, torch.no_grad():
        config = part.config(DEVICE)
        weights: Any = _Weights(config, DEVICE, part.experts)
        options = ModelOptions(kv_dtype="fp8")
        model = DeepseekV4(config, weights, torch.bfloat16, 1 << 20, options)
        step = slices.Step(num_tokens, 1, context_len)
        pools, tables = slices.make_pools(group_specs(model.cache_specs()), step, DEVICE)
        model.bind_cache(pools)
        batch = make_timing_batch(num_tokens, 1, context_len, tables)
        index = step_index(batch, model.block_size, config.sliding_window, 0, model._kinds)
        state = torch.empty(
            (num_tokens, config.num_streams, config.hidden_size),
            dtype=torch.bfloat16,
            device=DEVICE,
        )
        float32 = {"dtype": torch.float32, "device": DEVICE}
        streams = config.num_streams
        update = (
            torch.empty((num_tokens, config.hidden_size), **float32),
            torch.empty((num_tokens, streams), **float32),
            torch.empty((num_tokens, streams, streams), **float32),
        )
        found.clear()
        with _Operators(found):
            model.layers[-1](Residual(state, update), batch.input_ids, index)
        return list(found)
