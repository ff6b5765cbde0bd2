"""All layers in one native call: against the oracle, and a token's bits depend on it alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.decoder_layers_model import EPS, Made, Model, expect, make_batch, make_tables
from tests.ops.test_dequantize import random_blocks
from tiercel.batch import PackedItems
from tiercel.errors import ArgumentError
from tiercel.kernels.native.forms import has_native
from tiercel.ops.decoder_layers import LayersShape, decoder_layers, prepare_layers
from tiercel.ops.linear import prepare_linear
from tiercel.quant import QuantTensor
from tiercel.quant_types import Layout, QuantType

pytestmark = pytest.mark.skipif(not has_native(), reason="needs the native library")
MODELS = {
    "llama": Model(),
    "float32": Model(cache=torch.float32, rounds=False),
    "bfloat16": Model(cache=torch.bfloat16, types="Q8_0 Q8_0 Q8_0 Q8_0 Q4_1 Q4_1 Q4_1"),
    "qwen": Model(
        types="Q4_K Q4_K Q6_K Q4_K Q4_K Q4_K Q6_K", hidden=256, inner=512, heads=8, kv_heads=4,
        extras=("q_norm", "k_norm", "qkv_bias", "o_bias"),
    ),
    "gemma": Model(
        windows=(20, 0, 20), activation="gelu_tanh", half=12, head_dim=48, heads=2, kv_heads=1,
        types="Q5_1 Q5_0 Q4_0 IQ4_NL Q8_0 Q8_0 Q4_0",
        extras=("q_norm", "k_norm", "attn_update_norm", "mlp_update_norm"),
    ),
    "dense": Model(
        types="F32 F16 BF16 F32 F16 BF16 F32", hidden=100, inner=72, head_dim=20, half=8
    ),
}  # fmt: skip


def check(found, expected, made):
    # A code of 8 bits on the other side of a half moves an input by 1 / 127 of its group's largest.
    limit = 2e-2 if made.model.rounds else {torch.float32: 2e-5}.get(made.model.cache, 5e-3)
    error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < limit, error


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_oracle(name):
    made = Made(MODELS[name])
    lengths = (37, 1, 70)
    xs = [torch.randn(length, made.model.hidden) for length in lengths]
    batch = make_batch(made, make_tables(made, lengths), [(i, 0, n) for i, n in enumerate(lengths)])
    found = made.run(torch.cat(xs), batch).split(lengths)
    for part, x in zip(found, xs, strict=True):
        check(part, expect(made, x), made)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_has_the_same_bits_in_any_step(name):
    made = Made(MODELS[name], seed=1)
    length, other = 150, 40
    tables = make_tables(made, (length, other))
    x, y = (torch.randn(n, made.model.hidden) for n in (length, other))
    whole = made.run(x, make_batch(made, tables, [(0, 0, length)]))
    made.reset()
    pieces, past = [], 0
    for step, new in enumerate((1, 3, 16, 17, 64, 1, 8, 39, 1)):
        parts = [(0, past, new), (1, step, 1)] if step % 2 else [(1, step, 1), (0, past, new)]
        rows = [x[past : past + new], y[step : step + 1]][:: 1 if step % 2 else -1]
        out = made.run(torch.cat(rows), make_batch(made, tables, parts))
        pieces.append(out[:new] if step % 2 else out[1:])
        past += new
    assert past == length
    assert torch.equal(torch.cat(pieces), whole)


def test_threads_change_no_bit():
    made = Made(MODELS["llama"])
    x = torch.randn(90, made.model.hidden)
    batch = make_batch(made, make_tables(made, (90,)), [(0, 0, 90)])
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        made.reset()
        found.append(made.run(x, batch))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["llama", "float32", "gemma"])
def test_items_see_the_prefix_and_themselves(name):
    made = Made(MODELS[name], seed=2)
    prefix, items = 21, (3, 1, 9)
    total = prefix + sum(items)
    tables = make_tables(made, (prefix,))
    starts = torch.tensor([prefix + sum(items[:i]) for i, n in enumerate(items) for _ in range(n)])
    item_start = torch.cat((torch.zeros(prefix, dtype=torch.int64), starts))
    at = torch.arange(total)
    positions = torch.where(at < prefix, at, prefix + at - item_start)
    x = torch.randn(total, made.model.hidden)
    batch = make_batch(made, tables, [(0, 0, total)], PackedItems((prefix,), item_start.int()))
    slots = torch.where(at < prefix, batch.slot_mapping[0], -1)[None]
    batch = replace(
        batch,
        positions=positions.int(),
        slot_mapping=slots,
        seq_lens=torch.tensor([prefix], dtype=torch.int32),
    )
    found = made.run(x, batch)
    end = prefix
    for count in items:
        made.reset()
        alone = torch.cat((x[:prefix], x[end : end + count]))
        length = prefix + count
        whole = made.run(alone, make_batch(made, make_tables(made, (length,)), [(0, 0, length)]))
        assert torch.equal(found[:prefix], whole[:prefix])
        check(found[end : end + count], whole[prefix:].double(), made)
        end += count


def test_a_nan_stays_in_its_request():
    made = Made(MODELS["llama"])
    x = torch.randn(8, made.model.hidden)
    tables = make_tables(made, (4, 4))
    batch = make_batch(made, tables, [(0, 0, 4), (1, 0, 4)])
    good = made.run(x, batch)
    made.reset()
    x[2, 5] = torch.nan
    found = made.run(x, batch)
    assert torch.equal(found[4:], good[4:])
    assert found[2:4].isnan().all()  # the engine ends that request


def concatenated(made):
    """Gate and up as one matrix."""
    data = torch.as_tensor(random_blocks("Q4_0", 2 * made.model.inner, made.model.hidden // 32))
    shape = (2 * made.model.inner, made.model.hidden)
    return QuantTensor(QuantType.Q4_0, Layout.FILE, shape, {"data": data.flatten(1)})


def test_refuses_what_does_not_fit():
    made = Made(MODELS["llama"])
    part = made.parts[0]
    shape = LayersShape(96, 160, 6, 2, 32, "silu", EPS, 1.0, True)
    with pytest.raises(ArgumentError, match="gate_up is"):
        prepare_layers([part], replace(shape, intermediate_size=80), None)
    whole = prepare_linear([concatenated(made)], torch.float16, torch.device("cpu")).segments
    with pytest.raises(ArgumentError, match="gate and up"):
        prepare_layers([replace(part, gate_up=whole)], shape, None)
    with pytest.raises(ArgumentError, match="attn_norm"):
        prepare_layers([replace(part, attn_norm=torch.ones(95))], shape, None)
    batch = make_batch(made, make_tables(made, (4,)), [(0, 0, 4)])
    with pytest.raises(ArgumentError, match="4 tokens"):
        decoder_layers(torch.zeros(3, 96), made.native, batch, lambda: None)
