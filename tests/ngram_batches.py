"""Random batches for the n-gram drafters, and calls of their oracles."""

import json
from dataclasses import dataclass, replace

import numpy as np
import torch

from tiercel.ops.hybrid_mtp_ngram import hybrid_mtp_ngram
from tiercel.ops.ngram_match import ngram_match
from tiercel.reference import hybrid_mtp_ngram as hybrid_oracle
from tiercel.reference import ngram_match as match_oracle

POISON = -1000003  # in every slot of draft_tokens: it must survive where there is no draft
MATCH_ARGUMENTS = (
    "input_ids",
    "input_ids_len",
    "token_ids_all",
    "prompt_lens",
    "step_idx",
    "draft_token_num",
    "draft_tokens",
    "seq_lens_this_time",
    "seq_lens_encoder",
    "seq_lens_decoder",
    "max_dec_len",
)
HYBRID_ARGUMENTS = (
    "input_ids",
    "input_ids_len",
    "pre_ids",
    "step_idx",
    "draft_token_num",
    "draft_tokens",
    "seq_lens_this_time",
    "seq_lens_decoder",
    "max_dec_len",
)
INT32_ROWS = ("draft_token_num", "seq_lens_this_time", "seq_lens_encoder", "seq_lens_decoder")
MATRICES = ("input_ids", "token_ids_all", "pre_ids", "draft_tokens")
WANTED = ("draft_tokens", "seq_lens_this_time")


@dataclass(frozen=True)
class NgramCase:
    """Arguments of one op by name, as int64 arrays, and its options."""

    op: str
    arrays: dict[str, np.ndarray]
    max_ngram_size: int
    min_ngram_size: int
    max_draft_tokens: int
    threshold: int
    convention: str

    @property
    def names(self):
        return MATCH_ARGUMENTS if self.op == "ngram_match" else HYBRID_ARGUMENTS

    def tensors(self, device, dtype=torch.int64, length_dtype=torch.int64, columns=True):
        """Fresh tensors; rows of matrices are strided, vectors (B, 1) where that is allowed."""
        made = {}
        for name in self.names:
            array = torch.from_numpy(self.arrays[name])
            if name in MATRICES:
                wide = torch.full((array.shape[0], array.shape[1] + 3), POISON, dtype=dtype)
                wide[:, 1:-2] = array
                made[name] = wide.to(device)[:, 1:-2]
                continue
            kind = torch.int32 if name in INT32_ROWS else length_dtype
            vector = array.flatten().to(kind).to(device)
            is_flat = name.startswith("seq_lens") or not columns
            made[name] = vector if is_flat else vector.unsqueeze(1)
        return made

    def run(self, tensors, **options):
        """Call the op; returns its two results."""
        options = {"threshold": self.threshold, "convention": self.convention, **options}
        values = (tensors[name] for name in self.names)
        if self.op == "ngram_match":
            return ngram_match(*values, self.max_ngram_size, self.max_draft_tokens, **options)
        sizes = (self.max_ngram_size, self.min_ngram_size, self.max_draft_tokens)
        return hybrid_mtp_ngram(*values, *sizes, **options)

    def expected(self):
        """The oracle's result: draft tokens and lengths."""
        lists = {
            name: (array if name in MATRICES else array.flatten()).tolist()
            for name, array in self.arrays.items()
        }
        limits = match_oracle.Limits(
            self.max_ngram_size, self.min_ngram_size, self.threshold, self.convention
        )
        if self.op == "ngram_match":
            return match_oracle.ngram_match(match_oracle.MatchRows(**lists), limits)
        del lists["draft_token_num"]
        rows = hybrid_oracle.HybridRows(**lists)
        return hybrid_oracle.hybrid_mtp_ngram(rows, self.max_draft_tokens, limits)

    def check(self, tensors):
        """Compare results with the oracle, and check that the other arguments are unchanged."""
        drafts, lens = self.expected()
        assert tensors["seq_lens_this_time"].tolist() == lens
        assert tensors["draft_tokens"].tolist() == drafts
        for name in set(self.names) - set(WANTED):
            assert np.array_equal(tensors[name].cpu().numpy().ravel(), self.arrays[name].ravel())


