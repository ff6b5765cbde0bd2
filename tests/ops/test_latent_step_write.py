"""What a step writes in one launch: oracle, single ops, cuts of sequences, formats, refusals."""

from dataclasses import replace

import pytest
import torch

from tests.dsv4_cases import captured, poison
from tests.ops.test_step_index import BLOCK, KINDS, make_batch
from tiercel.errors import ArgumentError
from tiercel.kernels.attention import latent_step_write as kernel
from tiercel.models.config import RopeConfig
from tiercel.models.rope import rope_table
from tiercel.ops import latent_step_write as op
from tiercel.ops import step_index_torch as index_ops
from tiercel.ops.block_quantize import decode_index_keys, decode_kv_entries, hadamard
from tiercel.ops.latent_rope import latent_rope
from tiercel.ops.latent_step_write import (
    CompressedRows,
    LatentQueries,
    LatentVectors,
    query_refusal,
    step_write_refusal,
)
from tiercel.reference import latent_rope as rope_oracle
from tiercel.reference import latent_step_write as oracle

EPS, ROTARY, KEY = 1e-6, 64, 128
LENGTH = 261
ROPE = RopeConfig(160000.0, ROTARY, "yarn", 16.0, 65536, attention_factor=1.0)
ANGLES = rope_oracle.frequencies(ROTARY, 160000.0, 16.0, 65536)


