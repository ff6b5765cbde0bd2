"""The compressors of DeepSeek-V4: reference, oracle, and any cut of sequences into steps."""

import random

import pytest
import torch

from tests.dsv4_cases import captured, case
from tiercel.errors import ArgumentError
from tiercel.kernels.attention import kv_compress as kernel
from tiercel.models.config import RopeConfig
from tiercel.models.rope import rope_table
from tiercel.ops.kv_compress import (
    Terms,
    completing_tokens,
    compress_refusal,
    compress_terms,
    kv_compress,
    kv_compress_step,
)
from tiercel.ops.latent_rope import (
    latent_cache_write,
)
from tiercel.reference import kv_compress as oracle
from tiercel.reference import latent_rope as rope_oracle

EPS, ROTARY, BLOCK = 1e-6, 16, 128
# Tokens per entry, overlap, stored rows of a block.
KINDS = {"csa": (4, True, 32), "hca": (128, False, 128)}


def store_slots(positions, seq_ids, cu_seqlens_q, block_tables, *, rows_per_block):
    """Slots of a step's inputs, as `prepare_step` gives them; -1 where a later row follows."""
    position, sequence = positions.long().clamp(min=0), seq_ids.long()
    offset = position % BLOCK
    slots = block_tables[sequence, position // BLOCK] * rows_per_block + offset % rows_per_block
    row = torch.arange(len(positions), device=positions.device) + rows_per_block
    is_taken = (row < cu_seqlens_q[sequence + 1]) & (offset + rows_per_block < BLOCK)
    return torch.where((positions < 0) | is_taken, -1, slots).long()


class World:
    """Sequences with random inputs, their blocks in a shuffled and poisoned pool, and a step."""

    def __init__(self, kind, lengths, width, device):
        self.ratio, self.has_overlap, self.rows = KINDS[kind]
        channels = 2 * width if self.has_overlap else width
        self.device, self.width = device, width
        self.kv = [torch.randn(n, channels, device=device) for n in lengths]
        self.gate = [3 * torch.randn(n, channels, device=device) for n in lengths]
        columns = max(-(-n // BLOCK) for n in lengths)
        order = 1 + torch.randperm(len(lengths) * columns)
        self.tables = order.view(len(lengths), columns).int().to(device)
        shape = (1 + order.numel(), self.rows, 2, channels + 1)
        self.pool = torch.full(shape, float("nan"), device=device)
        self.stored = (self.pool[:, :, 0, :channels], self.pool[:, :, 1, :channels])
        self.weight = torch.randn(width, device=device)
        rope = RopeConfig(160000.0, ROTARY, "yarn", 16.0, 65536, attention_factor=1.0)
        self.table = rope_table(rope, max(lengths) + 1).to(device)

    def step(self, parts, padding=0):
        """Run `parts`, (sequence, start, stop) each; returns {(sequence, entry): row}."""
        rows, ids, positions, starts = [], [], [], [0] * (len(self.kv) + 1)
        for sequence, start, stop in parts:
            rows.append((sequence, slice(start, stop)))
            ids += [sequence] * (stop - start)
            positions += range(start, stop)
        for sequence in range(len(self.kv)):
            count = sum(stop - start for s, start, stop in parts if s == sequence)
            starts[sequence + 1] = starts[sequence] + count
        positions, ids = positions + [-1] * padding, ids + [0] * padding
        kv, gate = (
            torch.cat([source[s][part] for s, part in rows] + [source[0][:1]] * padding)
            for source in (self.kv, self.gate)
        )
        seqs = (
            torch.tensor(ids, device=self.device),
            torch.tensor(starts, dtype=torch.int32, device=self.device),
            self.tables,
        )
        where = torch.tensor(positions, dtype=torch.int32, device=self.device)
        capacity = len(positions) // self.ratio + len(self.kv) + 1
        tokens = completing_tokens(where, ratio=self.ratio, capacity=capacity)
        sizes = {"block_size": BLOCK, "rows_per_block": self.rows}
        terms = compress_terms(
            tokens, where, *seqs, ratio=self.ratio, has_overlap=self.has_overlap, **sizes
        )
        out = self.compress(kv, gate, terms)
        slots = store_slots(where, *seqs, rows_per_block=self.rows)
        real = slots[slots >= 0]
        assert real.unique().numel() == real.numel()
        for values, cache in zip((kv, gate), self.stored, strict=True):
            latent_cache_write(values, cache, slots)
        found = {}
        for token, entry, row in zip(tokens.tolist(), terms.entries.tolist(), out, strict=True):
            if token >= 0:
                found[ids[token], entry] = row
            else:
                assert entry == -1
                assert torch.equal(row, torch.zeros_like(row))
        return found

    def compress(self, kv, gate, terms):
        return kv_compress(
            kv, gate, *self.stored, terms, self.weight, self.table, ratio=self.ratio, eps=EPS
        )

    def expected(self, sequence):
        """All entries of a sequence from the oracle, float64."""
        kv, gate = self.kv[sequence].cpu(), self.gate[sequence].cpu()
        sums = oracle.kv_compress(kv, gate, self.width, self.ratio)
        angles = rope_oracle.frequencies(ROTARY, 160000.0, 16.0, 65536)
        positions = torch.arange(sums.shape[0]) * self.ratio
        return rope_oracle.latent_rope(sums, positions, angles, EPS, self.weight.cpu())


def check(world, found):
    """Exactly the entries of all sequences, each equal to the oracle's."""
    count = 0
    for sequence in range(len(world.kv)):
        for entry, row in enumerate(world.expected(sequence)):
            out = found[sequence, entry].double().cpu()
            torch.testing.assert_close(out, row, rtol=1e-5, atol=2e-5)
            count += 1
    assert len(found) == count


@pytest.mark.parametrize(("kind", "width"), [("csa", 48), ("hca", 24)])
def test_entries_match_the_reference(kind, width, device):
    data = case(kind, device)
    num_tokens = data["x"].shape[0]
    world = World(kind, [num_tokens], width, device)
    bias = data["ape"][torch.arange(num_tokens) % world.ratio]
    world.kv = [data["x"] @ data["wkv"].t()]
    world.gate = [data["x"] @ data["wgate"].t() + bias]
    world.weight = data["norm"]
    found = world.step([(0, 0, num_tokens)])
    out = torch.stack([found[0, entry] for entry in range(len(found))])
    torch.testing.assert_close(out, data["entries"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 32, 127, 128, 129, 131, 257, 600])
def test_any_chunk_size_gives_the_same(kind, chunk, device):
    length = 520
    if chunk <= 5:  # many steps
        length = 45 if kind == "csa" else 133
    world = World(kind, [length], 24, device)
    found = {}
    for start in range(0, length, chunk):
        found |= world.step([(0, start, min(start + chunk, length))])
    check(world, found)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_steps_of_several_sequences(kind, device):
    """Sequences advance by random numbers of tokens, some by none, with padding at the end."""
    chooser = random.Random(7)
    lengths = [300, 131, 45, 260]
    world = World(kind, lengths, 33, device)
    done, found = [0] * 4, {}
    while done != lengths:
        parts = []
        for sequence, length in enumerate(lengths):
            count = min(chooser.choice((0, 1, 2, 7, 40, 130)), length - done[sequence])
            if count:
                parts.append((sequence, done[sequence], done[sequence] + count))
                done[sequence] += count
        if parts:
            found |= world.step(parts, padding=chooser.choice((0, 3)))
    check(world, found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rejected", [1, 3, 4, 15])
def test_rejected_drafts_are_overwritten(kind, rejected, device):
    """Tokens with other inputs are stored first, then the true ones at the same positions."""
    length = 140 if rejected == 15 else 280  # one token a step, or many
    world = World(kind, [length], 24, device)
    true = (world.kv[0].clone(), world.gate[0].clone())
    found, position = {}, 0
    while position < length:
        stop = min(position + 16, length)
        wrong = max(position + 1, stop - rejected)
        for source in (world.kv, world.gate):
            source[0][wrong:stop] = 50.0
        entries = world.step([(0, position, stop)])
        found |= {key: row for key, row in entries.items() if (key[1] + 1) * world.ratio <= wrong}
        world.kv[0].copy_(true[0])
        world.gate[0].copy_(true[1])
        position = wrong if wrong < stop else stop
    check(world, found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hit", [128, 256])
def test_a_prefix_hit_finds_the_rows_of_the_block_before(kind, hit, device):
    """Each block keeps its last rows, even where the step went on into other blocks."""
    world = World(kind, [400], 24, device)
    found = world.step([(0, 0, 400)])
    found |= world.step([(0, hit, 400)])
    check(world, found)


def test_the_first_entry_has_no_terms_before(device):
    """A gate of 0 for absent terms, instead of -inf, would halve the entry."""
    world = World("csa", [4], 24, device)
    world.gate[0].zero_()
    (row,) = world.step([(0, 0, 4)]).values()
    mean = world.kv[0][:, 24:].mean(0)
    expected = mean / (mean.square().mean() + EPS).sqrt() * world.weight
    torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)  # position 0: no rotation


class KernelWorld(World):
    """The same, with the entries of the kernel in poisoned memory."""

    def compress(self, kv, gate, terms):
        count = terms.entries.shape[0]
        out = torch.full((count + 1, self.width), float("nan"), device=self.device)
        planes = (terms.entries, terms.fresh, terms.stored)
        options = (self.weight, self.table, out[:-1], self.ratio, EPS)
        kernel.launch_kv_compress((kv, gate), None, self.stored, planes, *options)
        assert out[-1].isnan().all()
        return out[:-1]


@pytest.mark.parametrize(("kind", "lengths"), [("csa", [21, 9, 3]), ("hca", [260, 129])])
def test_kernel_matches_oracle_in_mixed_steps(kind, lengths, device):
    """Terms of this step, of the cache and before position 0; sequences with padding."""
    chooser = random.Random(5)
    world = KernelWorld(kind, lengths, 34, device)
    done, found = [0] * len(lengths), {}
    while done != lengths:
        parts = []
        for sequence, length in enumerate(lengths):
            sizes = (0, 1, 3, 6) if kind == "csa" else (0, 40, 130)
            count = min(chooser.choice(sizes), length - done[sequence])
            if count:
                parts.append((sequence, done[sequence], done[sequence] + count))
                done[sequence] += count
        if parts:
            found |= world.step(parts, padding=chooser.choice((0, 3)))
    check(world, found)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_add_the_position_bias_and_store_the_inputs(kind, device):
    """As the op: gates of this step get a bias, stored gates have it."""
    ratio, has_overlap, rows = KINDS[kind]
    count = 5 if kind == "csa" else 130
    worlds = [World(kind, [count + ratio], 24, device) for _ in range(2)]
    one, other = worlds
    channels = one.kv[0].shape[1]
    bias = torch.randn(ratio, channels, device=device)
    one.pool.normal_()
    other.pool.copy_(one.pool)
    positions = torch.arange(ratio, ratio + count, device=device)
    starts = torch.tensor([0, count], device=device)
    seqs = (positions, torch.zeros_like(positions), starts, one.tables)
    tokens = completing_tokens(positions, ratio=ratio, capacity=4)
    sizes = {"block_size": BLOCK, "rows_per_block": rows}
    terms = compress_terms(tokens, *seqs, ratio=ratio, has_overlap=has_overlap, **sizes)
    slots = store_slots(*seqs, rows_per_block=rows)
    slots[1] = -1
    wide = torch.randn(count, 2 * channels + 4, device=device)
    inputs = (wide[:, :channels], wide[:, channels : 2 * channels])
    phase = positions % ratio
    expected = kv_compress_step(
        inputs, bias, phase, one.stored, slots, terms, one.weight, one.table, eps=EPS
    )
    entries = torch.full_like(expected, float("nan"))
    planes = (terms.entries, terms.fresh, terms.stored)
    options = (one.weight, one.table, entries, ratio, EPS)
    kernel.launch_kv_compress(inputs, bias, other.stored, planes, *options)
    kernel.launch_input_write(inputs, bias, phase, slots, other.stored)
    torch.testing.assert_close(entries, expected, rtol=1e-5, atol=2e-5)
    assert (terms.entries >= 0).any()
    assert torch.equal(one.pool, other.pool)
    kernel.launch_input_write(
        (wide[:0, :channels], wide[:0, :channels]), bias, phase, slots, other.stored
    )
    with pytest.raises(ArgumentError, match=r"kv_compress_step: bias is"):
        kv_compress_step(
            inputs, bias[:, 1:], phase, one.stored, slots, terms, one.weight, one.table, eps=EPS
        )


def test_refusals_name_the_reason(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    kv = torch.empty(3, 48).as_subclass(OnGpu)
    stored = (torch.empty(2, 32, 48),) * 2
    none = torch.full((2, 8), -1)
    terms = Terms(none[:, 0], none, none)
    assert compress_refusal((torch.empty(3, 48),) * 2, stored, terms) == (
        "the inputs are not on a GPU"
    )
    assert compress_refusal((kv, kv), stored, terms) == ""
    assert "odd" in compress_refusal((kv[:, :46], kv), stored, terms)
    assert "next to" in compress_refusal((kv, kv), (stored[0].mT, stored[1]), terms)
    strided = Terms(none[:, 0], none[:, :1].expand(2, 8), none)
    assert compress_refusal((kv, kv), stored, strided) == "the terms are strided"
    wide = torch.empty(1, 5000).as_subclass(OnGpu)
    assert "registers" in compress_refusal((wide, wide), stored, terms)
    monkeypatch.setenv("TIERCEL_COMPRESS_KERNEL", "0")
    assert compress_refusal((kv, kv), stored, terms) == "TIERCEL_COMPRESS_KERNEL=0"


def test_completing_tokens(device):
    positions = torch.tensor([2, 3, 4, -1, 7, 11, 0], device=device)
    for capacity, expected in ((5, [1, 4, 5, -1, -1]), (3, [1, 4, 5]), (2, [1, 4]), (0, [])):
        found = completing_tokens(positions, ratio=4, capacity=capacity)
        assert found.tolist() == expected


def test_no_tokens(device):
    world = World("csa", [9], 24, device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    tokens = completing_tokens(empty, ratio=4, capacity=2)
    assert tokens.tolist() == [-1, -1]
    terms = Terms(tokens, tokens[:, None].expand(2, 8), tokens[:, None].expand(2, 8))
    none = world.kv[0][:0]
    assert torch.equal(world.compress(none, none, terms), torch.zeros(2, 24, device=device))


def test_op_names_the_bad_argument(device):
    world = World("csa", [9], 24, device)
    positions = torch.arange(9, device=device)
    ids, starts = torch.zeros_like(positions), torch.tensor([0, 9], device=device)
    seqs = (positions, ids, starts, world.tables)
    tokens = completing_tokens(positions, ratio=4, capacity=3)
    kind = {"ratio": 4, "has_overlap": True}
    sizes = {"block_size": 128, "rows_per_block": 32}
    terms = compress_terms(tokens, *seqs, **kind, **sizes)
    kv, gate = world.kv[0], world.gate[0]
    with pytest.raises(ArgumentError, match=r"positions are \(9,\) torch\.float32"):
        completing_tokens(positions.float(), ratio=4, capacity=3)
    with pytest.raises(ArgumentError, match="capacity=-1"):
        completing_tokens(positions, ratio=4, capacity=-1)
    with pytest.raises(ArgumentError, match=r"tokens are \(3,\) torch\.int32"):
        compress_terms(tokens.int(), *seqs, **kind, **sizes)
    with pytest.raises(ArgumentError, match=r"\[\(9,\), \(8,\), \(2,\), \(1, 1\)\]"):
        compress_terms(tokens, positions, ids[:8], *seqs[2:], **kind, **sizes)
    with pytest.raises(ArgumentError, match="block_size=128, rows_per_block=4") as error:
        compress_terms(tokens, *seqs, **kind, block_size=128, rows_per_block=4)
    assert "at least 8 rows" in error.value.hint
    with pytest.raises(ArgumentError, match="compress_terms: block_size=128"):
        compress_terms(tokens, *seqs, **kind, block_size=128, rows_per_block=33)
    with pytest.raises(ArgumentError, match=r"kv is \(9, 47\)"):
        world.compress(kv[:, :47], gate[:, :47], terms)
    with pytest.raises(ArgumentError, match=r"gate is torch\.float64"):
        world.compress(kv, gate.double(), terms)
    bad = Terms(terms.entries, terms.fresh[:, :4], terms.stored)
    with pytest.raises(ArgumentError, match=r"\[\(3,\), \(3, 4\), \(3, 8\)\]"):
        world.compress(kv, gate, bad)
    world.stored = (world.stored[0], world.stored[1][:1])
    with pytest.raises(ArgumentError, match=r"stored inputs are \(2, 32, 48\)"):
        world.compress(kv, gate, terms)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replay_equals_eager(kind, device):
    world = World(kind, [300], 24, device)
    ratio, has_overlap, rows = KINDS[kind]
    positions = torch.arange(300, device=device)
    seqs = (torch.zeros_like(positions), torch.tensor([0, 300], device=device), world.tables)
    sizes = {"block_size": BLOCK, "rows_per_block": rows}

    def run():
        tokens = completing_tokens(positions, ratio=ratio, capacity=80)
        terms = compress_terms(
            tokens, positions, *seqs, ratio=ratio, has_overlap=has_overlap, **sizes
        )
        return world.compress(world.kv[0], world.gate[0], terms)

    assert torch.equal(captured(run), run())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_true_shapes_match_pytorch(kind, device, monkeypatch):
    """A chunk that begins within an entry, on a cache of earlier inputs."""
    world = World(kind, [900], 512, device)
    world.pool.normal_()
    ratio, has_overlap, rows = KINDS[kind]
    positions = torch.arange(130, 900, device=device)
    starts = torch.tensor([0, 770], device=device)
    seqs = (positions, torch.zeros_like(positions), starts, world.tables)
    sizes = {"block_size": BLOCK, "rows_per_block": rows}
    tokens = completing_tokens(positions, ratio=ratio, capacity=200)
    terms = compress_terms(tokens, *seqs, ratio=ratio, has_overlap=has_overlap, **sizes)
    inputs = (world.kv[0][130:], world.gate[0][130:], terms)
    found = world.compress(*inputs)
    monkeypatch.setenv("TIERCEL_COMPRESS_KERNEL", "0")
    torch.testing.assert_close(found, world.compress(*inputs), rtol=1e-4, atol=2e-5)
