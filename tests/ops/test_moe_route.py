"""The router of DeepSeek-V4: reference, oracle, ties and extremes."""

import pytest
import torch

from tests.dsv4_cases import captured, case, poison, strided
from tiercel.errors import ArgumentError
from tiercel.kernels.moe import moe_route as kernel
from tiercel.ops.moe_route import moe_route, moe_route_hash, route_refusal
from tiercel.ops.moe_route_torch import own_pairs
from tiercel.reference import moe_route as oracle

SHAPES = [(1, 5, 1), (11, 10, 3), (7, 256, 6), (33, 384, 6), (4, 7, 7)]  # tokens, experts, topk


def test_routes_match_the_reference(device):
    data = case("router", device)
    logits = data["x"] @ data["w"].t()
    ids, weights = moe_route(strided(logits), data["bias"], topk=3, scale=1.5)
    assert torch.equal(ids, data["ids"])
    torch.testing.assert_close(weights, data["weights"], rtol=0, atol=1e-5)
    # A table in which token 3 t + 1 has the experts of row t.
    table = torch.full((3 * 11 + 2, 3), 9, device=device)
    tokens = 3 * torch.arange(11, device=device) + 1
    table[tokens] = data["hash_ids"]
    ids, weights = moe_route_hash(logits, table, tokens.int(), scale=1.5)
    assert torch.equal(ids, data["hash_ids"])
    torch.testing.assert_close(weights, data["hash_weights"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), SHAPES)
def test_routes_match_oracle(num_tokens, num_experts, topk, device):
    logits = strided(3 * torch.randn(num_tokens, num_experts, device=device))
    bias = torch.randn(num_experts, device=device)
    poison(device)
    ids, weights = moe_route(logits, bias, topk=topk, scale=2.5)
    expected_ids, expected = oracle.learned(logits.cpu(), bias.cpu(), topk, 2.5)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.double().cpu(), expected, rtol=2e-6, atol=0)
    table = torch.stack([torch.randperm(num_experts)[:topk] for _ in range(50)]).to(device)
    tokens = torch.randint(0, 50, (num_tokens,), device=device)
    ids, weights = moe_route_hash(logits, table, tokens, scale=2.5)
    assert torch.equal(ids, table[tokens])
    expected = oracle.weights(oracle.scores(logits.cpu()), ids.cpu(), 2.5)
    torch.testing.assert_close(weights.double().cpu(), expected, rtol=2e-6, atol=0)


def test_ties_go_to_the_lower_expert(device):
    logits = torch.zeros(3, 200, device=device)
    logits[1, 150] = 1.0
    ids, _ = moe_route(logits, torch.zeros(200, device=device), topk=4, scale=1.0)
    assert ids.tolist() == [[0, 1, 2, 3], [150, 0, 1, 2], [0, 1, 2, 3]]


def test_the_bias_chooses_and_does_not_weigh(device):
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device)
    bias = torch.tensor([10.0, 0.0, 0.0, 0.0], device=device)
    ids, weights = moe_route(logits, bias, topk=2, scale=1.0)
    assert ids.tolist() == [[0, 3]]
    score = torch.nn.functional.softplus(logits[0, [0, 3]]).sqrt()
    torch.testing.assert_close(weights[0], score / score.sum())


def test_extremes_stay_finite(device):
    logits = torch.tensor([[-3e38, -60.0, -50.0], [100.0, 3e38, 0.0]], device=device)
    _, weights = moe_route(logits, torch.zeros(3, device=device), topk=2, scale=1.5)
    assert weights.isfinite().all()
    torch.testing.assert_close(
        weights.sum(1), torch.full((2,), 1.5, device=device), rtol=1e-2, atol=0
    )
    _, weights = moe_route(0 * logits - 3e38, torch.zeros(3, device=device), topk=2, scale=1.5)
    assert torch.equal(weights, torch.zeros(2, 2, device=device))  # scores of 0: no NaN
    logits[0, 1] = float("nan")
    _, weights = moe_route(logits, torch.zeros(3, device=device), topk=2, scale=1.5)
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


def test_no_tokens(device):
    ids, weights = moe_route(
        torch.empty(0, 9, device=device), torch.zeros(9, device=device), topk=2, scale=1.0
    )
    assert (ids.shape, weights.shape) == ((0, 2), (0, 2))


def test_op_names_the_bad_argument(device):
    logits, bias = torch.randn(2, 9, device=device), torch.zeros(9, device=device)
    table = torch.zeros(5, 2, dtype=torch.int64, device=device)
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ArgumentError, match=r"logits are \(9,\)"):
        moe_route(logits[0], bias, topk=2, scale=1.0)
    with pytest.raises(ArgumentError, match=r"bias is \(8,\)"):
        moe_route(logits, bias[:8], topk=2, scale=1.0)
    with pytest.raises(ArgumentError, match="topk=10 of 9 experts") as error:
        moe_route(logits, bias, topk=10, scale=1.0)
    assert error.value.hint == "Pass 1 to 9."
    with pytest.raises(ArgumentError, match=r"table is \(5, 2\) torch.int32"):
        moe_route_hash(logits, table.int(), tokens, scale=1.0)
    with pytest.raises(ArgumentError, match=r"token ids are \(1,\)"):
        moe_route_hash(logits, table, tokens[:1], scale=1.0)


