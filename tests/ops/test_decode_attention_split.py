"""Split attention on a GPU: against the oracle; bit for bit alone, in batches, beside drafts."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.kernels.test_rtc import ARCH, ELSEWHERE, compile_here
from tests.packed_images import read_image
from tests.paged_batches import DECODES, TOLERANCE, make_batch, make_case, relative_error
from tiercel.kernels.attention import decode_attention_split as kernel
from tiercel.kernels.packed.packed_gemm import image_shape
from tiercel.reference import decode_attention as oracle

# Groups of 3, 7, 20, 4, 1, 2 heads: they fill tiles of rows, and cut queries, unevenly.
HEADS = [(6, 2, 64), (14, 2, 64), (20, 1, 128), (32, 8, 128), (2, 2, 256), (8, 4, 256)]
DTYPES = [torch.float16, torch.bfloat16]
SCALE = 0.2


def run_kernel(q, k_cache, v_cache, batch, *, window=0, max_seq_len=None, into=None, **options):
    """With poisoned results and workspaces; max_seq_len loosens the bounds; `into` an image."""
    tokens, heads, head_dim = q.shape
    splits = kernel.num_splits(max_seq_len or batch.max_seq_len, batch.max_query_len, window)
    config = kernel.select_decode_attention_split(
        head_dim, batch.max_query_len * heads // k_cache.shape[2]
    )
    nan = {"fill_value": float("nan"), "device": q.device}
    room = tokens + 32  # a tile of rows may end so far after the last token
    out = torch.full((room, heads * head_dim), dtype=q.dtype, **nan)
    partials = torch.full((room * heads, splits, head_dim), **nan)
    stats = torch.full((room * heads, splits, 2), **nan)
    kernel.launch_decode_attention_split(
        q,
        k_cache,
        v_cache,
        batch.block_tables[0],
        batch.rows,
        batch.cu_seqlens_q,
        batch.seq_lens,
        partials[: tokens * heads],
        stats[: tokens * heads],
        out[:tokens] if into is None else into,
        SCALE,
        window,
        batch.max_query_len,
        config,
        **options,
    )
    assert all(rows[tokens * heads :].isnan().all() for rows in (partials, stats))
    assert out[tokens:].isnan().all()
    return out[:tokens]


def check(requests, shape, window, dtype, device, *, block_size=64, **options):
    """Against the oracle, with NaN in every slot that no request owns."""
    case = make_case(requests, shape, block_size, dtype, device, poison=float("nan"))
    check_case(case, window, run_kernel(*case[:4], window=window, **options))


def check_case(case, window, out):
    q, _, _, batch, keys, values = case
    dtype = q.dtype
    query_lens = list(batch.query_lens)
    expected = oracle.decode_attention(q.cpu(), keys, values, query_lens, SCALE, window)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    for token in range(batch.num_tokens):  # a short request weighs little in the whole
        assert relative_error(out[token], expected[token]) < 4 * TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("requests", DECODES.values(), ids=DECODES)
def test_kernel_matches_oracle(requests, shape, window, dtype, device):
    for folds in (False, True):
        check(requests, shape, window, dtype, device, folds=folds)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_long_and_mixed_lengths(shape, device):
    lengths = torch.randint(16, 5000, (9,)).tolist()
    queries = torch.randint(1, 17, (9,)).tolist()
    requests = [*zip(queries, lengths, strict=True), (1, 1), (1, 5000)]
    for window, folds in itertools.product((0, 700), (False, True)):
        check(requests, shape, window, torch.bfloat16, device, folds=folds)
    check(requests, shape, 0, torch.float16, device, block_size=128)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [0, 100, 129])
def test_lengths_at_each_border(queries, window, device):
    """Tile, split, and the positions where splits grow: one less, equal, one more."""
    borders = (64, 128, 192, 256, kernel.FINE_END, kernel.FINE_END + kernel.MIDDLE_KEYS)
    requests = [(queries, border + step) for border in borders for step in (-1, 0, 1)]
    check(requests, (2, 1, 64), window, torch.float16, device)
    end = kernel.MIDDLE_END
    requests = [(queries, length) for length in (end - 1, end, end + 1, end + kernel.COARSE_KEYS)]
    check(requests, (1, 1, 64), window, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", range(1, 17))
def test_each_number_of_new_tokens(queries, device):
    check([(queries, 16), (17 - queries, 129)], (12, 3, 128), 0, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 1, 64, 65])
@pytest.mark.parametrize("queries", [1, 4])
def test_which_keys_the_kernel_sees(queries, window, device):
    """One huge value at a time: it shows in exactly the tokens p with j <= p < j + window."""
    context = 136
    q, k_cache, v_cache, batch, _, _ = make_case(
        [(queries, context)], (1, 1, 64), 64, torch.float16, device
    )
    blocks = batch.block_tables[0, int(batch.rows[0])].tolist()
    positions = batch.positions.cpu()
    for key in range(context):
        v_cache.zero_()
        v_cache[blocks[key // 64], key % 64] = 1000.0
        out = run_kernel(q * 0.1, k_cache, v_cache, batch, window=window)
        is_seen = (positions >= key) & (positions < key + (window or context))
        assert (out[is_seen].cpu() > 1.0).all()
        assert (out[~is_seen].cpu() == 0.0).all()


@pytest.mark.gpu
def test_keys_before_the_window_are_not_read(device):
    """Their blocks may be freed: the table then holds the null block, whatever that holds."""
    requests, window = [(3, 300), (1, 70), (2, 193)], 40
    q, k_cache, v_cache, batch, keys, values = make_case(
        requests, (4, 2, 64), 64, torch.float16, device, poison=float("nan")
    )
    for row, (queries, context) in zip(batch.rows.tolist(), requests, strict=True):
        low = max(0, context - queries - window + 1)
        batch.block_tables[0, row, : low // 64] = 0
        v_cache[batch.block_tables[0, row, low // 64], : low % 64] = float("nan")
    out = run_kernel(q, k_cache, v_cache, batch, window=window)
    expected = oracle.decode_attention(q.cpu(), keys, values, [3, 1, 2], SCALE, window)
    assert relative_error(out, expected) < TOLERANCE[torch.float16]


def alone(case, request, queries, window, **options):
    """The last `queries` new tokens of one request of a case, run as a batch of its own."""
    q, k_cache, v_cache, batch, _, _ = case
    single, _ = make_batch([(queries, batch.context_lens[request])], 64, q.device)
    table = batch.block_tables[:, batch.rows[request]].unsqueeze(1)
    single = replace(single, block_tables=table, rows=torch.zeros_like(single.rows))
    q = q[: sum(batch.query_lens[: request + 1])][-queries:]
    return run_kernel(q, k_cache, v_cache, single, window=window, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rows_do_not_depend_on_the_batch(shape, window, device):
    """Bit for bit: alone, under other bounds, and shared by other numbers of CTAs."""
    requests = [(1, 600), (3, 140), (1, 1), (4, 385), (2, 64), (1, 3000)]
    case = make_case(requests, shape, 64, torch.float16, device)
    out = run_kernel(*case[:4], window=window)
    others = [{"shares": 1}, {"shares": 17}, {"shares": 999}, {"max_seq_len": 9000}]
    ways = [{"folds": True}, {"heads_inside": False}, {"heads_inside": True}]
    others += [{**way, **other} for way in ways for other in others] + [{"folds": False}]
    for other in others:
        assert torch.equal(out, run_kernel(*case[:4], window=window, **other))
    stop = 0
    for request, (queries, _) in enumerate(requests):
        stop += queries
        assert torch.equal(out[stop - queries : stop], alone(case, request, queries, window))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 500])
def test_shares_cut_anywhere(window, device):
    """Rows of one CTA, of two and of many, added up here or there, are the same bit for bit.

    So are they in both orders of units.
    """
    case = make_case([(1, 700), (3, 1000), (2, 3000), (1, 5)], (8, 2, 128), 64, torch.half, device)
    expected = run_kernel(*case[:4], window=window, folds=False)
    for shares in range(1, 60):
        for way in ({"folds": True}, {"folds": False, "heads_inside": shares % 2 == 0}):
            assert torch.equal(expected, run_kernel(*case[:4], window=window, shares=shares, **way))


@pytest.mark.gpu
@pytest.mark.parametrize("few_results", [0, 1 << 20])
def test_merges_have_the_same_bits(few_results, device, monkeypatch):
    """However many splits a warp loads together, and in as many rounds as it takes."""
    monkeypatch.setattr(kernel, "_FEW_RESULTS", few_results)
    for requests in ([(1, 700), (3, 1000), (1, 5)], [(1, 21000), (2, 13000)]):
        case = make_case(requests, (8, 2, 128), 64, torch.bfloat16, device)
        outs = [
            run_kernel(*case[:4], folds=folds, max_seq_len=most)
            for most in (max(length for _, length in requests), 40000)
            for folds in (False, True)
        ]
        assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 300])  # the last token's window begins with a split, at 512
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rows_do_not_depend_on_drafts(shape, window, device):
    """Bit for bit: a token alone, and after others of its request, on tiles of any width."""
    for queries in (2, 5, 16):
        case = make_case([(queries, 812), (queries, 64)], shape, 64, torch.bfloat16, device)
        out = run_kernel(*case[:4], window=window)
        for request in range(2):
            lone = alone(case, request, 1, window)
            assert torch.equal(out[(request + 1) * queries - 1 :][:1], lone)


@pytest.mark.gpu
def test_many_splits(device):
    """More splits than a warp loads together."""
    for folds in (False, True):
        check([(1, 20000), (3, 9000)], (4, 2, 64), 0, torch.bfloat16, device, folds=folds)


@pytest.mark.gpu
def test_requests_of_no_tokens_or_no_keys(device):
    """Padding of a captured batch: writes nothing, or zeros."""
    q, k_cache, v_cache, batch, keys, values = make_case(
        [(2, 70), (1, 1), (1, 65)], (4, 2, 64), 64, torch.float16, device
    )
    batch.cu_seqlens_q.copy_(torch.tensor([0, 2, 3, 3]))  # the last has no token
    batch.seq_lens.copy_(torch.tensor([70, 0, 65]))  # the second has no key
    out = run_kernel(q, k_cache, v_cache, batch)
    expected = oracle.decode_attention(q[:2].cpu(), keys[:1], values[:1], [2], SCALE)
    assert relative_error(out[:2], expected) < TOLERANCE[torch.float16]
    assert (out[2] == 0.0).all()
    assert out[3].isnan().all()


@pytest.mark.gpu
def test_many_requests_of_random_lengths(device):
    """More requests than a warp reads together, empty ones between them."""
    lengths = torch.randint(0, 900, (150,))
    lengths[::7] = 0
    requests = [(1, max(1, length)) for length in lengths.tolist()]
    q, k_cache, v_cache, batch, keys, values = make_case(
        requests, (4, 2, 128), 64, torch.float16, device
    )
    batch.seq_lens.copy_(lengths)
    out = run_kernel(q, k_cache, v_cache, batch)
    expected = oracle.decode_attention(q.cpu(), keys, values, [1] * 150, SCALE)
    is_empty = lengths == 0
    assert relative_error(out[~is_empty], expected[~is_empty]) < TOLERANCE[torch.float16]
    assert (out[is_empty] == 0.0).all()


def split_of(key):
    if key < kernel.FINE_END:
        return key // kernel.FINE_KEYS
    fine = kernel.FINE_END // kernel.FINE_KEYS
    if key < kernel.MIDDLE_END:
        return fine + (key - kernel.FINE_END) // kernel.MIDDLE_KEYS
    middle = (kernel.MIDDLE_END - kernel.FINE_END) // kernel.MIDDLE_KEYS
    return fine + middle + (key - kernel.MIDDLE_END) // kernel.COARSE_KEYS


@pytest.mark.parametrize("window", [0, 1, 40, 700])
@pytest.mark.parametrize("max_query_len", [1, 5])
def test_partials_have_room_for_every_split(max_query_len, window):
    most = 1
    near = kernel.MIDDLE_END
    for length in [*range(max_query_len, 5000), *range(near - 300, near + 1200)]:
        low = max(0, length - max_query_len - window + 1) if window else 0
        most = (
            max(most, split_of(length - 1) - split_of(low) + 1)
            if window
            else split_of(length - 1) + 1
        )
        assert most <= kernel.num_splits(length, max_query_len, window)
    assert kernel.num_splits(0, max_query_len, window) == 1


def test_splits_end_with_tiles():
    assert kernel.FINE_END % kernel.FINE_KEYS == 0
    assert (kernel.MIDDLE_END - kernel.FINE_END) % kernel.MIDDLE_KEYS == 0
    for keys in (kernel.FINE_KEYS, kernel.MIDDLE_KEYS, kernel.COARSE_KEYS):
        assert all(keys % tile == 0 for tile in kernel.TILE_KEYS.values())


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10, kernel.H200_SMEM])
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64])
@pytest.mark.parametrize("head_dim", kernel.HEAD_DIMS)
def test_selected_launch_fits(head_dim, rows, limit):
    config = kernel.select_decode_attention_split(head_dim, rows, limit)
    if head_dim == 256 and limit < 163 << 10:
        assert config.smem_bytes(head_dim) > limit  # `is_supported` says no
        return
    assert config.smem_bytes(head_dim) <= limit
    if limit == kernel.H200_SMEM:  # as many as promised, with 1 KB each that the system takes
        merges = 2 if config.room > config.ctas else 0  # that wait beside them
        assert config.ctas * (config.smem_bytes(head_dim) + 1024) + merges * 1024 <= 228 << 10


# Merges, which are alike but for sizes, in all sizes of one head size only. By default the widest
# heads on Hopper.
COMPILED = [
    pytest.param(
        head_dim,
        arch,
        marks=[pytest.mark.slow] * ((head_dim, arch) != (256, ARCH)),
    )
    for head_dim in kernel.HEAD_DIMS
    for arch in (ARCH, *ELSEWHERE)
]
MERGES = ((1, 8), (1, 9), (1, 33), (1 << 15, 33), (1 << 20, 33))


@pytest.mark.parametrize(("head_dim", "arch"), COMPILED)
def test_kernels_compile_everywhere(head_dim, arch, tmp_path):
    sources = set()  # some choices are the same
    for rows, folds in ((4, False), (4, True), (32, True)) if arch == ARCH else ((32, True),):
        config = kernel.select_decode_attention_split(head_dim, rows)
        sources.add(kernel.attention_source(head_dim, torch.float16, 64, config, folds=folds))
        for results, slots in MERGES if (head_dim, arch) == (128, ARCH) else MERGES[-1:]:
            merge = kernel.select_merge(results, slots, num_sms=132, folds=folds)
            dtype = torch.bfloat16
            sources.add(kernel.merge_source(head_dim, dtype, config, merge, folds=folds))
    for source in sources:
        assert compile_here(source, tmp_path, arch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "order"), [((32, 8, 128), 4), ((8, 4, 256), 6), ((12, 4, 64), 32)]
)
@pytest.mark.parametrize("length", [90, 3000])
def test_results_as_an_image(heads, order, length, device):
    """The bits of rows, where packed_gemm reads them."""
    requests = [(1 + i % 2, length + 37 * i) for i in range(30)]
    case = make_case(requests, heads, 64, torch.float16, device)
    plain = run_kernel(*case[:4])
    tokens, columns = len(plain), heads[0] * heads[2]
    image = plain.new_full(image_shape(tokens, columns), float("nan"))
    run_kernel(*case[:4], order=order, into=image)
    found, _ = read_image(image.cpu(), order, tokens, columns)
    assert torch.equal(found, plain.cpu())
