"""Attention over the paged cache: which keys a token sees, through which blocks, and their sum."""

from dataclasses import replace

import pytest
import torch

from tests.paged_batches import DECODES, TOLERANCE, make_batch, make_case, relative_error
from tiercel.errors import ArgumentError
from tiercel.kernels.attention import decode_attention as kernel
from tiercel.ops import decode_attention_torch
from tiercel.ops.decode_attention import decode_attention
from tiercel.reference import decode_attention as oracle

# (heads, kv_heads, head_dim) of SmolLM2, Qwen2.5-0.5B and Gemma 3, and one without groups.
HEADS = [(9, 3, 64), (14, 2, 64), (4, 1, 256), (3, 3, 40)]
# Requests as (new tokens, context including them).
BATCHES = {
    "first token": [(1, 1)],
    "prompt": [(70, 70)],
    "decode": [(1, 67)],
    "chunk": [(7, 30)],
    "chunk from a block's end": [(66, 130)],
    "decodes": [(1, 3), (1, 64), (1, 65), (1, 1), (1, 128)],
    "mixed": [(1, 17), (9, 9), (1, 66), (5, 29), (2, 2)],
}
WINDOWS = (0, 6, 64)


def check_op(requests, shape, block_size, window, dtype, device, *, is_run=False):
    q, k_cache, v_cache, batch, keys, values = make_case(
        requests, shape, block_size, dtype, device, is_run=is_run
    )
    scale = 0.4 if shape[2] == 64 else 1 / 16  # not 1 / sqrt(head_dim): scale is an argument
    out = decode_attention(q, k_cache, v_cache, batch, scale, window=window)
    assert out.dtype == dtype
    assert out.shape == (batch.num_tokens, shape[0] * shape[2])
    query_lens = list(batch.query_lens)
    expected = oracle.decode_attention(q.cpu(), keys, values, query_lens, scale, window)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_op_matches_oracle(requests, shape, block_size, window, device):
    check_op(requests, shape, block_size, window, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_op_matches_oracle_in_16_bits(requests, shape, dtype, device):
    check_op(requests, shape, 64, 0, dtype, device)
    check_op(requests, shape, 64, 6, dtype, device)


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_blocks_in_a_run(requests, device):
    check_op(requests, (9, 3, 64), 4, 6, torch.float32, device, is_run=True)
    check_op(requests, (9, 3, 64), 4, 0, torch.bfloat16, device, is_run=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 1, 5, 22, 23, 24])