def run_kernel(logits, bias, topk, scale):
    """Ids and weights of the kernel, in poisoned memory with a row of guard."""
    rows, device = logits.shape[0] + 1, logits.device
    ids = torch.full((rows, topk), -9, device=device)
    weights = torch.full((rows, topk), float("nan"), device=device)
    kernel.launch_moe_route(logits, bias, ids[:-1], weights[:-1], scale)
    assert (ids[-1] == -9).all()
    assert weights[-1].isnan().all()
    return ids[:-1], weights[:-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), SHAPES)
def test_kernels_match_oracle(num_tokens, num_experts, topk, dtype, device):
    logits = strided(3 * torch.randn(num_tokens, num_experts, device=device)).to(dtype)
    logits[0, 0] = -20.0  # log(1 + e) would lose its digits
    bias = torch.randn(num_experts, device=device)
    ids, weights = run_kernel(logits, bias, topk, 2.5)
    expected_ids, expected = oracle.learned(logits.cpu(), bias.cpu(), topk, 2.5)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.double().cpu(), expected, rtol=5e-6, atol=0)
    one = run_kernel(logits[-1:], bias, topk, 2.5)
    assert torch.equal(one[0][0], ids[-1])
    assert torch.equal(one[1][0], weights[-1])
    table = torch.stack([torch.randperm(num_experts)[:topk] for _ in range(50)]).to(device)
    for integer in (torch.int32, torch.int64):
        tokens = torch.randint(0, 50, (num_tokens,), device=device, dtype=integer)
        ids.fill_(-1)
        kernel.launch_moe_route_hash(logits, table, tokens, ids, weights, 2.5)
        assert torch.equal(ids, table[tokens])
    expected = oracle.weights(oracle.scores(logits.cpu()), ids.cpu(), 2.5)
    torch.testing.assert_close(weights.double().cpu(), expected, rtol=5e-6, atol=0)


@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), SHAPES[1:])
def test_kernels_leave_out_experts_of_other_ranks(num_tokens, num_experts, topk, device):
    logits = 3 * torch.randn(num_tokens, num_experts, device=device)
    bias = torch.randn(num_experts, device=device)
    table = torch.stack([torch.randperm(num_experts)[:topk] for _ in range(50)]).to(device)
    tokens = torch.randint(0, 50, (num_tokens,), device=device)
    every = run_kernel(logits, bias, topk, 2.5)
    by_hash = [torch.empty_like(tensor) for tensor in every]
    kernel.launch_moe_route_hash(logits, table, tokens, *by_hash, 2.5)
    for own in (range(num_experts // 2), range(num_experts // 2, num_experts), range(1, 2)):
        found = [torch.empty_like(tensor) for tensor in every]
        kernel.launch_moe_route(logits, bias, *found, 2.5, own)
        assert all(map(torch.equal, found, own_pairs(*every, own)))
        kernel.launch_moe_route_hash(logits, table, tokens, *found, 2.5, own)
        assert all(map(torch.equal, found, own_pairs(*by_hash, own)))


def test_kernel_ties_and_extremes(device):
    logits = torch.zeros(5, 200, device=device)
    logits[1, 150] = 1.0
    logits[2], logits[2, 7] = -3e38, 3e38
    logits[3, 60] = float("nan")
    logits[4] = -3e38
    ids, weights = run_kernel(logits, torch.zeros(200, device=device), 4, 1.0)
    expected = [[0, 1, 2, 3], [150, 0, 1, 2], [7, 0, 1, 2], [60, 0, 1, 2], [0, 1, 2, 3]]
    assert ids.tolist() == expected
    assert weights[3].isnan().all()
    assert weights[[0, 1, 2, 4]].isfinite().all()
    assert torch.equal(weights[4], torch.zeros(4, device=device))
    bias = -torch.arange(200.0, device=device)
    bias[9] = -0.5
    ids, _ = run_kernel(logits[:1], bias, 4, 1.0)  # negative keys keep their order
    assert ids.tolist() == [[0, 9, 1, 2]]
    run_kernel(logits[:0], bias, 4, 1.0)


def test_refusals_name_the_reason(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    logits = torch.empty(3, 256).as_subclass(OnGpu)
    assert route_refusal(torch.empty(3, 256), 6) == "the logits are not on a GPU"
    assert route_refusal(logits, 6) == ""
    assert route_refusal(logits, 65) == "more than 64 experts are chosen"
    assert route_refusal(logits.double(), 6) == "the logits are float64"
    assert "registers" in route_refusal(torch.empty(1, 4096).as_subclass(OnGpu), 6)
    monkeypatch.setenv("TIERCEL_ROUTE_KERNEL", "0")
    assert route_refusal(logits, 6) == "TIERCEL_ROUTE_KERNEL=0"


@pytest.mark.gpu
def test_replay_equals_eager(device):
    logits, bias = torch.randn(5, 256, device=device), torch.randn(256, device=device)

    def run():
        ids, weights = moe_route(logits, bias, topk=6, scale=1.5)
        return ids + weights

    assert torch.equal(captured(run), run())


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [256, 384])
def test_kernel_matches_pytorch(num_experts, device, monkeypatch):
    logits = 3 * torch.randn(4096, num_experts, device=device)
    bias = torch.randn(num_experts, device=device)
    ids, weights = moe_route(logits, bias, topk=6, scale=1.5)
    monkeypatch.setenv("TIERCEL_ROUTE_KERNEL", "0")
    expected_ids, expected = moe_route(logits, bias, topk=6, scale=1.5)
    is_equal = (ids == expected_ids).all(1)
    assert is_equal.float().mean() > 0.999  # others are ties but for rounding
    torch.testing.assert_close(weights[is_equal], expected[is_equal], rtol=1e-5, atol=0)
