"""Oracle of DeepSeek-V4's compressors: all inputs of one sequence, entry by entry, in float64."""

import torch
from torch import Tensor


def kv_compress(kv: Tensor, gate: Tensor, width: int, ratio: int) -> Tensor:
    """Softmax sums (entries, width) before norm and rotation, float64.

    Args:
        kv: (T, width), or (T, 2 * width) with overlap, from position 0.
        gate: the shape of kv, position bias added.
        width: channels of an entry.
        ratio: tokens per entry.
    """
    has_overlap = kv.shape[1] == 2 * width
    num_entries = kv.shape[0] // ratio
    out = torch.empty(num_entries, width, dtype=torch.float64)
    for entry in range(num_entries):
        own = slice(entry * ratio, (entry + 1) * ratio)
        values, gates = kv[own, -width:], gate[own, -width:]
        if has_overlap and entry > 0:
            before = slice((entry - 1) * ratio, entry * ratio)
            values = torch.cat((kv[before, :width], values))
            gates = torch.cat((gate[before, :width], gates))
        exponentials = torch.exp(gates.double() - gates.double().amax(0))
        out[entry] = (exponentials / exponentials.sum(0) * values.double()).sum(0)
    return out