@pytest.mark.parametrize("queries", [1, 6, 23])
def test_which_keys_each_token_sees(queries, window, dtype, device):
    """One huge value at a time: it shows in exactly the tokens p with j <= p < j + window."""
    context = 23
    q, k_cache, v_cache, batch, _, _ = make_case([(queries, context)], (4, 2, 64), 4, dtype, device)
    blocks = batch.block_tables[0, int(batch.rows[0])].tolist()
    positions = batch.positions.cpu()
    for key in range(context):
        v_cache.zero_()
        v_cache[blocks[key // 4], key % 4] = 1000.0
        out = decode_attention(q * 0.1, k_cache, v_cache, batch, 0.1, window=window).float().cpu()
        is_seen = (positions >= key) & (positions < key + (window or context))
        assert (out[is_seen] > 1.0).all()  # a weight of at least a thousandth
        assert (out[~is_seen] == 0.0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [0, 9, 33])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 50), (33, 33), (6, 50)])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_attend_one_matches_oracle(shape, queries, keys, window, dtype, device):
    heads, kv_heads, head_dim = shape
    q, k, v = (
        torch.randn(tokens, count + 2, head_dim).to(dtype)[:, 1:-1]
        for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    out = decode_attention_torch.attend_one(q.to(device), k.to(device), v.to(device), 0.2, window)
    assert out.shape == q.shape
    expected = oracle.decode_attention(q, [k], [v], [queries], 0.2, window)
    assert relative_error(out.flatten(1), expected) < TOLERANCE[dtype]


def on_gpu(*cases):
    return [pytest.param(case, marks=pytest.mark.gpu) for case in cases]


# Groups of 3, 1 and 20 heads, so that tiles are filled, and cut a request's queries, unevenly.
DECODE_HEADS = [(6, 2, 64), (2, 2, 40), (2, 1, 256), (20, 1, 128)]
GPU_HEADS = [(32, 8, 128), (14, 2, 64)]
# Interpreted, a window with every second shape by default.
DECODE_CASES = [
    pytest.param(shape, window, marks=[pytest.mark.slow] * (number % 2 == bool(window)))
    for number, shape in enumerate(DECODE_HEADS)
    for window in (0, 64)
] + [
    pytest.param(shape, window, marks=pytest.mark.gpu) for shape in GPU_HEADS for window in (0, 64)
]
# Interpreted, a product of bfloat16 is garbage, and float16 has tests enough below.
KERNEL_DTYPES = [torch.float32, *on_gpu(torch.float16, torch.bfloat16)]


def select(head_dim, dtype, block_size, device):
    """The shipped config; interpreted, where programs cost milliseconds, it merges whole heads."""
    config = kernel.select_decode_attention(head_dim, dtype.itemsize, block_size)
    return replace(config, merge_cols=256) if device.type == "cpu" else config


def short_splits(config):
    """A config whose splits end every 64 keys up to 128 and every 128 beyond, merged two by two."""
    return replace(config, fine_keys=64, fine_end=128, coarse_keys=128, merge_splits=2)


def run_kernel(q, k_cache, v_cache, batch, scale, *, window=0, config=None, max_seq_len=None):
    """Both kernels with poisoned results and workspaces; max_seq_len: another bound."""
    num_tokens, heads, head_dim = q.shape
    config = config or select(head_dim, q.dtype, k_cache.shape[1], q.device)
    splits = config.num_splits(max_seq_len or batch.max_seq_len, batch.max_query_len, window)
    nan, rows = {"fill_value": float("nan"), "device": q.device}, num_tokens * heads
    out = torch.full((num_tokens, heads * head_dim), dtype=q.dtype, **nan)
    kernel.launch_decode_attention(
        q,
        k_cache,
        v_cache,
        batch.block_tables[0],
        batch.rows,
        batch.cu_seqlens_q,
        batch.seq_lens,
        torch.full((rows, splits, head_dim), **nan),
        torch.full((rows, splits, 2), **nan),
        out,
        scale,
        window,
        batch.max_query_len,
        config,
    )
    return out


def check_kernel(requests, shape, block_size, window, dtype, device, *, shorten=False):
    """Against the oracle, with NaN in every slot that no request owns."""
    q, k_cache, v_cache, batch, keys, values = make_case(
        requests, shape, block_size, dtype, device, poison=float("nan")
    )
    config = select(shape[2], dtype, block_size, device)
    config = short_splits(config) if shorten else config
    out = run_kernel(q, k_cache, v_cache, batch, 0.2, window=window, config=config)
    query_lens = list(batch.query_lens)
    expected = oracle.decode_attention(q.cpu(), keys, values, query_lens, 0.2, window)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    for token in range(batch.num_tokens):  # a short request weighs little in the whole
        assert relative_error(out[token], expected[token]) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "window"), DECODE_CASES, ids=str)
@pytest.mark.parametrize("requests", DECODES.values(), ids=DECODES)
def test_kernel_matches_oracle(requests, shape, window, dtype, device):
    check_kernel(requests, shape, 64, window, dtype, device, shorten=True)


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_kernel_takes_any_block(block_size, device):
    check_kernel(DECODES["mixed"], (2, 1, 64), block_size, 0, torch.float16, device, shorten=True)
    check_kernel(DECODES["mixed"], (2, 1, 64), block_size, 33, torch.float16, device)


@pytest.mark.parametrize(
    ("queries", "window"),
    [(3, 0), (1, 129)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((1, 0), (1, 100), (3, 100), (3, 129))
    ],
)
def test_lengths_at_each_border(queries, window, device):
    """Block, split, and the place where splits grow: one less, equal, one more."""
    borders = (64, 128, 192, 256, 384, 512)
    requests = [(queries, border + step) for border in borders for step in (-1, 0, 1)]
    check_kernel(requests, (2, 1, 64), 64, window, torch.float16, device, shorten=True)
    config = select(64, torch.float16, 64, device)
    fine, end, coarse = config.fine_keys, config.fine_end, config.coarse_keys
    requests = [(queries, length) for length in (fine, fine + 1, end, end + 1, end + coarse + 1)]
    check_kernel(requests, (1, 1, 64), 64, window, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 128), (9, 3, 64), (4, 2, 256)], ids=str)