class World:
    """One sequence of random inputs, and a poisoned cache of one layer of a kind."""

    def __init__(self, kind, width, is_encoded, device, length=LENGTH):
        self.kind, self.is_encoded, self.device, self.length = kind, is_encoded, device, length
        self.table = rope_table(ROPE, length + BLOCK).to(device)
        self.x = torch.randn(length, width + 5, device=device)[:, :width]  # strided rows
        self.weight = torch.randn(width, device=device)
        self.window = self.planes(BLOCK, width)
        widths = [width, KEY] if kind.has_overlap else [width]
        self.compressors = [self.compressor(w, is_key=i == 1) for i, w in enumerate(widths)]

    def planes(self, per_block, width, is_key=False):
        """Blocks of a pool with gaps, of NaN or 0x7f."""
        if not self.is_encoded:
            pool = torch.full((9, per_block + 1, width + 2), float("nan"), device=self.device)
            return pool[:, :per_block, :width], None
        data, scales = (width // 2, width // 32) if is_key else (width + ROTARY, 8)
        pool = torch.full((9, per_block + 1, data + scales + 6), 0x7F, device=self.device)
        pool = pool.to(torch.uint8)[:, :per_block]
        return pool[..., 2 : 2 + data], pool[..., data + 4 : data + 4 + scales]

    def compressor(self, width, *, is_key):
        kind = self.kind
        channels = width * (2 if kind.has_overlap else 1)
        inputs = torch.randn(self.length, 2 * channels + 3, device=self.device)
        kv, gate = inputs[:, :channels], 3 * inputs[:, channels : 2 * channels]
        bias = torch.randn(kind.ratio, channels, device=self.device)
        stored = torch.full((9, kind.rows_per_block, 2, channels), float("nan"))
        stored = stored.to(self.device)
        per_block = BLOCK // kind.ratio
        return CompressedRows(
            *((kv, gate), bias, (stored[:, :, 0], stored[:, :, 1])),
            *(torch.randn(width, device=self.device), EPS, self.table),
            *(self.planes(per_block, width, is_key), is_key and self.is_encoded),
        )

    def step(self, run, start, stop, batch_of):
        """Write tokens start to stop by `run`."""
        batch = batch_of(start, stop)
        step = index_ops.index_step(batch, BLOCK, 128, 2, (self.kind,))
        tokens = slice(start, stop)
        vectors = LatentVectors(
            *(self.x[tokens], step.positions, self.table, self.weight, EPS),
            *(self.window, step.kv_slots),
        )
        rows = [
            replace(one, inputs=(one.inputs[0][tokens], one.inputs[1][tokens]))
            for one in self.compressors
        ]
        run(vectors, rows, step.compressed[self.kind.ratio])

    def read(self, planes, slots, is_key=False):
        cache, scales = planes
        place = (slots // cache.shape[1], slots % cache.shape[1])
        rows = cache[place].cpu()
        if scales is None:
            return rows.double()
        bytes_of_scales = scales[place].cpu()
        if is_key:
            return decode_index_keys(rows, bytes_of_scales).double()
        return decode_kv_entries(rows, ROTARY, bytes_of_scales).double()

    def check(self, tables):
        """Every vector, entry and key, and the inputs of the last block."""
        position = torch.arange(self.length, device=self.device)
        blocks = tables[:, position // BLOCK].long()
        found = self.read(self.window, blocks[2] * BLOCK + position % BLOCK)
        wanted = oracle.vectors(self.x.cpu(), position.cpu(), ANGLES, EPS, self.weight.cpu())
        self.compare(found, wanted)
        kind = self.kind
        last = position[kind.ratio - 1 :: kind.ratio]
        per_block = BLOCK // kind.ratio
        slots = tables[kind.entries, last // BLOCK].long() * per_block
        slots += last % BLOCK // kind.ratio
        for one in self.compressors:
            kv, gate = (x.cpu() for x in one.inputs)
            rest = (one.bias.cpu(), ANGLES, EPS, one.weight.cpu())
            wanted = oracle.entries(kv, gate, *rest)
            wanted = hadamard(wanted.float()).double() if one.has_hadamard else wanted
            found = self.read(one.planes, slots, one.has_hadamard)
            self.compare(found, wanted, is_key=one.has_hadamard)
            for given, stored, bias in (
                (kv, one.stored[0], 0.0 * one.bias),
                (gate, one.stored[1], one.bias),
            ):
                row = position[-min(kind.rows_per_block, self.length % BLOCK) :]
                block = tables[kind.inputs, row // BLOCK].long()
                out = stored[block, row % BLOCK % kind.rows_per_block].cpu()
                assert torch.equal(out, (given[row.cpu()] + bias[row % kind.ratio].cpu()))

    def compare(self, found, wanted, is_key=False):
        assert found.shape == wanted.shape
        if not self.is_encoded:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
            return
        # Half of the largest step: E2M1 of groups of 32, E4M3 of groups of 64.
        size, steps = (32, 3.0) if is_key else (64, 14.0)
        amax = wanted.unflatten(1, (-1, size)).abs().amax(-1, keepdim=True)
        error = (found - wanted).abs().unflatten(1, (-1, size))
        assert (error <= amax / steps).all()


def written(vectors, rows, step):
    """By the kernel, on any device."""
    assert step_write_refusal(vectors, ROTARY, rows, step) in ("", "the vectors are not on a GPU")
    op._check(vectors, rows, step)
    op._launch(vectors, rows, step)


def one_by_one(vectors, rows, step):
    op._write_one_by_one(vectors, ROTARY, rows, step)


def walk(world, run, cuts, device):
    """A sequence in steps that end at `cuts`; returns its tables (groups, blocks)."""
    torch.manual_seed(7)
    whole = make_batch((world.length,), (0,), device)
    tables = (whole.block_tables - 1) % 8 + 1  # of 8 blocks
    order = 1 + torch.stack([torch.randperm(8)[: tables.shape[2]] for _ in range(5)])
    tables = order.int().to(device)

    def batch_of(start, stop):
        batch = make_batch((stop - start,), (start,), device)
        own = batch.block_tables.clone()
        own[:, batch.rows[0]] = tables[:, : own.shape[2]]
        return replace(batch, block_tables=own, slot_mapping=slots_of(own, batch))

    for start, stop in zip((0, *cuts), (*cuts, world.length), strict=True):
        world.step(run, start, stop, batch_of)
    return tables


def slots_of(tables, batch):
    """Slots as `prepare_step` gives them: of tokens that share one, the last has it."""
    from tests.ops.test_step_index import LAYOUT
    from tiercel.ops.prepare_step import entry_slots

    rows = batch.rows.long().expand(batch.num_tokens)
    slots = entry_slots(tables, rows, batch.positions, LAYOUT)
    for group in range(5):
        seen = set()
        for token in reversed(range(batch.num_tokens)):
            slot = slots[group, token].item()
            if slot in seen:
                slots[group, token] = -1
            seen.add(slot)
    return slots


CUTS = {
    "tokens": (1, 2, 3, 4, 5, 7, 127, 128, 129, 255, 256, 257, 260),
    "chunks": (70, 131),
}


@pytest.mark.parametrize(
    ("cuts", "is_encoded"),
    [("tokens", False), ("chunks", True)],
    ids=["tokens float32", "chunks encoded"],
)
@pytest.mark.parametrize("kind", KINDS, ids=["csa", "hca"])
def test_kernel_matches_the_oracle(kind, is_encoded, cuts, device):
    world = World(kind, 128 if is_encoded else 72, is_encoded, device)
    tables = walk(world, written, CUTS[cuts], device)
    world.check(tables)


@pytest.mark.parametrize(
    "kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)], ids=["csa", "hca"]
)
def test_single_ops_write_the_same(kind, device):
    """All bytes of the pools, poison too: nothing else is written."""
    pools = []
    for run in (written, one_by_one):
        torch.manual_seed(3)
        world = World(kind, 128, True, device)
        walk(world, run, CUTS["chunks"], device)
        planes = [world.window, *(one.planes for one in world.compressors)]
        stored = [plane for one in world.compressors for plane in one.stored]
        pools.append(([plane for pair in planes for plane in pair], stored))
    for ours, theirs in zip(pools[0][1], pools[1][1], strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    for ours, theirs in zip(pools[0][0], pools[1][0], strict=True):
        # Sums of other warps round otherwise: some codes of E4M3 differ by one on a GPU.
        differing = (ours != theirs).float().mean().item()
        assert differing <= (2e-3 if device.type == "cuda" else 0.0)


def test_inputs_wait_where_they_take_rows_that_entries_read(device, monkeypatch):
    launches = []
    monkeypatch.setattr(kernel, "_launch", lambda *_: lambda grid, *_: launches.append(grid[0]))
    world = World(KINDS[0], 72, False, device)
    for start, stop in ((0, 1), (1, 26), (26, 52)):
        walk_step(world, start, stop, device)
    assert launches == [1 + 1 + 1 + 1, 7 + 7 + 25 + 25, 7 + 7 + 26, 26]
    launches.clear()
    world = World(KINDS[1], 72, False, device)
    walk_step(world, 0, 200, device)
    assert launches == [2 + 200 + 200]


def walk_step(world, start, stop, device):
    world.step(written, start, stop, lambda a, b: make_batch((b - a,), (a,), device))


def test_a_layer_with_a_window_alone(device):
    world = World(KINDS[0], 128, True, device)
    batch = make_batch((5,), (126,), device, padding=2)
    positions, slots = batch.positions.long(), batch.slot_mapping[2] % (8 * BLOCK)
    slots[-2:] = -1
    vectors = LatentVectors(
        *(world.x[:5].bfloat16().float(), positions, world.table, world.weight, EPS),
        *(world.window, slots),
    )
    written(vectors, (), None)
    found = world.read(world.window, slots[:3])
    wanted = oracle.vectors(
        vectors.x[:3].cpu(), positions[:3].cpu(), ANGLES, EPS, world.weight.cpu()
    )
    world.compare(found, wanted)


def test_refusals_say_why(device):
    world = World(KINDS[0], 128, True, device)
    batch = make_batch((5,), (126,), device)
    step = index_ops.index_step(batch, BLOCK, 128, 2, KINDS).compressed[4]
    vectors = LatentVectors(
        *(world.x[:5], batch.positions, world.table, world.weight, EPS),
        *(world.window, batch.slot_mapping[2]),
    )
    rows = world.compressors
    on_gpu = device.type == "cuda"
    reason = step_write_refusal(vectors, ROTARY, rows, step)
    assert reason == ("" if on_gpu else "the vectors are not on a GPU")
    with pytest.raises(ArgumentError, match="2 compressors without a step"):
        op.latent_step_write(vectors, ROTARY, rows)
    with pytest.raises(ArgumentError, match=r"inputs are \(261, 256\)"):
        op._check(vectors, rows, step)
    if on_gpu:
        assert step_write_refusal(vectors, 32, rows, step).startswith("a table rotates")
        assert step_write_refusal(vectors, ROTARY, rows + rows, step) == "4 compressors"
        odd = replace(rows[0], bias=rows[0].bias.double())
        assert step_write_refusal(vectors, ROTARY, [odd], step) == "a bias is torch.float64"


def make_queries(world, num_tokens, device):
    """Queries of 11 heads with a norm, and 21 of an indexer; rows have gaps."""
    heads = torch.randn(num_tokens, 11 * 128 + 4, device=device)[:, : 11 * 128]
    heads = heads.unflatten(1, (11, 128)) * torch.logspace(-3, 1, 11, device=device)[:, None]
    index = torch.randn(num_tokens, 21 * KEY, device=device).view(num_tokens, 21, KEY)
    return (
        LatentQueries(heads, world.table, 1e-4, False, torch.bfloat16),
        LatentQueries(index, world.table, None, True, torch.float32),
    )


@pytest.mark.parametrize(
    ("start", "stop", "count"),
    [
        pytest.param(126, 131, 1, id="free rows-1", marks=pytest.mark.slow),
        pytest.param(126, 131, 2, id="free rows-2"),
        pytest.param(3, 40, 1, id="chunk-1", marks=pytest.mark.slow),
        pytest.param(3, 40, 2, id="chunk-2"),
    ],
)
def test_queries_turn_in_the_same_launch(start, stop, count, device):
    """The rows beside them are those of a step without queries; of a chunk they go first."""
    torch.manual_seed(5)
    world = World(KINDS[0], 128, True, device, stop + 5)
    queries = make_queries(world, stop - start, device)[:count]
    found = []

    def run(vectors, rows, step):
        if vectors.x.shape[0] != stop - start:
            written(vectors, rows, step)
            return
        assert query_refusal(vectors, queries) in ("", "the vectors are not on a GPU")
        found.append((vectors, op._launch(vectors, rows, step, queries)))

    walk(world, run, (start, stop), device)
    vectors, turned = found[0]
    for query, out in zip(queries, turned, strict=True):
        wanted = latent_rope(
            *(query.x.cpu(), vectors.positions.cpu(), world.table.cpu()),
            eps=query.eps,
            has_hadamard=query.has_hadamard,
            out_dtype=torch.float32,
        )
        assert out.dtype == query.out_dtype
        unit = 2**-7 if out.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(out.float().cpu(), wanted, rtol=unit, atol=1e-5)
    torch.manual_seed(5)
    alone = World(KINDS[0], 128, True, device, stop + 5)
    walk(alone, written, (start, stop), device)
    for planes, others in ((world.window, alone.window), *(
        (one.planes, other.planes)
        for one, other in zip(world.compressors, alone.compressors, strict=True)
    )):  # fmt: skip
        for plane, other in zip(planes, others, strict=True):
            assert torch.equal(plane, other)
    for one, other in zip(world.compressors, alone.compressors, strict=True):
        for plane, same in zip(one.stored, other.stored, strict=True):
            assert torch.equal(plane.nan_to_num(), same.nan_to_num())


def test_refusals_of_queries(device):
    world = World(KINDS[0], 128, True, device)
    batch = make_batch((5,), (126,), device)
    vectors = LatentVectors(
        *(world.x[:5], batch.positions, world.table, world.weight, EPS),
        *(world.window, batch.slot_mapping[2] % (8 * BLOCK)),
    )
    queries = make_queries(world, 5, device)
    if device.type == "cuda":
        assert query_refusal(vectors, queries) == ""
    assert query_refusal(vectors, queries * 2) == "4 kinds of queries"
    other = replace(queries[0], eps=1e-5)
    assert query_refusal(vectors, [queries[0], other]) == "the norms have different eps"
    many = replace(vectors, x=world.x[:65])
    assert query_refusal(many, queries) == "65 tokens are more than 64"
    found = op.latent_step_write(vectors, ROTARY, queries=queries)
    assert [out.shape for out in found] == [query.x.shape for query in queries]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=["csa", "hca"])
def test_replay_and_a_switch(kind, device, monkeypatch):
    """The op in graphs of single tokens; then by single ops."""
    world = World(kind, 512, True, device)

    def run(vectors, rows, step):
        poison(device)

        def call():
            op.latent_step_write(vectors, ROTARY, rows, step)

        # Of a chunk, a second run would read rows of the cache that the first has overwritten.
        captured(call) if vectors.x.shape[0] == 1 else call()

    world.check(walk(world, run, CUTS["tokens"], device))
    monkeypatch.setenv("TIERCEL_COMPRESS_KERNEL", "0")
    monkeypatch.setattr(kernel, "launch_latent_step_write", None)
    world = World(kind, 512, True, device)

    def switched(vectors, rows, step):
        op.latent_step_write(vectors, ROTARY, rows, step)

    world.check(walk(world, switched, CUTS["chunks"], device))
