"""Oracle of DeepSeek-V4's attention: one token after the other, in float64."""

import torch
from torch import Tensor


def sparse_attention(
    q: Tensor, keys: list[Tensor], sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (T, heads, d) and log-sum-exp (T, heads) without sink, float64.

    Args:
        q: (T, heads, d).
        keys: for each token its vectors (n, d), n may be 0.
        sink: (heads,), or None.
        scale: of the scores.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for t, kv in enumerate(keys):
        if kv.shape[0] == 0:
            continue
        scores = q[t].double() @ kv.double().t() * scale
        lse[t] = scores.logsumexp(1)
        joint = scores if sink is None else torch.cat((scores, sink.double()[:, None]), dim=1)
        out[t] = joint.softmax(1)[:, : kv.shape[0]] @ kv.double()
    return out, lse
