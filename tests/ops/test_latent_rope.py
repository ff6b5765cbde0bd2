"""Head norm, rotation and tables of DeepSeek-V4: reference, oracle, properties, cache write."""

import pytest
import torch

from tests.dsv4_cases import captured, case, poison, strided
from tiercel.errors import ArgumentError
from tiercel.kernels.fused import latent_rope as kernel
from tiercel.models.config import RopeConfig
from tiercel.models.rope import inverse_frequencies, rope_table
from tiercel.ops import latent_rope_torch as torch_ops
from tiercel.ops.block_quantize import (
    decode_kv_entries,
    encode_index_keys,
    encode_kv_entries,
    hadamard,
)
from tiercel.ops.latent_rope import (
    index_key_write,
    latent_cache_write,
    latent_rope,
    latent_write,
    rope_refusal,
)
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


# Triton's interpreter cuts bfloat16 off where a GPU rounds: a whole unit instead of half of one.
UNIT = 2**-8 if torch.cuda.is_available() else 2**-7
KERNEL = {torch.float32: 3e-6, torch.bfloat16: UNIT + 1e-5, torch.float16: 2**-11 + 1e-5}
# Eps, weight, inverse, heads, d, rotary, dtype: rows in one program and in several.
KERNEL_CASES = [
    (None, False, False, 1, 16, 16, torch.float32),
    (1e-6, True, False, 3, 40, 16, torch.bfloat16),
    (1e-6, False, False, 9, 512, 64, torch.bfloat16),
    (None, False, True, 6, 96, 32, torch.float16),
    (1e-6, True, True, 5, 96, 32, torch.float32),
]


@pytest.mark.parametrize("parts", KERNEL_CASES, ids=str)
def test_kernel_matches_oracle(parts, device):
    eps, has_weight, inverse, num_heads, d, rotary, dtype = parts
    x = strided(torch.randn(5, num_heads, d, device=device).to(dtype))
    x[-1, 0] *= 1e-3  # so small that eps decides
    weight = torch.randn(d, device=device) if has_weight else None
    positions = torch.randint(0, 300, (5,), device=device, dtype=torch.int32)
    table = make_table("compress", rotary, 300, device)
    out = torch.full((6, num_heads, d), float("nan"), dtype=dtype, device=device)
    kernel.launch_latent_rope(x, positions, table, out[:-1], eps, weight, inverse, False)
    assert out[-1].isnan().all()
    cpu_weight = weight.cpu() if has_weight else None
    angles = oracle_angles("compress", rotary)
    expected = oracle.latent_rope(x.cpu(), positions.cpu(), angles, eps, cpu_weight, inverse)
    tolerance = KERNEL[dtype]
    torch.testing.assert_close(
        out[:-1].double().cpu(), expected, rtol=tolerance, atol=4 * tolerance
    )
    one = torch.empty_like(out[:1])
    kernel.launch_latent_rope(x[3:4], positions[3:4], table, one, eps, weight, inverse, False)
    assert torch.equal(one[0], out[3])


def test_queries_pass_the_hadamard_rotation(device):
    x = torch.randn(3, 5, 128, device=device).bfloat16()
    positions, table = torch.arange(3, device=device), make_table("compress", 64, 8, device)
    out = torch.empty(3, 5, 128, device=device)
    kernel.launch_latent_rope(x, positions, table, out, None, None, False, True)
    expected = hadamard(latent_rope(x, positions, table, out_dtype=torch.float32))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    options = {"has_hadamard": True, "out_dtype": torch.float32}
    torch.testing.assert_close(
        latent_rope(x, positions, table, **options), expected, rtol=1e-5, atol=1e-5
    )


def make_planes(device, *sizes):
    """Planes of three blocks of 5 entries in one pool, with gaps, and a copy of the pool."""
    pool = torch.randint(0, 256, (3, 5 * (sum(sizes) + 3)), device=device).to(torch.uint8)
    planes, start = [], 0
    for size in sizes:
        part = pool[:, start : start + 5 * size]
        planes.append(part.unflatten(1, (5, size)))
        start += 5 * size
    return planes, pool


