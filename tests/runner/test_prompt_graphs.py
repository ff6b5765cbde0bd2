"""Steps padded to a size that graphs serve; the graphs themselves need a GPU."""

from types import SimpleNamespace

import pytest
import torch

from tests.ops.prefill_attention_cases import ITEMS, PLAIN, make_case, relative_error
from tests.tiny_llm import greedy, ids_of, open_tiny
from tiercel.batch import BatchLengths, PackedItems
from tiercel.models.decoder import Decoder
from tiercel.ops.prefill_attention import prefill_attention
from tiercel.params import SamplingParams
from tiercel.runner.prompt_graphs import LARGEST, padded_size, padded_sizes
from tiercel.runner.step_inputs import padded_lengths

LAYOUTS = {**ITEMS, **{f"plain, {name}": requests for name, requests in PLAIN.items()}}


def test_sizes_hold_the_step_and_waste_little():
    sizes = {padded_size(count) for count in range(1, LARGEST + 1)}
    assert len(sizes) == 30
    for count in range(1, LARGEST + 1):
        size = padded_size(count)
        assert count <= size <= LARGEST
        assert size - count < (16 if count <= 32 else max(64, count / 4))
        assert padded_size(size) == size


def lengths_of(case):
    items = PackedItems(tuple(case.prefix_len), case.item_start)
    if all(p >= n for p, n in zip(case.prefix_len, case.context_lens, strict=True)):
        items = None
    return tuple(case.query_lens), tuple(case.context_lens), items


@pytest.mark.parametrize("requests", LAYOUTS.values(), ids=LAYOUTS)
def test_padding_sees_nothing_and_changes_nobody(requests, device):
    case = make_case(requests, (4, 2, 64), 16, torch.float32, device, poison=0.0)
    size = padded_size(len(case.q))
    padded = padded_lengths(*lengths_of(case), size)
    queries, contexts, items = padded.query_lens, padded.context_lens, padded.items
    assert sum(queries) == len(items.item_start) == size
    missing = size - len(case.q)

    def grown(x):
        return torch.cat((x, torch.randn(missing, *x.shape[1:], device=device)))

    out = prefill_attention(
        grown(case.q),
        case.k_cache,
        case.v_cache,
        torch.cat((case.tables, case.tables[:1])) if missing else case.tables,
        queries,
        contexts,
        0.15,
        prefix_len=items.prefix_len,
        item_start=items.item_start,
        k_new=grown(case.k_new),
        v_new=grown(case.v_new),
    )
    assert relative_error(out[: len(case.q)], case.expected()) < 5e-6
    assert (out[len(case.q) :] == 0.0).all()


@pytest.mark.parametrize(
    ("hidden", "heads", "intermediate", "largest"),
    [(1024, 16, 3072, 4096), (4096, 32, 12288, 1536), (8192, 64, 28672, 512)],
)
def test_sizes_end_where_the_device_is_busy(hidden, heads, intermediate, largest):
    sizes = {"hidden_size": hidden, "num_heads": heads, "intermediate_size": intermediate}
    config = SimpleNamespace(num_kv_heads=8, head_dim=128, **sizes)
    weights = Decoder.weights_per_layer.fget(SimpleNamespace(config=config))
    assert padded_sizes(weights, 8192)[-1] == largest
    assert padded_sizes(weights, 100) == [16, 32, 64, 128]
    assert padded_sizes(weights, 1) == [1]
    assert padded_sizes(weights, 8) == [8]  # steps of `exact_tokens` are not padded beyond them
    assert padded_sizes(weights, 17) == [16, 32]


def test_a_step_of_full_size_stays_as_it_is():
    case = make_case([(20, 20, [60, 4])], (4, 2, 64), 16, torch.float32, torch.device("cpu"))
    assert padded_lengths(*lengths_of(case), 64) == BatchLengths(*lengths_of(case))
    padded = padded_lengths(*lengths_of(case), 128)
    assert (padded.query_lens, padded.context_lens) == ((64, 64), (84, 64))


def test_padded_lines_of_logits_change_nobody():
    """Steps with prompts and steps of answers alike, as on a GPU."""
    prompts = [
        {"prompt_token_ids": [(7 * i + j) % 250 for j in range(5 + 9 * i)]} for i in range(5)
    ]
    params = [
        greedy(12),
        SamplingParams(seed=1, top_p=0.9, presence_penalty=1.0, max_tokens=12),
        SamplingParams(seed=2, top_k=5, max_tokens=12, logprobs=3),
        SamplingParams(seed=3, allowed_token_ids=list(range(50)), max_tokens=12),
        SamplingParams(seed=4, max_tokens=12, prompt_logprobs=1),
    ]

    def answers(buckets):
        with open_tiny(max_num_batched_tokens=40) as llm:
            llm._engine.runner.decode_steps._buckets[1] = buckets
            return ids_of(llm.generate(prompts, params))

    assert answers([4, 8]) == answers([])