def _kind(name):
    return "token" if name in MATRICES else "row" if name in INT32_ROWS else "length"


def pack_batches(cases, device, dtype, length_dtype):
    """The tensors of many batches in three buffers, so that the GPU is waited for only once.

    Returns:
        The buffers by kind, and the tensors of each batch.
    """
    dtypes = {"token": dtype, "row": torch.int32, "length": length_dtype}
    arrays = {kind: [] for kind in dtypes}
    for case in cases:
        for name in case.names:
            array = case.arrays[name]
            if name in MATRICES:
                array = np.pad(array, ((0, 0), (1, 2)), constant_values=POISON)
            arrays[_kind(name)].append(array.ravel())
    buffers = {
        kind: torch.from_numpy(np.concatenate(parts)).to(dtypes[kind]).to(device)
        for kind, parts in arrays.items()
    }
    return buffers, _unpack(cases, buffers)


def _unpack(cases, buffers):
    """Views of buffers as the tensors of batches; rows of matrices are strided."""
    used = dict.fromkeys(buffers, 0)
    tensors = []
    for case in cases:
        made = {}
        for name in case.names:
            kind, (rows, *columns) = _kind(name), case.arrays[name].shape
            width = columns[0] + 3 if name in MATRICES else 1
            part = buffers[kind][used[kind] :][: rows * width].view(rows, width)
            used[kind] += rows * width
            if name in MATRICES:
                part = part[:, 1:-2]
            made[name] = part.flatten() if name.startswith("seq_lens") else part
        tensors.append(made)
    return tensors


def check_batches(cases, buffers):
    """Compare packed batches with the oracle; returns the number of draft tokens."""
    drafted = 0
    host = {kind: buffer.cpu() for kind, buffer in buffers.items()}
    for case, tensors in zip(cases, _unpack(cases, host), strict=True):
        case.check(tensors)
        drafted += int((tensors["draft_tokens"] != POISON).sum())
    return drafted


def make_batch(op, seed, max_rows=8, max_room=40):
    """A batch with ties, borders, empty rows and a small budget; every argument matters somewhere.

    Args:
        op: "ngram_match" or "hybrid_mtp_ngram".
        seed: seed of all random choices.
        max_rows: most rows; their number is sampled from 1 on.
        max_room: most tokens of a prompt, and of the generated text.
    """
    rng = np.random.default_rng(seed)
    rows, vocab = int(rng.integers(1, max_rows + 1)), int(rng.integers(1, 7))
    room, width = (int(n) for n in rng.integers(1, max_room + 1, 2))
    max_n, max_drafts = int(rng.integers(1, 6)), int(rng.integers(0, 9))
    convention = ("index", "count")[rng.integers(2)]
    is_match = op == "ngram_match"
    prompt_lens = rng.integers(0, 6, rows) if is_match else np.zeros(rows, dtype=np.int64)
    shape = (rows, width + 6)
    most = shape[1] - prompt_lens - (convention == "index")
    steps = np.minimum(rng.integers(0, width + 6, rows), most)
    arrays = {
        "input_ids": rng.integers(0, vocab, (rows, room)),
        "input_ids_len": rng.integers(0, room + 1, (rows, 1)),
        "token_ids_all" if is_match else "pre_ids": rng.integers(0, vocab, shape),
        "prompt_lens": prompt_lens[:, None],
        "step_idx": steps[:, None],
        "draft_token_num": rng.integers(-1, max_drafts + 1, (rows, 1)),
        "draft_tokens": np.full((rows, 1 + max_drafts + int(rng.integers(0, 3))), POISON),
        "seq_lens_this_time": rng.integers(0, max_drafts + 2, rows),
        "seq_lens_encoder": rng.integers(1, 5, rows) * (rng.random(rows) < 0.2),
        "seq_lens_decoder": rng.integers(1, 50, rows) * (rng.random(rows) < 0.8),
        "max_dec_len": np.where(rng.random(rows) < 0.7, 10_000, steps + rng.integers(-1, 6, rows)),
    }
    arrays["max_dec_len"] = arrays["max_dec_len"][:, None]
    most_spent = rows * (max_drafts + 2)
    threshold = int(rng.integers(-2, 2 * most_spent + 3))
    names = MATCH_ARGUMENTS if is_match else HYBRID_ARGUMENTS
    arrays = {name: arrays[name].astype(np.int64) for name in names}
    min_n = 1 if is_match else int(rng.integers(1, 5))
    return NgramCase(op, arrays, max_n, min_n, max_drafts, threshold, convention)


