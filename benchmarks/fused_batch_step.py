"""All layers of a decoder for a few requests in one launch, `ops/fused_batch_step.py`.

    python -m benchmarks.fused_batch_step --out benchmarks/results/FILE.json
    python -m benchmarks.fused_batch_step --only qwen3-8b

The peer is what a step launches without it: in each layer the rotary kernel, attention and the
fused layer tail. Times are of a model's whole stack of layers; q, k and v of the first layer are an
input of both. Floor: the layers' weights, and keys and values, once. A result is compared with the
oracle in a decoder of the same widths of three layers. `TIERCEL_BATCH_STEP=1 tiercel bench speed`
has whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from benchmarks.model_shapes import SHAPES
from benchmarks.op_timing import Case, main, relative_error
from tests.fused_batch_step_model import HEAD_DIM, Step, expected_step, make_step
from tiercel.kernels.fused import fused_batch_step as kernel
from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape
from tiercel.ops.decode_attention import decode_attention, prepare_decode_attention
from tiercel.ops.fused_batch_step import fused_batch_step
from tiercel.ops.fused_layer_tail import ChainExchange, fused_layer_tail, make_exchange
from tiercel.ops.rotary_kv_write import rotary_kv_write

MODELS = ("qwen3-8b", "qwen3-4b", "qwen3-14b")
# Requests, and keys of each with the new one. A graph is made for the longest context.
STEPS = ((1, 600), (2, 600), (4, 600), (8, 600), (16, 600), (2, 8192), (8, 8192))
MIXTURE = [(), ("down", "v")]  # matrices of Q6_K, in turn
# Units of a warp in flight while it attends, besides what is used.
OTHER_AHEAD = (0, 2)


@dataclass(frozen=True)
class Inputs:
    """A decoder's step, and the exchange of its tails."""

    step: Step
    exchange: ChainExchange


def make_inputs(model: str, layers: int, tokens: int, keys: int) -> Inputs:
    """Random weights of the real widths, and caches of every layer."""
    shape = SHAPES[model]
    rows = (shape.heads + shape.kv_heads) * HEAD_DIM
    v_rows = shape.kv_heads * HEAD_DIM
    attended = shape.heads * HEAD_DIM
    widths = ChainShape(shape.hidden, attended, shape.intermediate, rows, v_rows)
    sixes = [MIXTURE[index % len(MIXTURE)] for index in range(layers)]
    device = torch.device("cuda")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    step = make_step(widths, shape.kv_heads, [keys] * tokens, sixes, device, num_sms=sms)
    prepare_decode_attention(step.weights.layers[0].k_cache, shape.heads)
    return Inputs(step, make_exchange(step.weights.geometry.tail, device))


def run(inputs: Inputs, ahead: int) -> None:
    """All layers in one launch, with so many units in flight while a warp attends."""
    step = inputs.step
    with mock.patch.object(kernel, "AHEAD", ahead):
        fused_batch_step(step.heads, step.x, step.weights, step.batch)


def run_launches(inputs: Inputs) -> None:
    """All layers, each with launches for rotation, attention and the rest."""
    step, heads = inputs.step, inputs.step.heads
    weights, batch = step.weights, step.batch
    for layer in weights.layers:
        turned = heads.unflatten(1, (-1, HEAD_DIM))
        norms = layer.head_norms
        rotary_kv_write(
            turned,
            batch.positions,
            weights.rope_table,
            layer.k_cache,
            layer.v_cache,
            batch.slot_mapping[0],
            q_weight=norms[0],
            k_weight=norms[1],
            eps=weights.head_eps,
        )
        queries = turned[:, : weights.geometry.heads.num_heads]
        attended = decode_attention(queries, layer.k_cache, layer.v_cache, batch, weights.scale)
        following = fused_layer_tail(
            attended, step.x, layer.tail, inputs.exchange, is_dependent=True
        )
        heads = heads if following is None else following


def check(model: str, tokens: int, ahead: int) -> float:
    """Relative error of the update of the residual over three layers, a request of three parts."""
    inputs = make_inputs(model, 3, tokens, 4200 if tokens == 1 else 600)
    expected, _ = expected_step(inputs.step)
    before = inputs.step.x.double().cpu()
    run(inputs, ahead)
    return relative_error(inputs.step.x.double().cpu() - before, expected - before)


def make_case(model: str, tokens: int, keys: int, ahead: int = kernel.AHEAD) -> Case:
    """A number of requests of one length."""
    shape = SHAPES[model]
    weights = make_inputs(model, len(MIXTURE) + 1, 1, 2).step.weights
    planes = [p for layer in weights.layers[:-1] for matrix in layer.tail.planes() for p in matrix]
    layer_bytes = sum(plane.nbytes for plane in planes) / len(MIXTURE)
    key_bytes = tokens * keys * 2 * 2 * shape.kv_heads * HEAD_DIM
    return Case(
        name=f"{model}, {shape.layers} layers, {tokens} x {keys} keys, {ahead} ahead",
        make=lambda _: make_inputs(model, shape.layers, tokens, keys),
        run=lambda inputs: run(inputs, ahead),
        check=lambda _: check(model, tokens, ahead),
        tolerance=3e-3,
        num_bytes=int(shape.layers * (layer_bytes + key_bytes)),
        peer=run_launches,
        peer_name="three launches a layer",
        max_sets=1,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yield one Case per model, number of requests and length."""
    if device.type == "cpu":
        raise SystemExit("fused_batch_step: this kernel runs on a GPU.")
    for model in MODELS:
        for tokens, keys in STEPS:
            yield make_case(model, tokens, keys)
    for ahead in OTHER_AHEAD:
        for tokens in (2, 8, 16):
            yield make_case(MODELS[0], tokens, 600, ahead)


if __name__ == "__main__":
    main(__doc__, cases)