def test_long_and_mixed_lengths(shape, dtype, device):
    lengths = torch.randint(16, 5000, (9,)).tolist()
    queries = torch.randint(1, 17, (9,)).tolist()
    requests = [*zip(queries, lengths, strict=True), (1, 1), (1, 5000)]
    check_kernel(requests, shape, 64, 0, dtype, device)
    check_kernel(requests, shape, 64, 700, dtype, device)


@pytest.mark.parametrize(
    "queries",
    [
        pytest.param(queries, marks=[pytest.mark.slow] * (queries not in (1, 5, 16)))
        for queries in range(1, 17)
    ],
)
def test_each_number_of_new_tokens(queries, device):
    requests = [(queries, 16), (17 - queries, 129)]
    check_kernel(requests, (3, 1, 64), 64, 0, torch.float16, device, shorten=True)


@pytest.mark.parametrize(
    ("queries", "window"),
    [(1, 0), (4, 65)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((4, 0), (1, 1), (4, 1), (1, 64), (4, 64), (1, 65))
    ],
)
def test_which_keys_the_kernel_sees(queries, window, device):
    """One huge value at a time: it shows in exactly the tokens p with j <= p < j + window."""
    context = 136
    q, k_cache, v_cache, batch, _, _ = make_case(
        [(queries, context)], (1, 1, 64), 64, torch.float16, device
    )
    blocks = batch.block_tables[0, int(batch.rows[0])].tolist()
    config = short_splits(select(64, torch.float16, 64, device))
    positions = batch.positions.cpu()
    first = max(0, context - queries - window) if window else 0
    keys = {0, 63, 64, 127, 128, *range(first, first + 5), *range(context - 5, context)}
    for key in keys:
        v_cache.zero_()
        v_cache[blocks[key // 64], key % 64] = 1000.0
        out = run_kernel(q * 0.1, k_cache, v_cache, batch, 0.1, window=window, config=config)
        is_seen = (positions >= key) & (positions < key + (window or context))
        assert (out[is_seen].cpu() > 1.0).all()
        assert (out[~is_seen].cpu() == 0.0).all()


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
    out = run_kernel(q, k_cache, v_cache, batch, 0.2, window=window)
    expected = oracle.decode_attention(q.cpu(), keys, values, [3, 1, 2], 0.2, window)
    assert relative_error(out, expected) < TOLERANCE[torch.float16]


ROW_HEADS = [(3, 1, 64), *on_gpu((32, 8, 128), (4, 1, 256))]


def alone(case, request, queries, shape, window, **options):
    """The last `queries` new tokens of one request of a case, run as a batch of its own."""
    q, k_cache, v_cache, batch, _, _ = case
    context = batch.context_lens[request]
    single, _ = make_batch([(queries, context)], k_cache.shape[1], q.device)
    table = batch.block_tables[:, batch.rows[request]].unsqueeze(1)
    single = replace(single, block_tables=table, rows=torch.zeros_like(single.rows))
    q = q[: sum(batch.query_lens[: request + 1])][-queries:]
    return run_kernel(q, k_cache, v_cache, single, 0.2, window=window, **options)


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.slow), 150])
@pytest.mark.parametrize("shape", ROW_HEADS, ids=str)
def test_rows_do_not_depend_on_the_batch(shape, window, device):
    """Bit for bit: alone, under another bound, and shared by other numbers of programs."""
    requests = [(1, 600), (3, 140), (1, 1), (4, 385), (2, 64)]
    case = make_case(requests, shape, 64, torch.float16, device)
    config = select(shape[2], torch.float16, 64, device)
    for tuned in (config, short_splits(config)):
        out = run_kernel(*case[:4], 0.2, window=window, config=tuned)
        for programs in (1, 17):
            other = replace(tuned, programs=programs)
            assert torch.equal(out, run_kernel(*case[:4], 0.2, window=window, config=other))
        wide = run_kernel(*case[:4], 0.2, window=window, config=tuned, max_seq_len=4096)
        assert torch.equal(out, wide)
        stop = 0
        for request, (queries, _) in enumerate(requests):
            stop += queries
            lone = alone(case, request, queries, shape, window, config=tuned)
            assert torch.equal(out[stop - queries : stop], lone)


