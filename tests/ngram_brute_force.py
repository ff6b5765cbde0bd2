"""N-gram drafts by testing every position of a text: written independently of the oracles.

The oracles try sizes from the longest on and stop at the first window. Here each position of a text
gives how many tokens before it equal the query's last tokens, and the best position is the smallest
of all. Lengths out of bounds are cut, which the oracles leave to the ops.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tests.ngram_batches import MATRICES, POISON, make_batch, pack_batches
from tests.ops.test_ngram_match import rows_of
from tiercel.ops.ngram_match import make_ngram_workspace


def common_end(text, query):
    """The number of last tokens that two texts share."""
    pairs = zip(reversed(text), reversed(query), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(text), len(query)))


def best_place(prompt, generated, query, sizes):
    """The tokens after the best window: longest, prompt first, leftmost; an empty list if none."""
    places = []
    for kind, text in enumerate((prompt, generated)):
        for follower in range(1, len(text)):
            size = min(common_end(text[:follower], query), sizes[-1], len(generated))
            if size >= sizes[0]:
                places.append((-size, kind, follower))
    if not places:
        return []
    _, kind, follower = min(places)
    return (prompt, generated)[kind][follower:]


def expected(case):
    """Draft tokens and lengths of an `NgramCase`."""
    rows = {
        name: (array if name in MATRICES else array.ravel()).tolist()
        for name, array in case.arrays.items()
    }
    is_match = case.op == "ngram_match"
    drafts, lens = rows["draft_tokens"], rows["seq_lens_this_time"]
    sizes = (case.min_ngram_size, case.max_ngram_size)
    shift = int(case.convention == "index")
    encoder = rows.get("seq_lens_encoder", [0] * len(lens))
    decoder = rows["seq_lens_decoder"]
    held = 0  # tokens of this step so far
    reserved = sum(encoder[row] > 0 or decoder[row] > 0 for row in range(len(lens)))
    for row in range(len(lens)):
        if encoder[row] > 0:
            held += lens[row]  # and its reserved position stays
            continue
        if is_match:
            lens[row] = int(decoder[row] != 0)
        base = lens[row]
        if base == 0:
            continue
        step, whole = rows["step_idx"][row], rows["token_ids_all" if is_match else "pre_ids"][row]
        left = rows["max_dec_len"][row] - step - 1
        text = whole[max(0, rows["prompt_lens"][row]) :] if is_match else whole
        step = max(0, min(step, len(text) - shift))
        limit = rows["draft_token_num"][row] if is_match else case.max_draft_tokens + 1 - base
        want = min(limit, left)
        held += base
        if is_match or want > 0:
            reserved -= 1
        room = case.threshold - held - reserved
        if want <= 0 or room < 2:
            continue
        prompt = rows["input_ids"][row][: max(0, rows["input_ids_len"][row])]
        found = best_place(prompt, text[:step], text[: step + shift], sizes)
        found = found[: min(want, room, len(drafts[row]) - base)]
        drafts[row][base : base + len(found)] = found
        lens[row] = base + len(found)
        held += len(found)
    return drafts, lens


def vary(case, seed):
    """The same texts with numbers at and beyond their borders, and with rare states of rows."""
    rng = np.random.default_rng(seed)
    arrays = {name: array.copy() for name, array in case.arrays.items()}
    rows = len(arrays["input_ids"])
    is_prefill = arrays.get("seq_lens_encoder", np.zeros(rows)) > 0
    lens = arrays["seq_lens_this_time"]
    lens[is_prefill] = rng.integers(0, 60, is_prefill.sum())  # chunks of prompts
    threshold = case.threshold + int(lens[is_prefill].sum() * rng.random() * 1.5)
    beyond = {"input_ids_len": "input_ids", "step_idx": "token_ids_all", "draft_token_num": None}
    for name, matrix in beyond.items():
        matrix = "pre_ids" if matrix == "token_ids_all" and matrix not in arrays else matrix
        most = arrays[matrix or "draft_tokens"].shape[1]
        changed = rng.random(rows) < 0.15
        arrays[name][changed, 0] = rng.choice([-3, most - 1, most, most + 1, most + 90], rows)[
            changed
        ]
    arrays["seq_lens_decoder"][rng.random(rows) < 0.05] = -1
    return replace(case, arrays=arrays, threshold=threshold)


def check_cases(cases, dtypes):
    """Run the cases; only the results are written, and the workspace is left unchanged.

    Returns the number of draft tokens.
    """
    cpu = torch.device("cpu")
    buffers, tensors = pack_batches(cases, cpu, *dtypes)
    workspace = make_ngram_workspace(300, cpu)
    wanted = []
    for place, (case, given) in enumerate(zip(cases, tensors, strict=True)):
        threshold = case.threshold
        if place % 2:
            threshold = torch.tensor([threshold], dtype=torch.int32)
        case.run(given, workspace=workspace, threshold=threshold)
        assert workspace.tolist() == [0] + [-1] * 300
        drafts, lens = map(np.array, expected(case))
        results = {"draft_tokens": drafts, "seq_lens_this_time": lens}
        wanted.append(replace(case, arrays=case.arrays | results))
    after, _ = pack_batches(wanted, cpu, *dtypes)
    for kind, buffer in buffers.items():
        assert torch.equal(buffer, after[kind])
    return sum(int((case.arrays["draft_tokens"] != POISON).sum()) for case in wanted)


def random_cases(op, kind):
    """Short texts, two sets: unchanged, with numbers beyond their borders, and without budget."""
    cases = [make_batch(op, seed) for seed in range(kind, 400, 2)]
    cases += [vary(case, seed) for seed, case in enumerate(cases)]
    # The budget binds nowhere, so that rows may be written one by one.
    return cases + [replace(case, threshold=10**4) for case in cases[::5]]


def many_drafts(op):
    """More drafts than a warp copies in one pass, and more than a block of threads does."""
    for seed in range(30):
        case = make_batch(op, seed, max_rows=5, max_room=300)
        rows, most = len(case.arrays["input_ids"]), (20, 63, 64, 65, 150)[seed % 5]
        limits = np.random.default_rng(seed).integers(0, most + 1, (rows, 1))
        arrays = case.arrays | {
            "draft_tokens": np.full((rows, most + 1), POISON),
            "draft_token_num": limits,
            "max_dec_len": np.full((rows, 1), 10**4),
        }
        threshold = (10**4, 40, 100, 200)[seed % 4]
        changes = {"max_draft_tokens": most, "threshold": threshold, "min_ngram_size": 1}
        yield replace(case, arrays=arrays, **changes)


def long_texts(op):
    """Texts with windows of up to 64 tokens, as long as those of periodic texts."""
    for seed in range(150):
        case = make_batch(op, seed, max_rows=3, max_room=(300, 1500)[seed % 2])
        longest = (case.max_ngram_size, 2, 17, 64)[seed % 4]
        yield replace(case, max_ngram_size=longest, threshold=10**4)


def one_window(kind):
    """One matching window at each position of texts of many lengths that match nowhere else."""
    query = [1, 2, 3]
    for length in range(50, 71):
        prompts, generated = [], []
        for place in np.random.default_rng(length).permutation(length - 2):
            text = np.arange(100, 100 + length)
            text[place : place + 3] = query
            prompts.append([7, 8] if kind else text)
            generated.append([*(text if kind else []), *query])
        yield rows_of(
            length - 2, prompts, generated, threshold=10**5, max_ngram_size=1 + length % 4
        )


def every_budget(op):
    """Few rows, some of them in prefill, under each budget from none to all."""
    for seed in range(12):
        case = make_batch(op, seed, max_rows=5, max_room=20)
        arrays = dict(case.arrays)
        if op == "ngram_match":
            rng = np.random.default_rng(seed)
            arrays["seq_lens_encoder"] = (rng.random(len(arrays["input_ids"])) < 0.4).astype(int)
        most = int(arrays["seq_lens_this_time"].sum()) + 6 * len(arrays["input_ids"])
        for threshold in range(-1, most):
            yield replace(case, arrays=arrays, threshold=threshold)


def many_rows(op):
    """Numbers of rows around those of warps and of blocks of 64 threads, under several budgets."""
    for seed, rows in enumerate((31, 32, 33, 63, 64, 65, 128, 129, 150)):
        case = make_batch(op, seed, max_room=10)
        picks = np.random.default_rng(seed).integers(0, len(case.arrays["input_ids"]), rows)
        case = replace(case, arrays={name: array[picks] for name, array in case.arrays.items()})
        most = 3 * rows + int(case.arrays["seq_lens_this_time"].sum())
        for threshold in (most // 4, most // 3, most // 2, 2 * most // 3, most, 10**4):
            yield replace(case, threshold=threshold)
