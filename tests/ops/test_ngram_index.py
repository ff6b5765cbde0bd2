"""The n-gram index has the same drafts as a search through the whole text."""

import numpy as np
import pytest
import torch

from tests.kernels.test_rtc import check_no_spills
from tests.ngram_batches import check_batches, grow_batch, pack_batches
from tiercel.errors import ArgumentError
from tiercel.kernels.speculation.ngram_index import (
    EMPTY_SLOT,
    ngram_index_source,
    select_ngram_index,
)
from tiercel.ops.ngram_index import (
    MAX_TOKENS,
    NgramTexts,
    extend_ngram_index,
    make_ngram_index,
    ngram_index,
)
from tiercel.ops.ngram_match import make_ngram_workspace
from tiercel.reference import ngram_index as oracle
from tiercel.reference import ngram_match as search_oracle

DTYPES = ((torch.int32, torch.int64), (torch.int64, torch.int64), (torch.int32, torch.int32))


def follow(seeds, device, **sizes):
    """Ask indices about growing texts and compare each answer; returns the tokens drafted."""
    drafted = 0
    for kind, dtypes in enumerate(DTYPES):
        own = [seed for seed in seeds if seed % 3 == kind]
        for first in range(0, len(own), 100):
            some = own[first : first + 100]
            runs = [list(grow_batch(seed, **sizes)) for seed in some]
            cases = [case for run in runs for case, _ in run]
            buffers, tensors = pack_batches(cases, device, *dtypes)
            given = iter(tensors)
            for seed, run in zip(some, runs, strict=True):
                grow(seed, run, given, device)
            drafted += check_batches(cases, buffers)
    return drafted


def grow(seed, run, given, device):
    """One index along a run of batches, whose tensors come one by one."""
    rng = np.random.default_rng(seed)
    first, rows = run[0][0], len(run[0][0].arrays["input_ids"])
    room = sum(first.arrays[name].shape[1] for name in ("input_ids", "token_ids_all"))
    sizes = {name: getattr(first, name) for name in ("max_ngram_size", "min_ngram_size")}
    index = make_ngram_index(rows, room, device, **sizes)
    workspace = make_ngram_workspace(2500, device)
    for case, fresh in run:
        texts = NgramTexts(**next(given))
        for row in fresh:
            index.clear(int(row))
        if rng.random() < 0.3:
            extend_ngram_index(index, texts, workspace=workspace)
        options = {"threshold": case.threshold, "convention": case.convention}
        results = ngram_index(index, texts, workspace=workspace, **options)
        assert results[0] is texts.draft_tokens
        assert results[1] is texts.seq_lens_this_time


def test_growing_texts(device):
    assert follow(range(40), device) > 200
    assert follow([3], device, max_rows=300) > 50


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))  # for as many processes
def test_many_growing_texts(part, device):
    """More than 100,000 steps."""
    follow(range(1000 + part, 10_000, 16), device)
    follow(range(part, 20, 16), device, max_rows=2500)
    follow(range(part, 20, 16), device, max_room=3000, max_rows=3)