@pytest.mark.parametrize(
    ("window", "shorten"),
    # The last token's window begins with a split, at 512.
    [(0, True), (300, False)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((0, False), (300, True))],
)
@pytest.mark.parametrize("shape", ROW_HEADS, ids=str)
def test_rows_do_not_depend_on_drafts(shape, window, shorten, device):
    """Bit for bit: a token alone, and after others of its request, on tiles of any width."""
    for queries in (2, 5, 16):
        case = make_case([(queries, 812), (queries, 64)], shape, 64, torch.float16, device)
        config = select(shape[2], torch.float16, 64, device)
        config = short_splits(config) if shorten else config
        # NumPy's products depend on the width.
        config = replace(config, most_rows=16) if device.type == "cpu" else config
        out = run_kernel(*case[:4], 0.2, window=window, config=config)
        for request in range(2):
            lone = alone(case, request, 1, shape, window, config=config)
            assert torch.equal(out[(request + 1) * queries - 1 :][:1], lone)


def test_requests_of_no_tokens_or_no_keys(device):
    """Padding of a captured batch: writes nothing, or zeros."""
    q, k_cache, v_cache, batch, keys, values = make_case(
        [(2, 70), (1, 1), (1, 65)], (4, 2, 64), 64, torch.float16, device
    )
    batch.cu_seqlens_q.copy_(torch.tensor([0, 2, 3, 3]))  # the last has no token
    batch.seq_lens.copy_(torch.tensor([70, 0, 65]))  # the second has no key
    out = run_kernel(q, k_cache, v_cache, batch, 0.2)
    expected = oracle.decode_attention(q[:2].cpu(), keys[:1], values[:1], [2], 0.2)
    assert relative_error(out[:2], expected) < TOLERANCE[torch.float16]
    assert (out[2] == 0.0).all()
    assert out[3].isnan().all()


@pytest.mark.parametrize("window", [0, 1, 40, 700])
@pytest.mark.parametrize("max_query_len", [1, 5])
def test_partials_have_room_for_every_split(max_query_len, window):
    config = kernel.select_decode_attention(128, 2, 64)

    def split_of(key):
        late = max(0, key - config.fine_end) // config.coarse_keys
        return min(key, config.fine_end) // config.fine_keys + late

    most = 1
    for length in range(max_query_len, 5000):
        low = max(0, length - max_query_len - window + 1) if window else 0
        most = max(most, split_of(length - 1) - split_of(low) + 1)
        assert most <= config.num_splits(length, max_query_len, window)
    assert config.num_splits(0, max_query_len, window) == 1


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128, 192, 256])
def test_selected_tiles_fit(head_dim, itemsize, block_size):
    config = kernel.select_decode_attention(head_dim, itemsize, block_size)
    assert block_size % config.tile_keys == 0
    assert config.fine_keys % config.tile_keys == config.coarse_keys % config.tile_keys == 0
    assert config.fine_end % config.fine_keys == 0
    assert config.most_rows & (config.most_rows - 1) == 0
    tiles = 2 * config.num_stages * config.tile_keys * head_dim * itemsize
    assert tiles + 2 * config.most_rows * head_dim * itemsize <= 227 << 10  # shared memory


@pytest.mark.gpu
def test_op_waits_for_nothing(device):
    q, k_cache, v_cache, batch, _, _ = make_case(
        DECODES["mixed"], (9, 3, 64), 64, torch.bfloat16, device
    )
    first = decode_attention(q, k_cache, v_cache, batch, 0.1)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = decode_attention(q, k_cache, v_cache, batch, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("queries", [1, 5])
def test_a_replay_reads_the_lengths_of_now(queries, window, device):
    """One graph for every length up to its bound; the tables and queries change as well."""
    case = make_case([(queries, 4000)] * 7, (8, 2, 128), 64, torch.bfloat16, device)
    q, k_cache, v_cache, batch, _, _ = case
    decode_attention(q, k_cache, v_cache, batch, 0.1, window=window)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k_cache, v_cache, batch, 0.1, window=window)
    for _ in range(3):
        lengths = torch.randint(queries, 4000, (7,))
        batch.seq_lens.copy_(lengths)
        batch.block_tables.copy_(batch.block_tables.roll(1, dims=2))
        q.normal_()
        out.fill_(float("nan"))
        graph.replay()
        eager = replace(batch, max_seq_len=int(lengths.max()))
        expected = decode_attention(q, k_cache, v_cache, eager, 0.1, window=window)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("is_run", [False, True])
