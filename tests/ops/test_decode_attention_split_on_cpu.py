"""The sources of decode_attention_split, lane by lane on a processor: faults that need no GPU.

Queries and new keys are NaN until they are waited for; CTAs and warps come in any order; shares end
anywhere in rows.
"""

from dataclasses import replace

import pytest
import torch

from tests.ops.test_decode_attention_split import alone, check_case, run_kernel
from tests.packed_images import read_image
from tests.paged_batches import make_case
from tiercel.kernels.attention import decode_attention_split as kernel

CPU = torch.device("cpu")
# Borders of tiles and splits, one key, rows that several CTAs share; of 165 the last token's window
# of 100 leaves out the first key of a tile.
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 165, 300, 700)
# Where splits are added up, and the order of units.
WAYS = (
    {"folds": True},
    {"folds": False, "heads_inside": False},
    {"folds": False, "heads_inside": True},
)


@pytest.fixture(autouse=True)
def _on_cpu(on_processor, monkeypatch):
    # So few that merges of some cases have a column a lane, of others two.
    monkeypatch.setattr(kernel, "_num_sms", lambda device: 4)


def run(processor, case, window, shares, **options):
    """With queries and new keys that come when the kernel waits for them."""
    q, k_cache, v_cache, batch, _, _ = case
    slots = batch.slot_mapping[0].tolist()
    new = [cache.flatten(0, 1)[slot] for cache in (k_cache, v_cache) for slot in slots]
    processor.late = [q.new_empty(0).set_(q.untyped_storage()), *new]
    processor.seed += 1
    return run_kernel(q, k_cache, v_cache, batch, window=window, shares=shares, **options)


def check_source(processor, requests, shape, window, dtype, *, ways=WAYS, shares=5):
    """Against the oracle; bit for bit alone, in shares of any size, in every way."""
    case = make_case(requests, shape, 64, dtype, CPU, poison=float("nan"))
    first = run(processor, case, window, shares, folds=True)
    check_case(case, window, first)
    for way in ways:
        for others in (7, 16) if way.get("heads_inside") else (1, 16):
            assert torch.equal(first, run(processor, case, window, others, **way))
    stop = 0
    for request, queries in enumerate(case[3].query_lens):
        stop += queries
        lone = alone(case, request, queries, window, shares=2, folds=True)
        assert torch.equal(first[stop - queries : stop], lone)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("queries", "heads"), [(1, (4, 1)), (2, (8, 2)), (5, (1, 1))])
def test_rows_of_one_tile(queries, heads, window, processor):
    requests = [(min(queries, length), length) for length in LENGTHS]
    check_source(processor, requests, (*heads, 128), window, torch.float16)


def test_rows_of_two_tiles(processor):
    """7 heads a group, which tiles of 8 rows cut."""
    requests = [(2, 140), (2, 2), (2, 64), (2, 900), (2, 257)]
    check_source(processor, requests, (14, 2, 64), 0, torch.bfloat16, ways=WAYS[:1])


def test_groups_of_splits(processor):
    """Rows of several groups, which shares cut inside of and between."""
    check_source(processor, [(1, 1300), (2, 1100)], (4, 2, 64), 0, torch.float16, ways=WAYS[:2])
    check_source(processor, [(1, 2100)], (1, 1, 64), 1500, torch.float16, ways=WAYS[:1], shares=3)


def test_more_requests_than_lengths_kept(processor, monkeypatch):
    """Then lengths are read where they are."""
    case = make_case([(1, 65), (2, 140), (1, 300), (1, 1)], (4, 1, 128), 64, torch.float16, CPU)
    kept = run(processor, case, 0, 5, folds=True)
    select = kernel.select_decode_attention_split
    monkeypatch.setattr(
        kernel, "select_decode_attention_split", lambda *shape: replace(select(*shape), kept=3)
    )
    for shares in (1, 5):
        assert torch.equal(kept, run(processor, case, 0, shares, folds=True))


def test_requests_of_no_tokens_or_no_keys(processor):
    """Padding of a captured batch: writes nothing, or zeros."""
    case = make_case([(2, 70), (1, 1), (1, 65)], (4, 1, 128), 64, torch.float16, CPU)
    batch = case[3]
    expected = alone(case, 0, 2, 0, shares=1, folds=True)
    batch.cu_seqlens_q.copy_(torch.tensor([0, 2, 3, 3]))  # the last has no token
    batch.seq_lens.copy_(torch.tensor([70, 0, 65]))  # the second has no key
    for way in WAYS:
        out = run_kernel(*case[:4], shares=5, **way)
        assert torch.equal(out[:2], expected)
        assert (out[2] == 0.0).all()
        assert out[3].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("rows", [8, 16, 24, 32])
@pytest.mark.parametrize("head_dim", kernel.HEAD_DIMS)
def test_every_launch(head_dim, rows, window, processor):
    """Up to 16 new tokens, beyond the positions where splits grow."""
    for group in (1, 4, 7, 8):
        most = min(16, rows // group)
        requests = [(most, 500), (1, 2500), (max(1, most // 2), 129), (1, 1), (most, most)]
        check_source(processor, requests, (2 * group, 2, head_dim), window, torch.bfloat16)
    check_source(processor, [(16, 20), (16, 333)], (rows, 1, head_dim), window, torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("few_results", [0, 1 << 20])
def test_more_splits_than_a_merge_asks_for(few_results, processor, monkeypatch):
    """In chunks of 32, and in several rounds."""
    monkeypatch.setattr(kernel, "_FEW_RESULTS", few_results)
    check_source(processor, [(1, 9000)], (1, 1, 64), 0, torch.float16, ways=WAYS[:2], shares=3)


@pytest.mark.slow
def test_more_requests_than_lanes(processor):
    lengths = torch.randint(1, 200, (70,)).tolist()
    requests = [(1, length) for length in lengths]
    check_source(processor, requests, (4, 1, 128), 0, torch.float16, shares=11)


@pytest.mark.parametrize(
    ("order", "way"), [(4, WAYS[0]), pytest.param(6, WAYS[1], marks=pytest.mark.slow)], ids=str
)
def test_results_as_an_image(order, way, processor):
    """The bits of rows, where packed_gemm reads them."""
    requests = [(1, 300), *[(16, 20 + i) for i in range(2)], (1, 65)]  # two tiles of 32
    case = make_case(requests, (8, 2, 64), 64, torch.float16, CPU)
    plain = run(processor, case, 0, 5, **way)
    image = torch.full((2, 32 * 512), float("nan"), dtype=torch.float16)
    run(processor, case, 0, 5, **way, order=order, into=image)
    found, rest = read_image(image, order, len(plain), 512)
    assert torch.equal(found, plain)
    assert rest.isnan().all()
