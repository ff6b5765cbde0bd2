"""The tiny DeepSeek-V4 checkpoint in the engine, and its model step by step over poisoned pools."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.dsv4_files import DATA, TINY, released_tensors, save_folder
from tiercel.batch import Batch
from tiercel.cache.pool import CachePool
from tiercel.cache.spec import group_specs, slot_layout
from tiercel.engine import build as engine_module
from tiercel.llm import LLM
from tiercel.ops.prepare_step import prepare_step
from tiercel.request.output import RequestOutput

BLOCK = 128
VOCAB = 131
TOLERANCE = 2e-4  # of logits, however a text is cut into steps
TRACED = slice(32, 40)  # positions of the traces, of prompt 1


@functools.cache
def expected() -> dict[str, Tensor]:
    """The results of the independent reference; see tests/data/dsv4/README.md."""
    return load_file(DATA / "expected.safetensors")


def open_v4(path=TINY, **options) -> LLM:
    """The tiny checkpoint in float32 on a CPU."""
    return LLM(path, device="cpu", **({"dtype": "float32", "threads": 1} | options))


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids that end no answer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (count,), generator=generator).tolist()


@functools.cache
def tiny_model(path=TINY, **options):
    """The model with its draft head, which all tests of a process share."""
    with open_v4(path, spec="mtp", **options) as llm:
        return llm._engine.runner.model


class Steps:
    """Rows of a model that advance step by step; unwritten cache is NaN.

    The model's cache is bound to the last `Steps` made for it.

    Attributes:
        model: of any family.
        computed: tokens of each row that are computed.
    """

    def __init__(
        self,
        model,
        texts: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        room: int = 16,
        device: str | torch.device = "cpu",
        unwritten: int = 0xFF,
    ):
        """Give each row blocks in any order, for its text and `room` tokens more.

        unwritten: each byte of the cache that nothing is written to; the default is NaN in every
            float format.
        """
        self.model, rows = model, len(texts)
        groups = group_specs(model.cache_specs())
        block = model.block_size
        self._layout = slot_layout(groups, block)
        longest = max(map(len, texts)) + room
        columns = -(-longest // block)
        self.token_ids = torch.zeros(rows + 1, longest, dtype=torch.int32)
        for row, text in enumerate(texts):
            self.token_ids[row, : len(text)] = torch.tensor(text)
        self.pools = [CachePool(group, rows * columns + 1, block, str(device)) for group in groups]
        for planes in (planes for pool in self.pools for planes in pool.layers.values()):
            for plane in planes.values():
                plane[1:].view(torch.uint8).fill_(unwritten)
        generator = torch.Generator().manual_seed(seed)
        self.tables = torch.zeros(len(groups), rows + 1, columns, dtype=torch.int32)
        for table in self.tables:
            blocks = 1 + torch.randperm(rows * columns, generator=generator)
            table[:rows] = blocks.view(rows, columns).int()
        self.computed = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.token_ids, self.tables = self.token_ids.to(device), self.tables.to(device)
        model.bind_cache(self.pools)

    @torch.inference_mode()
    def step(
        self,
        counts: dict[int, int],
        longest: int | None = None,
        rank_tokens: tuple[int, ...] = (),
    ) -> tuple[Batch, Tensor]:
        """Compute so many tokens more of some rows; returns the batch and its states.

        Args:
            counts: tokens by row.
            longest: bound of the lengths; None for the largest of them.
            rank_tokens: tokens of each rank, where each has rows of its own.
        """
        device = self.token_ids.device
        rows = torch.tensor(list(counts), dtype=torch.int32, device=device)
        lengths = tuple(counts.values())
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        inputs = prepare_step(
            self.token_ids, self.computed, self.tables, rows, starts, sum(lengths), self._layout
        )
        ends = tuple(inputs.seq_lens.tolist())
        batch = Batch(
            inputs.input_ids,
            inputs.positions,
            starts,
            inputs.seq_lens,
            rows,
            torch.arange(sum(lengths), dtype=torch.int32, device=device),
            inputs.slot_mapping,
            self.tables,
            lengths,
            ends,
            sum(lengths),
            len(lengths),
            max(lengths),
            longest or max(ends),
            rank_tokens=rank_tokens,
        )
        return batch, self.model.forward(batch)

    def run(self, chunks: Sequence[int], row: int = 0) -> Tensor:
        """States of a row after some chunks."""
        return torch.cat([self.step({row: count})[1] for count in chunks])

    def reject(self, row: int, wrong: Sequence[int]) -> None:
        """Compute draft tokens that are all wrong, and take them back."""
        start = int(self.computed[row])
        place = slice(start, start + len(wrong))
        kept = self.token_ids[row, place].clone()
        self.token_ids[row, place] = torch.tensor(wrong, dtype=torch.int32)
        self.step({row: len(wrong)})
        self.token_ids[row, place] = kept
        self.computed[row] = start

    def forget_before(self, row: int, position: int) -> None:
        """Leave what a prefix hit at `position` leaves: sliding groups keep their last window."""
        for pool, table in zip(self.pools, self.tables, strict=True):
            spec = pool.group.spec
            first = spec.first_token(position) // BLOCK
            for column in range(position // BLOCK):
                if spec.policy == "sliding" and column < first:
                    table[row, column] = 0


@torch.inference_mode()
def logits_of(model, hidden: Tensor) -> Tensor:
    """Logits of all states."""
    return model.logits(hidden)


@torch.inference_mode()
def whole_logits(model, ids: Sequence[int]) -> Tensor:
    """Logits at each position of a text that is computed in one step."""
    return logits_of(model, Steps(model, [ids]).run([len(ids)]))


@torch.inference_mode()
def draft_states(model, batch: Batch, hidden: Tensor, following: Tensor) -> Tensor:
    """The draft head's states of a step; `following`: the token after each position."""
    return model.draft_head.forward(replace(batch, input_ids=following), hidden)