def test_gathered_entries_are_those_of_the_table(is_run, device):
    cache = torch.randn(9, 4, 2, 8, device=device)
    blocks = [3, 4, 5, 6] if is_run else [3, 4, 6, 5]
    table = torch.tensor([*blocks, 0, 0], dtype=torch.int32, device=device)
    for length in (1, 4, 5, 13, 16):
        out = decode_attention_torch.gather_cache(cache, table, length)
        assert torch.equal(out, cache[blocks].flatten(0, 1)[:length])
        is_view = out.data_ptr() == cache[3].data_ptr()
        assert is_view == (device.type == "cpu" and (is_run or length <= 8))


def test_the_cache_group_is_chosen(device):
    q, k_cache, v_cache, batch, keys, values = make_case(
        BATCHES["mixed"], (9, 3, 64), 4, torch.float32, device
    )
    other, own = torch.zeros_like(batch.block_tables), batch.block_tables
    batch = replace(batch, block_tables=torch.cat((other, own)))
    out = decode_attention(q, k_cache, v_cache, batch, 0.1, group=1)
    expected = oracle.decode_attention(q.cpu(), keys, values, list(batch.query_lens), 0.1)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_caches_and_queries_are_left_alone(device):
    q, k_cache, v_cache, batch, _, _ = make_case(
        BATCHES["mixed"], (9, 3, 64), 4, torch.bfloat16, device
    )
    before = [tensor.clone() for tensor in (q, k_cache, v_cache)]
    first = decode_attention(q, k_cache, v_cache, batch, 0.1, window=5)
    assert all(torch.equal(a, b) for a, b in zip((q, k_cache, v_cache), before, strict=True))
    assert torch.equal(first, decode_attention(q, k_cache, v_cache, batch, 0.1, window=5))


def test_no_requests(device):
    batch, _ = make_batch([], 4, device)
    q = torch.empty(0, 9, 64, device=device)
    cache = torch.zeros(4, 4, 3, 64, device=device)
    assert decode_attention(q, cache, cache, batch, 0.1).shape == (0, 9 * 64)


def test_op_names_the_bad_argument(device):
    q, k_cache, v_cache, batch, _, _ = make_case([(2, 5)], (9, 3, 64), 4, torch.float32, device)
    with pytest.raises(ArgumentError, match=r"q \(1, 9, 64\) does not fit 2 tokens"):
        decode_attention(q[:1], k_cache, v_cache, batch, 0.1)
    with pytest.raises(ArgumentError, match=r"q \(2, 8, 64\) .* a cache of \(9, 4, 3, 64\)"):
        decode_attention(q[:, :8], k_cache, v_cache, batch, 0.1)
    with pytest.raises(ArgumentError, match=r"q \(2, 9, 32\)"):
        decode_attention(q[..., :32], k_cache, v_cache, batch, 0.1)
    for tensors in ((q.half(), k_cache, v_cache), (q, k_cache.half(), v_cache),
                    (q, k_cache, v_cache.half())):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"q is torch.float.*, caches are"):
            decode_attention(*tensors, batch, 0.1)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k_cache, v_cache)]
    every_other = torch.cat((q, q), dim=2)[..., ::2]
    for tensors in ((q, strided[0], v_cache), (q, k_cache, strided[1]), (q, k_cache[:8], v_cache),
                    (q, k_cache, v_cache[:8]), (every_other, k_cache, v_cache)):  # fmt: skip
        with pytest.raises(ArgumentError, match="are not equal and contiguous"):
            decode_attention(*tensors, batch, 0.1)
