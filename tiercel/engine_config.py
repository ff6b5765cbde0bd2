"""The settings of an engine, resolved against the model and this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiercel.config import DEFAULT_MODEL_OPTIONS, NO_DRAFTS, ModelOptions, SpecConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Resolved settings.

    Attributes:
        device: ``cpu`` or ``cuda:i``.
        dtype: of products and of the cache.
        max_model_len: tokens of one sequence, prompt and answer together.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: new tokens of one step.
        block_size: tokens of a cache block, of the model's choice.
        gpu_memory_utilization: share of the device's memory that may be used, (0, 1].
        seed: of requests without one.
        threads: of products on a CPU.
        prefix_cache: whether computed blocks are kept for prompts that begin the same.
        cuda_graphs: whether decode steps are captured at start and replayed.
        overlap: whether a step is planned and enqueued while the one before it runs.
        sync_debug: whether a wait for the device within a step is an error.
        spec: how drafts are made.
        packs_items: whether the model computes items to score after one prompt in one step.
        model_options: those that the model's class has accepted.
        timed_steps: whether the time of a step is bounded, not only its tokens; see `StepBudget`.
        tensor_parallel_size: ranks that compute together; every one of them runs the same loop.
        expert_parallel: whether ranks hold whole experts of a layer, else a part of each.
        data_parallel_attention: whether each rank has requests of its own; the sizes above are then
            those of each rank.
        num_replicas: engines of the model on this machine, which share the memory of a CPU.
    """

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    gpu_memory_utilization: float
    seed: int
    threads: int
    prefix_cache: bool = True
    cuda_graphs: bool = False
    overlap: bool = False
    sync_debug: bool = False
    spec: SpecConfig = NO_DRAFTS
    packs_items: bool = True
    model_options: ModelOptions = DEFAULT_MODEL_OPTIONS
    timed_steps: bool = False
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    data_parallel_attention: bool = False
    num_replicas: int = 1

    @property
    def num_schedulers(self) -> int:
        """Ranks that have requests of their own, each its own scheduler and cache."""
        return self.tensor_parallel_size if self.data_parallel_attention else 1