def grow_batch(seed, num_steps=12, max_rows=6, max_room=40):
    """Batches of `ngram_match` with growing texts: the sequence of queries of an index.

    Some prompts come in chunks (rows in prefill), rows idle at times, and a row that changes its
    text does so between two batches: yields the batch and the rows whose text is new.
    """
    rng = np.random.default_rng(seed)
    case = make_batch("ngram_match", seed, max_rows, max_room)
    arrays = dict(case.arrays)
    rows, room = arrays["input_ids"].shape
    whole = rng.integers(0, room + 1, rows)
    arrays["input_ids_len"] = rng.integers(0, whole + 1)[:, None]
    arrays["step_idx"] = np.zeros((rows, 1), dtype=np.int64)
    starts = arrays["prompt_lens"].ravel()
    most = arrays["token_ids_all"].shape[1] - starts - (case.convention == "index")
    min_n = int(rng.integers(1, case.max_ngram_size + 1))
    fresh = range(rows)
    for _ in range(num_steps):
        is_prefill = arrays["input_ids_len"].ravel() < whole
        arrays["seq_lens_encoder"] = is_prefill.astype(np.int64)
        arrays["seq_lens_decoder"] = (rng.random(rows) < 0.8).astype(np.int64)
        is_bound = rng.random() < 0.6
        threshold = int(rng.integers(0, 6 * rows + 8)) if is_bound else 10**6
        copied = {name: array.copy() for name, array in arrays.items()}
        changes = {"arrays": copied, "threshold": threshold, "min_ngram_size": min_n}
        yield replace(case, **changes), list(fresh)
        fresh = np.flatnonzero(rng.random(rows) < 0.05)
        for row in fresh:
            arrays["input_ids"][row] = rng.permutation(arrays["input_ids"][row])
            whole[row] = rng.integers(0, room + 1)
            arrays["input_ids_len"][row], arrays["step_idx"][row] = 0, 0
        lens = arrays["input_ids_len"].ravel()
        steps = arrays["step_idx"].ravel()
        grown = np.where(lens < whole, steps, steps + rng.integers(0, 6, rows))
        arrays["step_idx"] = np.minimum(grown, most)[:, None]
        arrays["input_ids_len"] = np.minimum(lens + rng.integers(1, 9, rows), whole)[:, None]


def load_cases(path):
    """The stored cases: (name, case, expected draft tokens, expected lengths) each."""
    with np.load(path) as stored:
        for index, meta in enumerate(json.loads(str(stored["meta"]))):
            name, op = meta.pop("name"), meta["op"]
            names = MATCH_ARGUMENTS if op == "ngram_match" else HYBRID_ARGUMENTS
            arrays = {key: stored[f"{index:03}.{key}"].astype(np.int64) for key in names}
            wanted = [stored[f"{index:03}.want_{key}"].tolist() for key in WANTED]
            yield name, NgramCase(arrays=arrays, **meta), *wanted
