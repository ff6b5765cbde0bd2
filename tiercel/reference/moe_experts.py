"""Oracle of DeepSeek-V4's routed experts: one token and one expert after the other, in float64."""

import torch
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """Clamped SwiGLU, float64: the gate is clamped above alone."""
    gate, up = gate.double(), up.double()
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate / (1 + torch.exp(-gate)) * up


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: tuple[Tensor, Tensor, Tensor],
    limit: float | None,
) -> Tensor:
    """Weighted sum of the experts' outputs (T, hidden), float64; stacks are w1, w3 and w2."""
    w1, w3, w2 = (stack.double() for stack in stacks)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[t, slot])
            token = x[t].double()
            h = swiglu(w1[expert] @ token, w3[expert] @ token, limit)
            out[t] += weights[t, slot].double() * (w2[expert] @ h)
    return out
