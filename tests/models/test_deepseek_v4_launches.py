"""How many launches a layer of DeepSeek-V4 of true shape takes in a decode step, without a GPU."""

from dataclasses import replace

import pytest

from benchmarks.deepseek_v4_layers import FLASH, Slice, slices
from tests.dsv4_launches import layer_launches
from tiercel.quant_types import QuantType

LAYERS = {part.name: part for part in slices() if part.name.endswith(("layer", "routing"))}
TOGGLES = ("LINEAR_CHAIN", "MOE_ROUTE")  # off: slower
MIX = ["step_kernel", "mhc_mix_finish"]
GROUP, WRITE = "linear_group", "latent_step_write_kernel"
ATTEND, EXPERTS = "sparse_attention_decode", "moe_experts_tiles"
WINDOW = [*MIX, GROUP, WRITE, ATTEND, GROUP, *MIX, GROUP, EXPERTS]
CSA = [*MIX, GROUP, WRITE, "indexer_scores", "indexer_select", *WINDOW[4:]]
# wo_b of 16,384 columns is no part of a chain.
WIDE = [GROUP, "block_matvec_kernel", "add_parts_kernel"]
EXPECTED = {
    "Flash, window layer": WINDOW,
    "Flash, HCA layer": WINDOW,
    "Flash, CSA layer": CSA,
    "Flash, CSA layer, hash routing": CSA,
    "Pro, HCA layer": [*WINDOW[:5], *WIDE, *WINDOW[6:]],
    "Pro, CSA layer": [*CSA[:7], *WIDE, *CSA[8:]],
}


@pytest.fixture(autouse=True)
def _fewest_launches(monkeypatch):
    for name in TOGGLES:
        monkeypatch.setenv(f"TIERCEL_{name}", "1")


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        ("Flash, CSA layer, hash routing", 8),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in EXPECTED),
        *(pytest.param(name, 8, marks=pytest.mark.slow) for name in EXPECTED),
    ],
)
def test_launches_of_a_layer(name, num_tokens):
    """At most 12 of Flash, and 14 of Pro."""
    found = layer_launches(LAYERS[name], num_tokens)
    assert found == EXPECTED[name]
    assert len(found) <= (12 if name.startswith("Flash") else 14)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [QuantType.Q2_K, QuantType.NVFP4])
def test_formats_of_experts_do_not_count(experts):
    part = Slice("a layer", FLASH, [0])
    assert layer_launches(replace(part, experts=experts), 1) == WINDOW


@pytest.mark.slow
def test_launches_of_a_layer_without_the_toggles(monkeypatch):
    for name in TOGGLES:
        monkeypatch.delenv(f"TIERCEL_{name}")
    found = layer_launches(LAYERS["Flash, window layer"], 1)
    first = [*MIX, GROUP, GROUP, WRITE, ATTEND, GROUP, GROUP]
    assert found == [*first, *MIX, GROUP, GROUP, "learned_kernel", EXPERTS]
