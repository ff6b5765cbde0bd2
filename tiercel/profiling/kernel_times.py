"""Times a loaded model's own kernels, one kind at a time: its products and its attention.

Calls go through the layers in turn, as in a step, so weights and cache come from memory where the
layers together are larger than the last-level cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tiercel.batch import Batch
from tiercel.engine.load import LoadedModel
from tiercel.errors import ArgumentError
from tiercel.models.model import TimedProduct
from tiercel.profiling.device_timing import Call, Ceilings, cache_bytes, times_us
from tiercel.runner.step_inputs import make_timing_batch


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Equal requests with `queries` new tokens each at the end of `context`."""

    requests: int
    queries: int
    context: int


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kind of call at one size.

    Attributes:
        name: of the kind.
        size: in words.
        num_bytes: the fewest that must move: weights as they are stored, inputs, results.
        flops: operations.
        us: microseconds a call, the median.
        is_cold: whether the calls of a turn read more than the last-level cache holds.
    """

    name: str
    size: str
    num_bytes: int
    flops: int
    us: float
    is_cold: bool

    def of_ceiling(self, ceilings: Ceilings) -> float:
        """The least time that the device allows, over the measured one."""
        memory_us = self.num_bytes / ceilings.read_gbps / 1e3
        return max(memory_us, self.flops / ceilings.tflops / 1e6) / self.us


def measure_kernels(
    loaded: LoadedModel,
    tokens: Sequence[int],
    attention: Sequence[AttentionCase],
    seconds: float,
    report: Callable[[str], None],
) -> Iterator[KernelTime]:
    """Time the products for each number of tokens, then attention for each case.

    Args:
        loaded: an idle engine, whose cache holds the largest case.
        tokens: rows of the products.
        attention: of one layer each.
        seconds: of a measurement, about.
        report: called with what is measured next.

    Raises:
        ArgumentError: a case does not fit the cache, or the model names no kernels.
    """
    products = loaded.engine.runner.model.timed_products()
    if not products:
        raise ArgumentError(
            f"kernels of {loaded.source.config.arch} are not timed one by one.",
            hint="Use bench speed.",
        )
    for product in products:
        for count in tokens:
            report(f"Measuring {product.name}, {count} tokens")
            yield _time_product(loaded, product, count, seconds)
    for case in attention:
        report(f"Measuring attention, {case.requests} x {case.context}")
        yield from _time_attention(loaded, case, seconds)


@torch.inference_mode()
def _time_product(
    loaded: LoadedModel, product: TimedProduct, count: int, seconds: float
) -> KernelTime:
    """The time of the mean matrix: layers may differ in type."""
    device, dtype = loaded.config.device, loaded.config.dtype
    out, inner = product.shape
    x = torch.randn(count, inner, device=device).to(dtype)
    calls: list[Call] = [partial(call, x) for call in product.calls]
    moved = product.weight_bytes // len(calls) + count * (inner + out) * x.itemsize
    return KernelTime(
        f"{product.name} {out} x {inner}",
        f"{count} tokens",
        moved,
        2 * count * out * inner,
        statistics.median(times_us(calls, device, seconds)),
        product.weight_bytes > cache_bytes(device),
    )


@torch.inference_mode()
def _time_attention(
    loaded: LoadedModel, case: AttentionCase, seconds: float
) -> Iterator[KernelTime]:
    """One result for each kind of layer."""
    device = loaded.config.device
    for attention in loaded.engine.runner.model.timed_attention(_make_batch(loaded, case)):
        yield KernelTime(
            attention.name,
            f"{case.requests} x {case.queries} on {case.context}",
            attention.num_bytes,
            attention.flops,
            statistics.median(times_us(attention.calls, device, seconds)),
            attention.cache_bytes * len(attention.calls) > cache_bytes(device),
        )


def _make_batch(loaded: LoadedModel, case: AttentionCase) -> Batch:
    """Equal requests whose blocks are in random order; those before a window are the null block."""
    device, pools = loaded.config.device, loaded.engine.runner.pools
    block_size = loaded.config.block_size
    blocks = -(-case.context // block_size)
    tables = torch.zeros((len(pools), case.requests, blocks), dtype=torch.int32)
    for table, pool in zip(tables, pools, strict=True):
        first = pool.group.spec.first_token(case.context - case.queries) // block_size
        needed, room = case.requests * (blocks - first), pool.num_blocks - 1
        if needed > room:
            more = ", or give --gpu-memory-utilization more" if device.type == "cuda" else ""
            raise ArgumentError(
                f"{case.requests} requests of {case.context} tokens need {needed} "
                f"blocks of {block_size}; the cache has {room}.",
                hint=f"Measure fewer or shorter ones{more}.",
            )
        table[:, first:] = 1 + torch.randperm(room)[:needed].view(case.requests, -1)
    return make_timing_batch(case.requests, case.queries, case.context, tables.to(device))
