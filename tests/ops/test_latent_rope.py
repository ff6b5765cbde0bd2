"""Head norm, rotation and tables of DeepSeek-V4: reference, oracle, properties, cache write."""

import pytest
import torch

from tests.dsv4_cases import captured, case, poison, strided
from tiercel.errors import ArgumentError
from tiercel.models.config import RopeConfig
from tiercel.models.rope import inverse_frequencies, rope_table
from tiercel.ops.latent_rope import latent_cache_write, latent_rope
from tiercel.reference import latent_rope as oracle

YARN = {"scaling": "yarn", "factor": 16.0, "original_context": 65536, "attention_factor": 1.0}
KINDS = {"main": (10000.0, {}), "compress": (160000.0, YARN)}
SHAPES = [(1, 1, 16, 16), (5, 3, 40, 16), (7, 6, 96, 32), (3, 64, 512, 64)]  # T, heads, d, rotary
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}


def make_table(kind, rotary, max_positions, device):
    base, yarn = KINDS[kind]
    return rope_table(RopeConfig(base, rotary, **yarn), max_positions).to(device)


def oracle_angles(kind, rotary):
    return (
        oracle.frequencies(rotary, 10000.0)
        if kind == "main"
        else oracle.frequencies(rotary, 160000.0, 16.0, 65536)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_match_the_reference_and_oracle(kind, device):
    base, yarn = KINDS[kind]
    expected = case(f"rope.{kind}")["inv_freq64"].double()
    made = inverse_frequencies(RopeConfig(base, 64, **yarn))
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=0)
    for rotary in (2, 16, 64, 126):
        exact = torch.tensor(oracle_angles(kind, rotary), dtype=torch.float64)
        made = inverse_frequencies(RopeConfig(base, rotary, **yarn))
        torch.testing.assert_close(made, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("base", "yarn"),
    [
        (160000.0, (8.0, 4096, 32.0, 1.0)),
        (160000.0, (4.0, 100, 2.0, 2.0)),
        (160000.0, (4.0, 100, 32.0, 1.0)),  # the ramp begins below the first pair
        (2.0, (4.0, 65536, 1e4, 1.0)),  # and ends beyond the last channel
    ],
)
def test_other_yarn_settings_match_oracle(base, yarn, device):
    names = ("factor", "original_context", "beta_fast", "beta_slow")
    rope = RopeConfig(base, 32, "yarn", **dict(zip(names, yarn, strict=True)))
    exact = torch.tensor(oracle.frequencies(32, base, *yarn), dtype=torch.float64)
    torch.testing.assert_close(inverse_frequencies(rope), exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_rotation_matches_the_reference(kind, device):
    data = case("rope", device)
    table = make_table(kind, 16, int(data["pos"].max()) + 1, device)
    out = latent_rope(strided(data["x"]), data["pos"], table)
    torch.testing.assert_close(out, data[f"{kind}.out"], rtol=0, atol=1e-5)
    back = latent_rope(data[f"{kind}.out"], data["pos"], table, inverse=True)
    torch.testing.assert_close(back, data[f"{kind}.inverse"], rtol=0, atol=1e-5)
    torch.testing.assert_close(back, data["x"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_heads", "d", "rotary"), SHAPES)
def test_rotation_matches_oracle(num_tokens, num_heads, d, rotary, dtype, kind, device):
    x = strided(torch.randn(num_tokens, num_heads, d, device=device).to(dtype))
    x[-1, 0] *= 1e-3  # so small that eps decides
    weight = torch.randn(d, device=device)
    positions = torch.randint(0, 300, (num_tokens,), device=device)
    table = make_table(kind, rotary, 300, device)
    angles = oracle_angles(kind, rotary)
    for eps, factor, inverse in (
        (None, None, False),
        (1e-6, None, False),
        (1e-6, weight, False),
        (None, None, True),
    ):
        poison(device)
        out = latent_rope(x, positions, table, eps=eps, weight=factor, inverse=inverse)
        assert out.dtype == dtype
        assert out.is_contiguous()
        cpu_weight = None if factor is None else factor.cpu()
        expected = oracle.latent_rope(x.cpu(), positions.cpu(), angles, eps, cpu_weight, inverse)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=4 * tolerance)


def test_one_head_needs_no_head_dimension(device):
    x = torch.randn(4, 40, device=device)
    positions = torch.tensor([3, 0, 17, 2], dtype=torch.int32, device=device)
    table = make_table("main", 16, 20, device)
    out = latent_rope(x, positions, table, eps=1e-6)
    assert torch.equal(out, latent_rope(x[:, None], positions, table, eps=1e-6)[:, 0])


def test_far_positions_keep_their_angle(device):
    """In float32 angles, position 1048575 would be 0.03 rad off."""
    table = rope_table(RopeConfig(10000.0, 8), 1 << 20).to(device)
    positions = torch.tensor([65535, 65536, 65537, (1 << 20) - 1], device=device)
    x = torch.randn(4, 1, 8, device=device)
    out = latent_rope(x, positions, table)
    expected = oracle.latent_rope(x.cpu(), positions.cpu(), oracle.frequencies(8, 10000.0))
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_cache_write_touches_its_slots_alone(dtype, device):
    pool = torch.randint(0, 99, (5, 3 * 10 + 4), device=device).to(dtype)
    cache = pool[:, :30].view(5, 3, 10)  # blocks with a gap after each
    before = pool.clone()
    values = torch.randint(100, 200, (4, 10), device=device).to(dtype)
    slots = torch.tensor([7, -1, 14, -1], device=device)
    latent_cache_write(strided(values), cache, slots)
    expected = before.clone()
    expected[2, 10:20] = values[0]
    expected[4, 20:30] = values[2]
    assert torch.equal(pool, expected)
    latent_cache_write(values[:0], cache, slots[:0])
    assert torch.equal(pool, expected)


def test_no_tokens(device):
    table = make_table("main", 16, 4, device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert latent_rope(torch.empty(0, 3, 40, device=device), empty, table).shape == (0, 3, 40)


def test_op_names_the_bad_argument(device):
    x, positions = torch.randn(2, 3, 40, device=device), torch.zeros(2, dtype=torch.int64)
    positions, table = positions.to(device), make_table("main", 16, 4, device)
    with pytest.raises(ArgumentError, match=r"x is \(40,\)"):
        latent_rope(x[0, 0], positions, table)
    with pytest.raises(ArgumentError, match=r"positions are \(1,\)"):
        latent_rope(x, positions[:1], table)
    with pytest.raises(ArgumentError, match=r"positions are \(2,\) torch.float32"):
        latent_rope(x, positions.float(), table)
    with pytest.raises(ArgumentError, match=r"table is \(4, 2, 8\) torch.float32 but x has 12"):
        latent_rope(x[..., :12], positions, table)
    with pytest.raises(ArgumentError, match=r"weight is \(39,\)"):
        latent_rope(x, positions, table, eps=1e-6, weight=torch.ones(39, device=device))
    with pytest.raises(ArgumentError, match="eps=None"):
        latent_rope(x, positions, table, weight=torch.ones(40, device=device))
    with pytest.raises(ArgumentError, match=r"slots \(2,\) torch.int32"):
        latent_cache_write(x[:, 0], x, positions.int())


@pytest.mark.gpu
def test_replay_equals_eager(device):
    x = torch.randn(5, 4, 40, device=device).bfloat16()
    positions = torch.arange(5, device=device)
    table = make_table("compress", 16, 8, device)
    cache = torch.zeros(3, 2, 40, device=device)

    def run():
        out = latent_rope(x, positions, table, eps=1e-6)
        latent_cache_write(out[:, 0], cache, torch.where(positions < 3, positions + 1, -1))
        return out

    assert torch.equal(captured(run), run())