def hard_rows(num_rows, width, device):
    """Values of all sizes: zeros, ties, groups below the least scale, halves of codes."""
    x = torch.randn(num_rows, width, device=device)
    x[0] = 0.0
    x[1] *= 1e-7
    x[2, ::2] = torch.arange(-width // 4, width // 4, device=device) / 16
    x[3, :64] = 448 * 2.0**-3
    x[4] = torch.exp2(torch.arange(width, device=device) % 40 - 20.0)
    return x


SLOTS = (7, -1, 14, 3, 9, 4, 12, -1)


@pytest.mark.parametrize(("d", "rotary"), [(512, 64), (96, 32)])
def test_vectors_are_written_with_the_bytes_of_the_codec(d, rotary, device):
    x, slots = hard_rows(8, d, device), torch.tensor(SLOTS, device=device)
    scales = -(-(d - rotary) // 512) * 8
    planes, pool = make_planes(device, d + rotary, scales)
    before = pool.clone()
    kernel.launch_latent_write(x, None, None, tuple(planes), slots, rotary, False)
    found = pool.clone()
    pool.copy_(before)
    encoded = encode_kv_entries(x, rotary)
    torch_ops.write_rows(encoded[:, : d + rotary], planes[0], slots)
    torch_ops.write_rows(encoded[:, d + rotary :], planes[1], slots)
    assert torch.equal(found, pool)
    # Norm and rotation in the same pass: the bytes of the rotated values.
    positions, table = torch.arange(8, device=device), make_table("main", rotary, 9, device)
    weight = torch.randn(d, device=device)
    turned = torch.empty(8, 1, d, device=device)
    norm = (1e-6, weight)
    kernel.launch_latent_rope(x[:, None], positions, table, turned, *norm, False, False)
    kernel.launch_latent_write(turned[:, 0], None, None, tuple(planes), slots, rotary, False)
    found = pool.clone()
    pool.copy_(before)
    kernel.launch_latent_write(x, (positions, table), norm, tuple(planes), slots, rotary, False)
    assert torch.equal(found, pool)


def test_a_vector_with_nan_stays_nan(device):
    x = torch.randn(1, 96, device=device)
    x[0, 5] = float("nan")
    planes, _ = make_planes(device, 128, 8)
    slots = torch.tensor([6], device=device)
    kernel.launch_latent_write(x, None, None, tuple(planes), slots, 32, False)
    out = decode_kv_entries(planes[0][1, 1].clone(), 32, planes[1][1, 1])
    assert out[:64].isnan().all()
    assert out[64:].isfinite().all()


@pytest.mark.parametrize("n", [128, 32])
def test_index_keys_are_written_with_the_bytes_of_the_codec(n, device):
    x, slots = hard_rows(8, max(n, 64), device)[:, :n], torch.tensor(SLOTS, device=device)
    planes, pool = make_planes(device, n // 2, n // 32)
    before = pool.clone()
    kernel.launch_latent_write(x, None, None, tuple(planes), slots, 0, True)
    found = pool.clone()
    pool.copy_(before)
    index_key_write(x, tuple(planes), slots)
    torch_ops.write_rows(encode_index_keys(hadamard(x))[:, : n // 2], planes[0], slots)
    assert torch.equal(found, pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_vectors_are_written(dtype, device):
    x, slots = torch.randn(8, 40, device=device), torch.tensor(SLOTS, device=device)
    positions, table = torch.arange(8, device=device), make_table("main", 16, 9, device)
    norm = (1e-6, torch.randn(40, device=device))
    caches = [torch.zeros(3, 5, 40, device=device, dtype=dtype) for _ in range(2)]
    rope = (positions, table)
    kernel.launch_latent_write(x, rope, norm, (caches[0], None), slots, 16, False)
    latent_write(x, (caches[1], None), slots, rotary_dim=16, rotation=rope, norm=norm)
    tolerance = KERNEL[dtype]
    torch.testing.assert_close(*caches, rtol=tolerance, atol=tolerance)
    kernel.launch_latent_write(x[:0], rope, norm, (caches[0], None), slots[:0], 16, False)


def test_the_write_is_rope_and_codec(device):
    x, slots = torch.randn(8, 96, device=device), torch.tensor(SLOTS, device=device)
    rope = (torch.arange(8, device=device), make_table("main", 32, 9, device))
    planes, _ = make_planes(device, 128, 8)
    norm = (1e-6, None)
    latent_write(x, tuple(planes), slots, rotary_dim=32, rotation=rope, norm=norm)
    encoded = encode_kv_entries(latent_rope(x, *rope, eps=1e-6), 32)
    assert torch.equal(planes[0][2, 4], encoded[2, :128])
    assert torch.equal(planes[1][2, 4], encoded[2, 128:])
    with pytest.raises(ArgumentError, match=r"latent_write: the cache is \(3, 5, 128\), slots"):
        latent_write(x, tuple(planes), slots[:3], rotary_dim=32)


def test_refusals_name_the_reason(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    x = torch.empty(3, 4, 40).as_subclass(OnGpu)
    assert rope_refusal(torch.empty(3, 40)) == "the vectors are not on a GPU"
    assert rope_refusal(x) == ""
    assert rope_refusal(x.double()) == "the vectors are not floats of up to 32 bits"
    assert rope_refusal(x[..., :39]) == "the channels are odd"
    assert "next to each other" in rope_refusal(x, torch.empty(4, 4).t())
    assert "registers" in rope_refusal(torch.empty(1, 4096).as_subclass(OnGpu))
    monkeypatch.setenv("TIERCEL_ROPE_KERNEL", "0")
    assert rope_refusal(x) == "TIERCEL_ROPE_KERNEL=0"


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


@pytest.mark.gpu
def test_written_entries_match_pytorch(device, monkeypatch):
    x = torch.randn(300, 512, device=device).bfloat16()
    rope = (torch.arange(300, device=device), make_table("compress", 64, 300, device))
    slots = 1 + torch.randperm(300, device=device)
    norm = (1e-6, torch.randn(512, device=device))

    def run():
        planes = tuple(torch.zeros(4, 128, n, device=device).byte() for n in (576, 8))
        latent_write(x, planes, slots, rotary_dim=64, rotation=rope, norm=norm)
        keys = tuple(torch.zeros(4, 128, n, device=device).byte() for n in (64, 4))
        index_key_write(x[:, :128].float(), keys, slots)
        return *planes, *keys

    found = run()
    monkeypatch.setenv("TIERCEL_ROPE_KERNEL", "0")
    for one, other in zip(found, run(), strict=True):
        # Sums of the norm in another order move a value over a border, but seldom.
        assert (one != other).float().mean() < 1e-3