def evened(ids: Sequence[int], chunks: Sequence[int]) -> list[int]:
    """Chunks repeated until a text is computed."""
    left, cut, number = len(ids), [], 0
    while left:
        cut.append(min(left, chunks[number % len(chunks)]))
        left -= cut[-1]
        number += 1
    return cut


@contextmanager
def watched(found: dict[str, Tensor]):
    """Keep what each layer and each half of it returns, by `expected`'s names.

    The layers are frozen records with slots: the classes are watched, in the order of calls.
    """
    from tiercel.layers import mhc_layer, moe

    kinds = {
        "streams": (mhc_layer.HyperLayer, "__call__"),
        "attn_out": (mhc_layer.CompressedAttention, "__call__"),
        "ffn_out": (moe.MoE, "__call__"),
        "ffn.route_ids": (moe.Router, "__call__"),
    }
    originals = {name: getattr(kind, method) for name, (kind, method) in kinds.items()}
    counts = dict.fromkeys(kinds, 0)

    def watch(name):
        def call(self, *args):
            result = originals[name](self, *args)
            value = result[0] if name == "ffn.route_ids" else result
            if name == "streams":
                value = value.settled()
            found[f"layers.{counts[name]}.{name}"] = value.clone()
            counts[name] += 1
            return result

        return call

    try:
        for name, (kind, method) in kinds.items():
            setattr(kind, method, watch(name))
        yield
    finally:
        for name, (kind, method) in kinds.items():
            setattr(kind, method, originals[name])


# ---- the engine


def write_repeating(folder: Path, *, tokenizer: bool = False) -> Path:
    """A checkpoint whose tokens repeat now and then, and whose draft head expects them to.

    The head's logits depend on all that it reads, but a little: so some of its drafts are right.

    tokenizer: whether the folder has one, of 131 tokens.
    """
    tensors = released_tensors()
    head = tensors["head.weight"]
    tensors["head.weight"] = (head.float() + 0.4 * tensors["embed.weight"].float()).to(head.dtype)
    for name, tensor in tensors.items():
        is_small = any(part in name for part in ("e_proj", "wo_b", "w2"))
        if name.startswith("mtp.0.") and name.endswith(".scale") and is_small:
            tensors[name] = (tensor.view(torch.uint8) - 3).view(tensor.dtype)
    size, scale = len(head[0]), tensors["mtp.0.h_proj.scale"]
    tensors["mtp.0.h_proj.weight"] = torch.eye(size).to(torch.float8_e4m3fn)
    tensors["mtp.0.h_proj.scale"] = torch.full_like(scale.view(torch.uint8), 127).view(scale.dtype)
    tensors["mtp.0.hnorm.weight"] = torch.ones_like(tensors["mtp.0.hnorm.weight"])
    for name in ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight"):
        tensors[f"mtp.0.{name}"] = tensors[name].clone()
    save_folder(folder, tensors)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json of ASCII characters and a few words, with BOS 0 and EOS 1."""
    words = ["<bos>", "<eos>", *(chr(code) for code in range(33, 127)), "\u0120", "\u010a"]
    words += [f"<|{i}|>" for i in range(VOCAB - len(words))]
    added = [
        {
            "id": i,
            "content": word,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, word in enumerate(words)
        if len(word) > 1
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = True
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    named = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def with_blocks(monkeypatch, full: int, sliding: int) -> None:
    """Give engines that open later so many blocks in groups of each policy."""

    def few(groups, **sizes):
        counts = {"full": full, "sliding": sliding}
        return [1 + counts[group.spec.policy] for group in groups]

    monkeypatch.setattr(engine_module, "cache_blocks", few)


def poison_new_blocks(llm: LLM) -> None:
    """Fill blocks with NaN whenever a request gets them; for an engine without overlap."""
    engine = llm._engine
    assert not engine.config.overlap
    for pool, allocator in zip(engine.runner.pools, engine.scheduler.cache.allocators, strict=True):
        planes = [plane for layer in pool.layers.values() for plane in layer.values()]

        def allocate(count, planes=planes, original=allocator.allocate):
            blocks = original(count)
            for plane in planes:
                for block in blocks:
                    plane[block].view(torch.uint8).fill_(0xFF)
            return blocks

        allocator.allocate = allocate


def assert_true(outputs: Sequence[RequestOutput], model=None) -> None:
    """Each greedy answer, and its log-probabilities, are those of the text computed in one step."""
    model = tiny_model() if model is None else model
    for output in outputs:
        for answer in output.outputs:
            first = len(output.prompt_token_ids) - 1
            ids = [*output.prompt_token_ids, *answer.token_ids]
            logits = whole_logits(model, ids[:-1])[first:]
            chosen = logits.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
            assert bool((chosen >= logits.amax(1) - 2 * TOLERANCE).all())
            wanted = logits.log_softmax(1)
            for entry, row in zip(answer.logprobs or (), wanted, strict=bool(answer.logprobs)):
                got = [entry.logprob, *(logprob for _, logprob in entry.top)]
                of = [entry.token_id, *(token for token, _ in entry.top)]
                np.testing.assert_allclose(got, row[of], atol=2 * TOLERANCE, rtol=0)
