"""Rows that a fake model extends step by step, and a fake MTP head that drafts for them.

The head is the smallest function that depends on every token, hidden state and position of a
text: so a draft is right only if the head saw all of them, each at its own position of the cache.
The cache is NaN wherever nothing was written.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from tiercel.batch import Batch
from tiercel.ops.sample_tokens import SampleRows
from tiercel.ops.verify_accept import DraftRows
from tiercel.reference import sample_tokens as oracle
from tiercel.seeds import mix_key
from tiercel.spec.drafter_state import DrafterState, ForwardOutput

BLOCK, VOCAB, DIM = 4, 6, 3


class Head:
    """A head that attends to the entries of all positions up to a token's own."""

    def __init__(self, num_blocks):
        self.embedding, self.out = torch.randn(VOCAB, DIM).double(), torch.randn(DIM, VOCAB)
        self.inner, self.phase = torch.randn(DIM, DIM).double(), torch.randn(DIM).double()
        self.cache = torch.full((num_blocks * BLOCK, DIM), torch.nan, dtype=torch.float64)
        self.written = []  # of each call: (row, position, slot)

    def entry(self, token, hidden, position):
        """The cache entry of a position: from its hidden state and the next token."""
        turn = torch.sin(self.phase * position)
        return torch.tanh(0.5 * (self.embedding[token] + hidden @ self.inner + turn))

    def state(self, entries):
        """The head's state at the last position of some entries."""
        weights = 1.0 / torch.arange(len(entries), 0, -1).double()
        return torch.tanh(2.0 * (weights @ entries))

    def logits(self, hidden):
        return 6.0 * (hidden.float() @ self.out)

    def forward(self, batch, hidden):
        starts = batch.cu_seqlens_q.tolist()
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        assert tuple(lengths) == batch.query_lens
        assert (batch.num_tokens, batch.num_reqs) == (len(hidden), len(lengths))
        assert batch.max_query_len == max(lengths)
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        places = [
            (int(batch.rows[number]), int(batch.positions[i]), int(batch.slot_mapping[0, i]))
            for i, number in enumerate(numbers.tolist())
        ]
        self.written.append([place for place in places if place[2] >= 0])
        for i, (_, position, slot) in enumerate(places):
            if slot >= 0:
                self.cache[slot] = self.entry(int(batch.input_ids[i]), hidden[i], position)
        states = []
        for i, (row, position, _) in enumerate(places):
            length = int(batch.seq_lens[numbers[i]])
            assert position < length <= batch.context_lens[numbers[i]] <= batch.max_seq_len
            table = batch.block_tables[0, row].long()
            keys = torch.arange(position + 1)
            states.append(self.state(self.cache[table[keys // BLOCK] * BLOCK + keys % BLOCK]))
        return torch.stack(states)


@dataclass
class World:
    """Rows in all states: prompts in chunks, decoding with accepted and rejected drafts, at an end.

    Attributes:
        count: most drafts of a row.
        hidden: the model's state at each position of a row's text, by row.
    """

    num_rows: int
    count: int
    head: Head = field(init=False)
    hidden: list[list[torch.Tensor]] = field(init=False)

    def __post_init__(self):
        size, room = self.num_rows + 1, 80
        ints = {"dtype": torch.int32}
        temperature = torch.rand(size) + 0.5
        temperature[::2] = 0.0
        self.prompts = torch.randint(1, 14, (size,)).tolist()
        self.answers = [int(torch.randint(1, 26, ())) for _ in range(size)]
        for row in range(0, size, 3):  # whose end is that of a block, too
            self.answers[row] += -(self.prompts[row] + self.answers[row]) % BLOCK
        limits = torch.randint(1, self.count + 1, (size,), **ints)
        limits[1::4] = 0
        self.texts = DrafterState(
            SampleRows(
                torch.randint(0, 4, (size, room), **ints),  # of rows before
                torch.zeros(size, **ints),
                temperature,
                torch.tensor([mix_key(row, 5) for row in range(size)]),
            ),
            torch.tensor(self.prompts, **ints),
            torch.tensor(self.answers, **ints),
            DraftRows(
                torch.full((size, 1 + self.count), -9, **ints),
                torch.zeros(size, **ints),
                limits,
                limits.clone(),
                torch.rand(size),
                torch.zeros(size, **ints),
            ),
        )
        self.is_banned = torch.tensor([0, 0, 0, 0, 1, 0], dtype=torch.uint8)
        self.texts.drafts.draft_ids[:, 0] = 0
        blocks = [-(-(p + a) // BLOCK) for p, a in zip(self.prompts, self.answers, strict=True)]
        self.guard = sum(blocks) + 1  # a block of no row: no table may point to it
        self.head = Head(self.guard + 1)
        self.tables = torch.full((1, size, room // BLOCK + 2), self.guard, **ints)
        order, at = torch.randperm(sum(blocks)) + 1, 0
        for row in range(self.num_rows):
            self.tables[0, row, : blocks[row]] = order[at : at + blocks[row]]
            at += blocks[row]
        self.tables[0, -1] = 0
        self.computed = [0] * size  # positions that the model has seen
        self.hidden = [[] for _ in range(size)]
        self.texts.sampling.num_tokens[:-1] = self.texts.num_prompt[:-1]
        for row in range(self.num_rows):
            tokens = torch.randint(0, 4, (self.prompts[row],))
            self.texts.sampling.token_ids[row, : self.prompts[row]] = tokens

    def length(self, row):
        return int(self.texts.sampling.num_tokens[row])

    def has_ended(self, row):
        return self.length(row) == self.prompts[row] + self.answers[row]

    def step(self, *, is_padded):
        """Advance some rows; returns the step's states and the rows that got tokens.

        is_padded: whether all requests have equally many positions, and some rows are scratch.
        """
        width = 1 + self.count
        requests, got = [], []
        for row in torch.randperm(self.num_rows).tolist():
            if self.has_ended(row) or torch.rand(()) < 0.2:
                continue
            is_prompt = self.computed[row] < self.prompts[row] - 1
            if is_padded and is_prompt:
                continue
            requests.append(self._advance(row, width if is_padded else 0))
            if self.computed[row] >= self.prompts[row]:
                got.append(len(requests) - 1)
        if is_padded or not requests:
            requests += [self._scratch(width)] * 2
            got += range(len(requests) - 2, len(requests))
        return self._states(requests, got, width if is_padded else None)

    def _scratch(self, width):
        return self.num_rows, 0, width, [], [-1] * width

    def _advance(self, row, width):
        """(row, first position, positions, hidden states, slots) of a request; its text grows."""
        first, prompt = self.computed[row], self.prompts[row]
        if first < prompt - 1 or (first < prompt and not width):  # a chunk, or the whole remainder
            count = int(torch.randint(1, prompt - first + 1, ()))
            self._see(row, count)
            if self.computed[row] == prompt:
                self._append(row, [int(torch.randint(0, 4, ()))])
            return row, first, count, self.hidden[row][first:], self._slots(row, first, count)
        drafts = self.texts.drafts.draft_ids[row, 1:].tolist()
        used = int(self.texts.drafts.draft_ids[row, 0]) if first >= prompt else 0
        right = int(torch.randint(0, used + 1, ()))
        left = prompt + self.answers[row] - self.length(row)
        wrong = [token for token in range(4) if right == used or token != drafts[right]]
        new = [*drafts[:right], wrong[int(torch.randint(0, len(wrong), ()))]][:left]
        self._append(row, new)
        self._see(row, len(new))
        places = max(width, 1 + used)
        slots = self._slots(row, first, 1 + used) + [-1] * (places - 1 - used)
        return row, first, places, self.hidden[row][first:], slots

    def _see(self, row, count):
        self.computed[row] += count
        self.hidden[row] += list(torch.randn(count, DIM).double())

    def _append(self, row, tokens):
        sampling, length = self.texts.sampling, self.length(row)
        sampling.token_ids[row, length : length + len(tokens)] = torch.tensor(tokens).int()
        sampling.num_tokens[row] = length + len(tokens)

    def _slots(self, row, first, count):
        table = self.tables[0, row].tolist()
        return [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(first, first + count)]

    def _states(self, requests, got, width):
        lengths = tuple(count for _, _, count, _, _ in requests)
        hidden = torch.full((sum(lengths), DIM), torch.nan, dtype=torch.float64)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        for start, (_, _, _, own, _) in zip(starts.tolist(), requests, strict=False):
            if own:
                hidden[start : start + len(own)] = torch.stack(own)
        rows = torch.tensor([request[0] for request in requests], dtype=torch.int32)
        contexts = tuple(first + count for _, first, count, _, _ in requests)
        places = [first + i for _, first, count, _, _ in requests for i in range(count)]
        slots = [slot for *_, own in requests for slot in own]
        batch = Batch(
            input_ids=torch.full((sum(lengths),), 5, dtype=torch.int32),  # not read
            positions=torch.tensor(places, dtype=torch.int32),
            cu_seqlens_q=starts.int(),
            seq_lens=torch.tensor(contexts, dtype=torch.int32),
            rows=rows,
            logits_rows=starts[1:].int() - 1,
            slot_mapping=torch.tensor([slots]),
            block_tables=self.tables,
            query_lens=lengths,
            context_lens=contexts,
            num_tokens=sum(lengths),
            num_reqs=len(requests),
            max_query_len=max(lengths),
            max_seq_len=max(contexts),
        )
        of = None if len(got) == len(requests) else tuple(got)
        return ForwardOutput(batch, hidden, width, of), rows[got]

    def known(self, states):
        """(row, position, slot) of a step's positions whose next token is known."""
        batch = states.batch
        numbers = torch.arange(batch.num_reqs).repeat_interleave(torch.tensor(batch.query_lens))
        rows, places = batch.rows[numbers].tolist(), batch.positions.tolist()
        slots = batch.slot_mapping[0].tolist()
        every = zip(rows, places, slots, strict=True)
        return [one for one in every if one[0] < self.num_rows and one[1] + 1 < self.length(one[0])]

    def entries(self, row):
        """The head's entries of a row's text: all positions seen, except the last token's."""
        tokens = self.texts.sampling.token_ids[row].tolist()
        places = range(min(self.computed[row], self.length(row) - 1))
        own = [self.head.entry(tokens[p + 1], self.hidden[row][p], p) for p in places]
        return torch.stack(own)

    def greedy_drafts(self, row, count):
        """The drafts step by step, one token at a time: each draft is the head's next input."""
        entries, drafts = self.entries(row), []
        sampling = self.texts.sampling
        for number in range(count):
            state = self.head.state(entries)
            place = self.length(row) + number
            ((token, _),) = oracle.sample_tokens(
                self.head.logits(state).unsqueeze(0),
                [float(sampling.temperature[row])],
                [int(sampling.key[row])],
                [place],
                {4},
            )
            drafts.append(token)
            entry = self.head.entry(token, state, place - 1)
            entries = torch.cat((entries, entry.unsqueeze(0)))
        return drafts