def test_oracles_agree():
    """First occurrences in a dictionary against the search from left to right."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(300):
        least = int(rng.integers(1, 4))
        limits = search_oracle.Limits(int(rng.integers(least, 5)), least, 0, "count")
        index = oracle.FirstOccurrences(least, limits.max_ngram_size)
        vocab = int(rng.integers(1, 5))
        for token in rng.integers(0, vocab, rng.integers(0, 30)).tolist():
            index.append(0, token)
        for token in rng.integers(0, vocab, rng.integers(1, 30)).tolist():
            index.append(1, token)
            prompt, generated = index.texts
            query = search_oracle.make_query(generated, len(generated), limits)
            hit = search_oracle.search(prompt, generated, query, limits)
            assert index.search(query) == hit
            found += hit is not None
    assert found > 1000


def test_sizes_and_rows_are_checked(device):
    for sizes, match in (((0, 1), "max_ngram_size=0"), ((2, 3), "min_ngram_size=3 is above")):
        with pytest.raises(ArgumentError, match=match):
            make_ngram_index(1, 8, device, max_ngram_size=sizes[0], min_ngram_size=sizes[1])
    for tokens in (0, MAX_TOKENS + 1):
        with pytest.raises(ArgumentError, match=f"max_tokens={tokens} is out of range"):
            make_ngram_index(1, tokens, device)
    with pytest.raises(ArgumentError, match="max_tokens='8' is not an integer"):
        make_ngram_index(1, "8", device)
    for count, match in ((-1, "rows=-1 is out of range"), (1.5, "rows=1.5 is not an integer")):
        with pytest.raises(ArgumentError, match=match):
            make_ngram_index(count, 8, device)
    case, _ = next(grow_batch(0))
    texts = NgramTexts(**case.tensors(device))
    rows = texts.input_ids.shape[0]
    index = make_ngram_index(rows + 1, 100, device)
    with pytest.raises(ArgumentError, match=f"has {rows + 1} rows on .*texts have {rows} on"):
        ngram_index(index, texts)
    with pytest.raises(ArgumentError, match="convention='last' is unknown"):
        ngram_index(make_ngram_index(rows, 100, device), texts, convention="last")


@pytest.mark.parametrize("tokens", [1, 2, 1000, 1024, 1025])
def test_a_table_is_at_most_half_full(tokens):
    index = make_ngram_index(2, tokens, torch.device("cpu"), max_ngram_size=4, min_ngram_size=2)
    rows, sizes, capacity = index.slots.shape
    assert (rows, sizes) == (2, 3)
    assert 2 * tokens <= capacity < max(17, 4 * tokens)
    assert capacity & (capacity - 1) == 0
    assert bool((index.slots == EMPTY_SLOT).all())


# The widest of all, and both kinds of launch.
SOURCES = [(8, True, 64)]
OTHER_SOURCES = [(4, True, 64), (4, True, 4), (8, True, 4), (4, False, 4), (8, False, 4)]


@pytest.mark.parametrize(
    ("token_bytes", "is_step", "largest"),
    [*SOURCES, *(pytest.param(*source, marks=pytest.mark.slow) for source in OTHER_SOURCES)],
)
def test_kernel_compiles_without_spills(token_bytes, is_step, largest, tmp_path):
    config = select_ngram_index(is_step=is_step)
    check_no_spills(ngram_index_source(config, token_bytes, 4, largest), tmp_path)


@pytest.mark.gpu
def test_graph_replays_while_texts_grow(device):
    """One captured step: lengths grow in place, every replay drafts what a search would."""
    cases = [case for case, _ in grow_batch(8, num_steps=1)]
    buffers, (tensors,) = pack_batches(cases, device, torch.int32, torch.int64)
    texts, rows = NgramTexts(**tensors), cases[0].arrays["input_ids"].shape[0]
    sizes = (cases[0].max_ngram_size, cases[0].min_ngram_size)
    room = texts.input_ids.shape[1] + texts.token_ids_all.shape[1]
    index = make_ngram_index(rows, room, device, max_ngram_size=sizes[0], min_ngram_size=sizes[1])
    options = {
        "workspace": make_ngram_workspace(rows, device),
        "threshold": torch.zeros(1, dtype=torch.int32, device=device),
        "convention": cases[0].convention,
    }
    ngram_index(index, texts, **options)
    torch.cuda.set_sync_debug_mode("error")
    ngram_index(index, texts, **options)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ngram_index(index, texts, **options)
    for row in range(rows):
        index.clear(row)
    for case, fresh in grow_batch(8, num_steps=1000):
        inputs, _ = pack_batches([case], torch.device("cpu"), torch.int32, torch.int64)
        for kind, buffer in buffers.items():
            buffer.copy_(inputs[kind])
        for row in fresh:
            index.clear(int(row))
        options["threshold"].fill_(case.threshold)
        graph.replay()
        check_batches([case], buffers)


@pytest.mark.gpu
def test_two_streams(device):
    """Two batches grow at a time, each with its stream, index and workspace."""
    runs = []
    for seed in (3, 4):
        cases = [
            (case, fresh, case.tensors(device, torch.int32))
            for case, fresh in grow_batch(seed, num_steps=40, max_rows=200)
        ]
        first, _, tensors = cases[0]
        room = tensors["input_ids"].shape[1] + tensors["token_ids_all"].shape[1]
        sizes = {name: getattr(first, name) for name in ("max_ngram_size", "min_ngram_size")}
        index = make_ngram_index(tensors["input_ids"].shape[0], room, device, **sizes)
        runs.append((torch.cuda.Stream(), index, make_ngram_workspace(200, device), cases))
    torch.cuda.synchronize()
    for step in range(40):
        for stream, index, workspace, cases in runs:
            case, fresh, tensors = cases[step]
            with torch.cuda.stream(stream):
                for row in fresh:
                    index.clear(int(row))
                options = {"threshold": case.threshold, "convention": case.convention}
                ngram_index(index, NgramTexts(**tensors), workspace=workspace, **options)
    torch.cuda.synchronize()
    for *_, cases in runs:
        for case, _, tensors in cases:
            case.check(tensors)
