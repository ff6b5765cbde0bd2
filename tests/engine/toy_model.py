"""A model that is no decoder: whole numbers that tokens leave in its caches, and sums over them.

Its state is twice as wide as its hidden size: the sum over all tokens so far, and that over the
last `WINDOW`, both modulo `MODULUS`. All values are whole, so each result is exact and any wrong
slot, stale block or lost token changes it altogether. It has two cache groups and no plans.
"""

import torch

from tiercel.cache.spec import KVCacheSpec, Plane

WINDOW, MODULUS = 5, 97
WRONG_DRAFTS = 5  # after every so many token ids the head is wrong


class ToyModel:
    """See `tiercel/models/model.py`."""

    block_size, state_dtype, packs_items, weights_per_layer = 16, torch.bfloat16, False, 2**30
    exact_tokens = None

    @staticmethod
    def check_options(config, options):
        """It has them all."""

    def __init__(self, config, weights, dtype, num_positions, options, group):
        self.options = options
        self.config, self.dtype, self.pulse = config, dtype, lambda: None
        self.hidden_size, self.state_width = config.hidden_size, 2 * config.hidden_size
        generator = torch.Generator().manual_seed(1)

        def integers(*shape):
            return torch.randint(-4, 5, shape, generator=generator).float().to(weights.device)

        self.embedding = integers(config.vocab_size, self.hidden_size)
        self.head = integers(self.state_width, config.vocab_size)
        self.draft_head = ToyHead(self) if config.num_mtp_layers else None

    def cache_specs(self):
        plane = (Plane("left", torch.float32, (self.hidden_size,)),)
        specs = [KVCacheSpec("full", plane), KVCacheSpec("sliding", plane, window=WINDOW)]
        return specs + specs[:1] * (self.draft_head is not None)

    def bind_cache(self, pools):
        self.caches = {i: (g, p["left"]) for g, pool in enumerate(pools)
                       for i, p in pool.layers.items()}  # fmt: skip

    def left(self, token_ids, positions):
        """What tokens leave in a cache, (T, hidden)."""
        return self.embedding[token_ids.long()] * (positions % 7 + 1).unsqueeze(1)

    def total(self, batch, spec, values, window):
        """Write the values of a step's tokens, then sum over what each of them sees."""
        group, plane = self.caches[spec]
        slots, flat = batch.slot_mapping[group], plane.flatten(0, 1)
        kept = torch.where(slots.unsqueeze(1) >= 0, values, flat[0])  # slot 0 keeps its zeros
        flat.index_copy_(0, slots.clamp(min=0), kept)
        token = torch.arange(batch.num_tokens, device=slots.device, dtype=torch.int32)
        request = torch.searchsorted(batch.cu_seqlens_q[1:].contiguous(), token, right=True)
        rows = batch.rows[request.clamp(max=batch.num_reqs - 1)].long()
        # As wide as the bound of all lengths, which must hold for each step that a graph serves.
        columns = -(-batch.max_seq_len // self.block_size)
        seen = plane[batch.block_tables[group][rows, :columns].long()].flatten(1, 2)
        age = batch.positions.unsqueeze(1) - torch.arange(seen.shape[1], device=slots.device)
        mask = (age >= 0) & (age < window)
        return torch.where(mask.unsqueeze(2), seen, 0).sum(1)

    def states(self, *sums):
        return (torch.cat(sums, 1) % MODULUS - MODULUS // 2).to(self.state_dtype)

    def forward(self, batch):
        values = self.left(batch.input_ids, batch.positions)
        return self.states(
            self.total(batch, 0, values, 2**30), self.total(batch, 1, values, WINDOW)
        )

    forward_sample = forward

    def plan(self, lengths):
        return {}

    def hidden_states(self, hidden, rows):
        return hidden[rows.long(), : self.hidden_size].float()

    def logits(self, hidden, rows=None, out=None):
        return torch.mm(
            (hidden if rows is None else hidden[rows.long()]).float(), self.head, out=out
        )

    def token_logits(self, hidden, rows, token_ids):
        return self.logits(hidden, rows)[:, token_ids]

    def timed_products(self):
        return []

    def timed_attention(self, batch):
        return []


class ToyHead:
    """Right wherever its own cache is, but for one token id in `WRONG_DRAFTS`."""

    def __init__(self, model):
        self.model = model

    def forward(self, batch, hidden):
        """The cache at p holds what the token at p + 1 leaves: the window ends with it."""
        model, width = self.model, self.model.hidden_size
        values = model.left(batch.input_ids, batch.positions + 1)
        recent = model.total(batch, 2, values, WINDOW)
        whole = hidden[:, :width].float() + MODULUS // 2 + values
        wrong = (batch.input_ids % WRONG_DRAFTS == 0).unsqueeze(1)
        return model.states(whole, recent + wrong)

    def logits(self, hidden):
        return self.model.logits(hidden)
