"""Drafts from a row's own text: which window, which rows, how many tokens, and nothing else."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.kernels.test_rtc import check_no_spills
from tests.ngram_batches import (
    INT32_ROWS,
    MATRICES,
    POISON,
    NgramCase,
    check_batches,
    load_cases,
    make_batch,
    pack_batches,
)
from tiercel.errors import ArgumentError
from tiercel.kernels.speculation.ngram_launch import NgramConfig, ngram_source, select_ngram
from tiercel.ops.ngram_match import check_ngram_tiles, make_ngram_workspace
from tiercel.reference import ngram_match as oracle

CASES = list(load_cases(Path(__file__).parents[1] / "data" / "ngram_cases.npz"))
OPS = ("ngram_match", "hybrid_mtp_ngram")
DTYPES = (torch.int32, torch.int64)


def rows_of(num_rows, prompts, generated, **changes):
    """A batch of `ngram_match` with given texts, each vector a number or a list; room for all."""
    width = max(map(len, prompts)) + 1
    text = np.full((num_rows, width), POISON)
    answers = np.full((num_rows, max(map(len, generated)) + 2), POISON)
    for row in range(num_rows):
        text[row, : len(prompts[row])] = prompts[row]
        answers[row, : len(generated[row])] = generated[row]
    vectors = {
        "input_ids_len": [len(tokens) for tokens in prompts],
        "prompt_lens": 0,
        "step_idx": [len(tokens) for tokens in generated],
        "draft_token_num": 4,
        "seq_lens_this_time": 7,
        "seq_lens_encoder": 0,
        "seq_lens_decoder": 1,
        "max_dec_len": 10**6,
    }
    options = {"max_ngram_size": 3, "threshold": 10_000}
    options |= {name: changes.pop(name) for name in options if name in changes}
    arrays = {
        name: np.broadcast_to(np.asarray(value, dtype=np.int64), (num_rows,)).copy()
        for name, value in (vectors | changes).items()
    }
    drafts = np.full((num_rows, 8), POISON)
    arrays |= {"input_ids": text, "token_ids_all": answers, "draft_tokens": drafts}
    return NgramCase(
        "ngram_match", arrays, min_ngram_size=1, max_draft_tokens=4, convention="count", **options
    )


def draft(case, device, dtype=torch.int64):
    """Drafts of each row, after a check against the oracle."""
    tensors = case.tensors(device, dtype)
    case.run(tensors)
    case.check(tensors)
    lens = tensors["seq_lens_this_time"].tolist()
    drafts = tensors["draft_tokens"].tolist()
    return [drafts[row][1 : lens[row]] for row in range(len(lens))]


# ---- both drafters against the oracle


@pytest.mark.parametrize("columns", [True, False], ids=["(B, 1)", "(B,)"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", CASES, ids=[case[0] for case in CASES])
def test_stored_cases(stored, dtype, columns, device):
    _, case, drafts, lens = stored
    assert case.expected() == (drafts, lens)
    tensors = case.tensors(device, dtype, columns=columns)
    results = case.run(tensors)
    assert results[0] is tensors["draft_tokens"]
    assert results[1] is tensors["seq_lens_this_time"]
    assert results[0].tolist() == drafts
    assert results[1].tolist() == lens
    case.check(tensors)


def check_random(op, seeds, device, **sizes):
    """Compare batches with the oracle, many at a time; returns how many tokens were drafted."""
    drafted = 0
    for kind, (length_dtype, dtype) in enumerate(product(DTYPES, DTYPES)):
        own = [seed for seed in seeds if seed % 4 == kind]
        for first in range(0, len(own), 500):
            cases = [make_batch(op, seed, **sizes) for seed in own[first : first + 500]]
            buffers, tensors = pack_batches(cases, device, dtype, length_dtype)
            for case, given in zip(cases, tensors, strict=True):
                case.run(given)
            drafted += check_batches(cases, buffers)
    return drafted


@pytest.mark.parametrize("op", OPS)
def test_random_batches(op, device):
    assert check_random(op, range(100), device) > 100


@pytest.mark.parametrize("op", OPS)
def test_budget_runs_over_many_rows(op, device):
    """More rows than a block of threads: the scan carries over."""
    for seed in (2, 5, 6):
        case = make_batch(op, seed, max_rows=2500, max_room=12)
        lens = case.arrays["seq_lens_this_time"]
        whole = int(lens.sum()) + len(lens)
        last = []
        for threshold in (whole, int(0.4 * whole)):
            tensors = case.tensors(device)
            limited = replace(case, threshold=threshold)
            limited.run(tensors)
            limited.check(tensors)
            drafted = (tensors["draft_tokens"] != POISON).any(dim=1).tolist()
            last.append(max((row for row, has in enumerate(drafted) if has), default=-1))
        assert last[1] < last[0], seed
        assert last[0] > 1024, seed


@pytest.mark.parametrize("op", OPS)
def test_short_texts_in_wide_rows(op, device):
    """Batches so large that rows are looked at first: with a budget, and with one for all."""
    case = make_batch(op, 2, max_rows=2500, max_room=12)
    narrow = case.arrays["input_ids"]
    wide = np.full((len(narrow), 4000), POISON)
    wide[:, : narrow.shape[1]] = narrow
    case = replace(case, arrays=case.arrays | {"input_ids": wide})
    for threshold in (len(narrow) // 2, 3 * len(narrow), 10**6):
        limited, tensors = replace(case, threshold=threshold), case.tensors(device, torch.int32)
        limited.run(tensors)
        limited.check(tensors)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))  # for as many processes
@pytest.mark.parametrize("op", OPS)
def test_100000_random_batches(op, part, device):
    first = 1000 + 6250 * part
    check_random(op, range(first, first + 6250), device)
    check_random(op, range(part, 200, 16), device, max_rows=2500, max_room=12)
    check_random(op, range(part, 200, 16), device, max_rows=4, max_room=3000)


# ---- which window


def test_longer_beats_prompt_beats_left(device):
    generated = [9, 1, 2, 5, 1, 2]
    prompts = [
        [8, 2, 70, 2, 71],  # one token in the prompt, two in the generated text
        [1, 2, 80, 1, 2, 81],  # two in both
        [7, 7, 7, 1, 2],  # two at the end of the prompt: no follower
    ]
    case = rows_of(3, prompts, [generated] * 3, max_ngram_size=2)
    assert draft(case, device) == [[5, 1, 2], [80, 1, 2, 81], [5, 1, 2]]


def test_the_end_of_the_text_does_not_match_itself(device):
    case = rows_of(2, [[], [3, 4]], [[4, 5, 6], [1, 1, 1]], max_ngram_size=3)
    assert draft(case, device) == [[], [1]]


def test_a_window_stays_within_its_text(device):
    # 1, 2 occurs across the border of prompt and generated text only.
    case = rows_of(1, [[5, 5, 1]], [[2, 9, 1, 2]], max_ngram_size=2)
    assert draft(case, device) == [[9, 1, 2]]  # after one token, 2
    case = replace(case, min_ngram_size=1, max_ngram_size=4)
    assert draft(case, device) == [[9, 1, 2]]


def test_conventions_differ_in_the_query_alone(device):
    prompts, generated = [[1, 10, 11, 2, 20, 21]], [[5, 1, 2]]
    case = rows_of(1, prompts, generated, step_idx=2)
    assert draft(case, device) == [[10, 11, 2, 20]]
    assert draft(replace(case, convention="index"), device) == [[20, 21]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [0, 1], ids=["prompt", "generated"])
def test_hits_around_tile_borders(kind, dtype, device):
    """Long rows of tokens that never match but at one place: each tile's first and last windows."""
    config = select_ngram(20, 80_000, dtype.itemsize, is_private=True)
    tile = (16 // dtype.itemsize) << config.log2_tile
    length = 2 * tile + tile // 4
    texts = np.arange(100, 100 + length)
    places = [p for border in (tile, 2 * tile) for p in range(border - 5, border + 5)]
    places += [0, length - 4, length - 3]  # the last one has no follower
    query = [1, 2, 3]
    prompts, generated = [], []
    for place in places:
        text = texts.copy()
        text[place : place + 3] = query
        prompts.append([7, 8] if kind else text)
        generated.append([*(text if kind else []), *query])
    drafts = draft(rows_of(len(places), prompts, generated), device, dtype)
    for place, found in zip(places, drafts, strict=True):
        follower = place + 3
        whole = [*texts, *query] if kind else list(texts)
        assert found == whole[follower : follower + 4], place


# ---- which rows, and how many tokens


def test_budget_in_row_order(device):
    prompts, generated = [[1, 2, 3, 4, 5, 6]] * 4, [[9, 1]] * 4
    case = rows_of(4, prompts, generated, threshold=4 + 4 + 3)
    assert [len(found) for found in draft(case, device)] == [4, 3, 0, 0]
    case = replace(case, threshold=4 + 4 + 1)  # room for one token: none
    assert [len(found) for found in draft(case, device)] == [4, 0, 0, 0]
    for threshold in (-2, 0, 5):
        assert not any(draft(replace(case, threshold=threshold), device))


def test_rows_in_prefill_keep_their_place_in_the_reserve(device):
    prompts, generated = [[1, 2, 3, 4, 5, 6]] * 3, [[9, 1]] * 3
    kinds = {"seq_lens_encoder": [5, 0, 0], "seq_lens_this_time": [5, 7, 7]}
    for threshold, drafted in ((3 + 5 + 6, [0, 4, 2]), (3 + 5 + 1, [0, 0, 0])):
        case = rows_of(3, prompts, generated, threshold=threshold, **kinds)
        tensors = case.tensors(device)
        case.run(tensors)
        case.check(tensors)
        assert tensors["seq_lens_this_time"].tolist() == [5, 1 + drafted[1], 1 + drafted[2]]


def test_max_draft_tokens_is_not_a_limit(device):
    case = rows_of(1, [list(range(1, 9))], [[9, 1]], draft_token_num=6)
    assert draft(replace(case, max_draft_tokens=1), device) == [[2, 3, 4, 5, 6, 7]]


def test_no_rows(device):
    case = rows_of(1, [[1, 2]], [[1]])
    tensors = {name: tensor[:0] for name, tensor in case.tensors(device).items()}
    drafts, lens = case.run(tensors)
    assert drafts.shape[0] == lens.shape[0] == 0


def test_a_prompt_may_fill_its_row(device):
    """While it is in prefill, or idle: the query ends after the row."""
    for rows in ({"seq_lens_encoder": [5, 0]}, {"seq_lens_decoder": [0, 1]}):
        case = rows_of(2, [[1, 2, 3]] * 2, [[9, 1]] * 2, prompt_lens=[4, 0], **rows)
        case.arrays["step_idx"][:] = [0, 1]
        assert draft(replace(case, convention="index"), device)[1] == [2, 3]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("value", [-(2**31), -1, 50, 2**31 - 1])
def test_garbage_in_a_vector_drafts_nothing_but_tokens(op, value, device):
    for seed in range(20):
        case = make_batch(op, seed)
        for name in set(case.names) - set(MATRICES):
            tensors = case.tensors(device)
            tensors[name].fill_(value)
            drafts, _ = case.run(tensors)
            # Texts are between columns of poison, and their tokens are 0 to 5.
            assert set(drafts.flatten().tolist()) <= {POISON, *range(6)}


# ---- options and errors


def test_threshold_comes_from_the_argument_then_the_environment(device, monkeypatch):
    prompts, generated = [[1, 2, 3, 4, 5, 6]] * 50, [[9, 1]] * 50
    case = rows_of(50, prompts, generated)

    def drafted(**options):
        tensors = case.tensors(device)
        case.run(tensors, **options)
        return int((tensors["draft_tokens"] != POISON).sum())

    name = "INFER_WITH_REFERENCE_TOKENUM_THRESHOLD"
    monkeypatch.delenv(name, raising=False)
    assert drafted(threshold=None) == 128 - 50
    monkeypatch.setenv(name, "60")
    assert drafted(threshold=None) == 10
    assert drafted(threshold=56) == 4 + 2
    assert drafted(threshold=torch.tensor([57], dtype=torch.int32, device=device)) == 7
    monkeypatch.setenv(name, "-3")
    assert drafted(threshold=None) == 0
    assert drafted(threshold=2**40) == drafted(threshold=10**4) == 50 * 4
    assert drafted(threshold=-(2**31)) == drafted(threshold=-(2**40)) == 0
    for text in ("12.5", "many", "1_000", " 7"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ArgumentError, match=f"{name}='{text}' cannot be read"):
            drafted(threshold=None)


@pytest.mark.parametrize("op", OPS)
def test_ops_name_the_bad_argument(op, device):
    case = next(case for _, case, _, _ in CASES if case.op == op)

    def fails(match, options=None, **changes):
        tensors = case.tensors(device) | changes
        with pytest.raises(ArgumentError, match=match):
            replace(case, **(options or {})).run(tensors)

    good = case.tensors(device)
    for name in case.names:
        tensor = good[name]
        short = tensor[:-1]
        fails(f"{op}: {name} is a list", **{name: tensor.tolist()})
        fails(f"{op}: {name} is .* \\(\\)", **{name: tensor.flatten()[0]})
        fails(f"{op}: {name} is torch.float32", **{name: tensor.float()})
        if name != "input_ids":
            fails(f"{op}: {name} is .*{short.shape[0]},", **{name: short})
        if name in INT32_ROWS:
            fails(f"{op}: {name} is torch.int64", **{name: tensor.long()})
        if name in MATRICES:
            fails(f"{op}: {name} .* strides", **{name: tensor.T.contiguous().T})
        if name in MATRICES[1:]:
            fails(f"{op}: {name} is torch.int32", **{name: tensor.int()})
    shared = good["draft_tokens"][:1].expand_as(good["draft_tokens"])
    fails(rf"{op}: draft_tokens .* strides \(0, 1\)", draft_tokens=shared)
    for size in (0, 65):
        fails(f"max_ngram_size={size} is out of range", {"max_ngram_size": size})
    if op == "hybrid_mtp_ngram":
        fails("min_ngram_size=0 is out of range", {"min_ngram_size": 0})
    fails("max_draft_tokens=-1 is out of range", {"max_draft_tokens": -1})
    fails("11 columns for 11 drafts", {"max_draft_tokens": 11})
    fails("convention='last' is unknown", {"convention": "last"})
    fails(r"convention=\['count'\] is unknown", {"convention": ["count"]})
    fails("max_ngram_size=2.0 is not an integer", {"max_ngram_size": 2.0})
    fails("threshold='5' is not an integer", {"threshold": "5"})
    with pytest.raises(ArgumentError, match=r"threshold is torch.int64 \(1,\)"):
        case.run(good, threshold=torch.zeros(1, dtype=torch.int64, device=device))


# ---- the oracle


def test_oracle_by_hand():
    limits = oracle.Limits(2, 1, 100, "count")
    assert oracle.search([1, 2, 3], [2], [2], limits) == ([1, 2, 3], 2, 1)
    assert oracle.search([1, 2, 3], [3, 1], [3, 1], limits) == ([1, 2, 3], 1, 1)
    assert oracle.search([3], [3], [3], limits) is None


# ---- the CUDA kernel


# By default the wide tokens, which need the most registers.
LAUNCHES = [(512, 1 << 14, 8)]
OTHER_LAUNCHES = [(32, 1 << 20, 8), (512, 1 << 20, 8)]
OTHER_LAUNCHES += [(32, 1 << 20, 4), (512, 1 << 20, 4), (512, 1 << 14, 4)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("rows", "room", "token_bytes"),
    [*LAUNCHES, *(pytest.param(*launch, marks=pytest.mark.slow) for launch in OTHER_LAUNCHES)],
)
def test_kernels_compile_without_spills(rows, room, op, token_bytes, tmp_path):
    config = select_ngram(rows, room, token_bytes, is_private=op == "ngram_match")
    check_no_spills(ngram_source(op, config, token_bytes, 8), tmp_path)


def test_every_batch_has_a_launch():
    shapes = product((1, 256, 257, 2500, 100_000), (1, 512, 131_072, 1 << 20), (4, 8))
    for (rows, room, token_bytes), is_private in product(shapes, (True, False)):
        config = select_ngram(rows, room, token_bytes, is_private=is_private)
        assert config == select_ngram(rows, room, token_bytes, is_private=is_private)
        assert config.log2_tile >= 3
        assert config.threads % 32 == 0
        assert config.unroll * (16 // token_bytes) <= 32  # bits of a mask of hits


def changed(case, rng):
    """The same shapes with other contents."""
    room = case.arrays["input_ids"].shape[1]
    limits = {
        "input_ids_len": room + 1,
        "step_idx": 6,
        "draft_token_num": case.max_draft_tokens + 1,
        "seq_lens_this_time": 4,
        "seq_lens_encoder": 2,
        "seq_lens_decoder": 3,
        "max_dec_len": 40,
    }
    arrays = dict(case.arrays)
    for name in set(case.names) - {"prompt_lens", "draft_tokens"}:
        arrays[name] = rng.integers(0, limits.get(name, 3), arrays[name].shape)
    if "seq_lens_encoder" in arrays:
        arrays["seq_lens_encoder"] *= rng.random(arrays["seq_lens_encoder"].shape) < 0.3
    return replace(case, arrays=arrays, threshold=int(rng.integers(-1, 60)))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_graph_replays_with_changed_inputs(op, device):
    case = replace(make_batch(op, 3), max_ngram_size=3, min_ngram_size=1)
    buffers, (tensors,) = pack_batches([case], device, torch.int32, torch.int64)
    workspace = make_ngram_workspace(64, device)
    threshold = torch.zeros(1, dtype=torch.int32, device=device)
    options = {"workspace": workspace, "threshold": threshold}
    case.run(tensors, **options)
    torch.cuda.set_sync_debug_mode("error")
    case.run(tensors, **options)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(tensors, **options)
    rng, drafted = np.random.default_rng(0), 0
    for _ in range(1000):
        case = changed(case, rng)
        fresh, _ = pack_batches([case], torch.device("cpu"), torch.int32, torch.int64)
        for kind, buffer in buffers.items():
            buffer.copy_(fresh[kind])
        threshold.fill_(case.threshold)
        graph.replay()
        drafted += check_batches([case], buffers)
        assert workspace.tolist() == [0] + [-1] * 64
    assert drafted > 500


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_two_streams(op, device):
    """Two batches at a time, each with its stream and workspace."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    workspaces = [make_ngram_workspace(2500, device) for _ in range(2)]
    cases = [make_batch(op, seed, max_rows=400, max_room=2000) for seed in range(10)]
    tensors = [case.tensors(device) for case in cases]
    torch.cuda.synchronize()
    for place, (case, given) in enumerate(zip(cases, tensors, strict=True)):
        with torch.cuda.stream(streams[place % 2]):
            case.run(given, workspace=workspaces[place % 2])
    torch.cuda.synchronize()
    for case, given in zip(cases, tensors, strict=True):
        case.check(given)


@pytest.mark.gpu
def test_workspace_must_fit(device):
    case = make_batch("ngram_match", 3)
    tensors = case.tensors(device)
    for bad in (make_ngram_workspace(0, device), make_ngram_workspace(64, torch.device("cpu"))):
        with pytest.raises(ArgumentError, match=r"workspace is torch\.int64"):
            case.run(tensors, workspace=bad)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "length"), [(1, 1 << 23), (256, 131_072), (50_000, 64)])
@pytest.mark.parametrize("op", OPS)
def test_large_batches(op, rows, length, dtype, device):
    """One hit per row, at positions over the whole length; the oracle would take hours."""
    text = torch.randint(10, 500, (rows, length), device=device)
    places = torch.randint(0, length - 30, (rows, 1), device=device)
    columns = places + torch.arange(7, device=device)
    text.scatter_(1, columns, torch.tensor([1, 2, 3, 4, 5, 6, 7], device=device).expand(rows, 7))
    case = rows_of(1, [[1]], [[1, 2, 3]], threshold=10**6, seq_lens_this_time=1)
    arrays = case.arrays | {"pre_ids": case.arrays["token_ids_all"]}
    case = replace(case, op=op, arrays=arrays)
    one = case.tensors(device, dtype)
    tensors = {name: tensor.repeat_interleave(rows, 0) for name, tensor in one.items()}
    tensors["input_ids"] = text.to(dtype)
    tensors["input_ids_len"].fill_(length)
    case.run(tensors)
    assert bool((tensors["seq_lens_this_time"] == 5).all())
    expected = torch.tensor([4, 5, 6, 7], device=device)
    assert bool((tensors["draft_tokens"][:, 1:5] == expected).all())


def test_more_tiles_than_can_be_counted_are_refused():
    wide = torch.empty((2**20, 2**23), dtype=torch.int64, device="meta")
    batch = SimpleNamespace(prompt=wide, generated=wide)
    config = NgramConfig(512, 4, 2, 12, is_pruning=True)
    with pytest.raises(ArgumentError, match="1048576 rows of 2049 tiles are too many"):
        check_ngram_tiles("ngram_match", batch, config)
    batch = SimpleNamespace(prompt=wide[: 2**19], generated=wide[: 2**19])
    check_ngram_tiles("ngram_match", batch, config)
