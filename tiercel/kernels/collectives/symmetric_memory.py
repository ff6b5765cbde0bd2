"""Memory of a GPU that the other GPUs of its host read and write.

The only module that knows PyTorch's symmetric memory, an interface that is not stable yet: `empty`
allocates, `rendezvous` exchanges handles and maps the memory of all ranks into each process. Its
signal pads are not used, only the buffers. Versions 2.11 and 2.13 were read. Where it is missing or
does not work, all ranks get the same reason.

NVLink multicast stays off: without `env.forbid_multicast` the rendezvous would create a multicast
object.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tiercel import env

_TEXT_BYTES = 512  # of what a rank tells all others


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """Zeroed memory of the same size on each rank of a group.

    Attributes:
        rank: this process's rank in the group.
        addresses: where each rank's memory is mapped in this process.
        buffer: this rank's memory, (bytes,) uint8; keeps the mappings alive with `handle`.
        handle: PyTorch's.
    """

    rank: int
    addresses: tuple[int, ...]
    buffer: Tensor
    handle: object


def make_symmetric_memory(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device, refusal: str = ""
) -> SymmetricMemory | str:
    """Allocate on each rank and map everywhere; a collective call that waits for all ranks.

    Args:
        num_bytes: of each rank, equal on all.
        group: any backend that gathers tensors of `device`.
        device: this rank's GPU, with its index.
        refusal: why this rank wants none; "" if it does.

    Returns:
        The memory, or why there is none: the same reason on all ranks.
    """
    place = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    texts = [text.partition("\n") for text in _gather(f"{place}\n{refusal}", group, device)]
    places = [text[0] for text in texts]
    reason = _first_reason([text[2] for text in texts]) or _refuse_places(places)
    if reason:
        return reason
    # Known to all before the rendezvous, which would wait for a rank that does not come.
    reason = _first_reason(_gather(_refuse_peers(places, device), group, device))
    if reason:
        return reason
    made = _map_memory(num_bytes, group, device)
    # Also a barrier: no rank writes to another before that one has zeroed its memory.
    reason = _first_reason(_gather(made if isinstance(made, str) else "", group, device))
    return reason or made


def _map_memory(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> SymmetricMemory | str:
    """The memory, or how PyTorch fails; what it raises differs between versions."""
    env.forbid_multicast()
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory")
        buffer = module.empty(num_bytes, dtype=torch.uint8, device=device)
        buffer.zero_()
        handle = module.rendezvous(buffer, group.group_name)
        addresses = tuple(handle.buffer_ptrs)
    except (ImportError, AttributeError, TypeError, RuntimeError) as error:
        return f"PyTorch's symmetric memory fails: {str(error).partition(chr(10))[0]}"
    torch.cuda.current_stream(device).synchronize()
    if addresses[handle.rank] != buffer.data_ptr():
        return "PyTorch's symmetric memory does not begin where its buffer does"
    return SymmetricMemory(handle.rank, addresses, buffer, handle)


def _gather(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The texts of all ranks, which need no pickles; waits for them."""
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in parts]


def _first_reason(reasons: Sequence[str]) -> str:
    """Of the lowest rank that has one; "" if none has."""
    return next((f"{text} (rank {rank})" for rank, text in enumerate(reasons) if text), "")


def _refuse_places(places: Sequence[str]) -> str:
    """Why ranks on these hosts and GPUs share no memory; "" if they may."""
    if len({place.split()[0] for place in places}) > 1:
        return "the ranks are on several hosts"
    if len(set(places)) < len(places):
        return "several ranks use one GPU"
    return ""


def _refuse_peers(places: Sequence[str], device: torch.device) -> str:
    """Why this GPU cannot reach those of other ranks, as far as this process sees them."""
    wanted = {place.split()[-1] for place in places}
    for index in range(torch.cuda.device_count()):
        is_peer = index != device.index
        is_peer = is_peer and str(torch.cuda.get_device_properties(index).uuid) in wanted
        if is_peer and not torch.cuda.can_device_access_peer(device.index, index):
            return f"GPU {device.index} cannot access GPU {index}"
    return ""
