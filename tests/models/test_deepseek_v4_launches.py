"""How many launches a layer of DeepSeek-V4 of true shape takes in a decode step, without a GPU."""

from dataclasses import replace

import pytest

from benchmarks.deepseek_v4_layers import FLASH, Slice, slices
from tests.dsv4_launches import layer_launches
from tiercel.quant_types import QuantType

LAYERS = {part.name: part for part in slices() if part.name.endswith(("layer", "routing"))}
MIX = ["step_kernel", "mhc_mix_finish"]
GROUP, WRITE = "linear_group", "latent_step_write_kernel"
ATTEND, ROUTE, EXPERTS = "sparse_attention_decode", "learned_kernel", "moe_experts_tiles"
WINDOW = [*MIX, GROUP, GROUP, WRITE, ATTEND, GROUP, GROUP, *MIX, GROUP, GROUP, ROUTE, EXPERTS]
CSA = [*WINDOW[:5], "indexer_scores", "indexer_select", *WINDOW[5:]]
# wo_b of 16,384 columns is no part of a group.
WIDE = [GROUP, "block_matvec_kernel", "add_parts_kernel"]
EXPECTED = {
    "Flash, window layer": WINDOW,
    "Flash, HCA layer": WINDOW,
    "Flash, CSA layer": CSA,
    "Flash, CSA layer, hash routing": [*CSA[:-2], "hash_kernel", EXPERTS],
    "Pro, HCA layer": [*WINDOW[:6], *WIDE, *WINDOW[8:]],
    "Pro, CSA layer": [*CSA[:8], *WIDE, *CSA[10:]],
}


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        ("Flash, CSA layer, hash routing", 8),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in EXPECTED),
        *(pytest.param(name, 8, marks=pytest.mark.slow) for name in EXPECTED),
    ],
)
def test_launches_of_a_layer(name, num_tokens):
    assert layer_launches(LAYERS[name], num_tokens) == EXPECTED[name]


@pytest.mark.slow
@pytest.mark.parametrize("experts", [QuantType.Q2_K, QuantType.NVFP4])
def test_formats_of_experts_do_not_count(experts):
    part = Slice("a layer", FLASH, [0])
    assert layer_launches(replace(part, experts=experts), 1) == WINDOW
