"""The adapter with the four published arguments: the public cases, and refused arguments."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tiercel.errors import ArgumentError
from tiercel.ops.multi_item_attention import multi_item_attention
from tiercel.reference.prefill_attention import make_mask

FILE = Path(__file__).parents[1] / "data/multi_item_cases.npz"
BLOCK = 16
# Relative, of whole results: sums of up to 200 float32 products; one rounding of 16-bit weights
# and of the result.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2**-8 + 2**-9}


def read_cases():
    with np.load(FILE) as file:
        arrays = dict(file)
    cases = json.loads(arrays.pop("meta").tobytes())
    for case in cases:
        prefix = f"{case['name']}/"
        case["arrays"] = {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}
    return {case["name"]: case for case in cases}


CASES = read_cases()


def arguments(case, dtype, device):
    """The adapter's arguments: the prefix in shuffled pages, items in this step's rows alone."""
    arrays = {k: torch.from_numpy(v) for k, v in case["arrays"].items()}
    q, k, v = (arrays[name].to(device, dtype) for name in "qkv")
    length, new, prefix = len(k), len(q), case["prefix_len"]
    count = -(-max(1, prefix) // BLOCK)
    blocks = 1 + torch.randperm(count + 2)[:count]
    pages = []
    for rows in (k, v):
        cache = torch.full((count + 3, BLOCK, *k.shape[1:]), 1000.0, device=device, dtype=dtype)
        places = torch.arange(prefix)
        cache.flatten(0, 1)[blocks[places // BLOCK] * BLOCK + places % BLOCK] = rows[:prefix]
        pages.append(cache)
    stride = len(arrays["token_pos_in_items"])
    return {
        "q": q,
        "k_cache": pages[0],
        "v_cache": pages[1],
        "block_tables": blocks.int().unsqueeze(0).to(device),
        "query_lens": [new],
        "context_lens": [length],
        "scale": case["scale"],
        "prefix_len_ptr": arrays["prefix_len"],
        "token_pos_in_items_ptr": arrays["token_pos_in_items"],
        "token_pos_in_items_len": stride,
        "max_item_len_ptr": arrays["max_item_len"],
        "k_new": k[length - new :],
        "v_new": v[length - new :],
        "window": case["window"],
    }


@pytest.mark.parametrize("name", CASES)
def test_sums_of_the_public_cases(name, device):
    case = CASES[name]
    given = arguments(case, torch.float32, device)
    lse = torch.full(given["q"].shape[:2], float("nan"), device=device)
    multi_item_attention(**given, lse=lse)
    expected = torch.from_numpy(case["arrays"]["lse"])
    torch.testing.assert_close(lse.cpu(), expected, rtol=0, atol=2e-5)


def test_a_delimiter_influences_no_token(device):
    """Whatever token it is: other queries, keys and values change no bit of an item."""
    case = CASES["worked_example"]
    changed = arguments(case, torch.float32, device)
    before = multi_item_attention(**changed)
    places = changed["token_pos_in_items_ptr"].to(torch.int64)
    first = case["prefix_len"] - (changed["context_lens"][0] - changed["query_lens"][0])
    rows = first + (places == 0).nonzero()[:, 0]
    for name in ("q", "k_new", "v_new"):
        changed[name] = changed[name].clone()
        changed[name][rows] = 100.0
    after = multi_item_attention(**changed)
    others = torch.ones(len(before), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(before[others], after[others])


def relative_error(out, case):
    expected = torch.from_numpy(case["arrays"]["out"]).double().flatten(1)
    return ((out.double().cpu() - expected).norm() / expected.norm()).item()


def test_the_cases_have_all_layouts():
    assert len(CASES) == 12
    assert {case["delimiters"] for case in CASES.values()} == {True, False}
    assert all(case["softcap"] == 0 for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_public_cases(name, device):
    case = CASES[name]
    for dtype in TOLERANCE if device.type == "cuda" else [torch.float32]:
        out = multi_item_attention(**arguments(case, dtype, device))
        assert relative_error(out, case) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CASES)
def test_masks_of_the_public_cases(name):
    """The oracle's rule, with item starts from the positions, is the published mask."""
    case = CASES[name]
    arrays = case["arrays"]
    queries, keys = arrays["mask_shape"].tolist()
    bits = np.unpackbits(arrays["mask_bits"], axis=1)[:, :keys].astype(bool)
    prefix = case["prefix_len"]
    own = arrays["token_pos_in_items"][: keys - prefix].astype(np.int64)
    start = np.concatenate((np.zeros(prefix), np.arange(prefix, keys) - own + 1))
    start = torch.from_numpy(start[keys - queries :])
    mask = make_mask(queries, keys, prefix, start, case["window"])
    assert np.array_equal(mask.numpy(), bits)


@pytest.mark.parametrize("name", ["worked_example", "partly_cached_prefix", "logical_window"])
def test_a_plain_causal_mask_is_seen(name, device):
    """Negative control: one long item instead of several fails by far."""
    case = CASES[name]
    changed = arguments(case, torch.float32, device)
    count = sum(case["item_lens"]) + len(case["item_lens"]) + 1
    stride = changed["token_pos_in_items_len"]
    places = torch.arange(1, stride + 1).to(torch.uint16)
    changed |= {
        "token_pos_in_items_ptr": places,
        "max_item_len_ptr": torch.tensor([max(count, stride)]).to(torch.uint16),
    }
    out = multi_item_attention(**changed)
    assert relative_error(out, case) > 0.05


def test_requests_of_two_strides_share_a_call(device):
    """Rows of the published argument are padded; the padding is not read."""
    first = CASES["worked_example"]
    one = arguments(first, torch.float32, device)
    stride = one["token_pos_in_items_len"] + 5
    row = torch.full((stride,), 60000).to(torch.uint16)
    row[: stride - 5] = one["token_pos_in_items_ptr"]
    both = {
        name: torch.cat((one[name], one[name]))
        for name in ("q", "block_tables", "prefix_len_ptr", "max_item_len_ptr", "k_new", "v_new")
    }
    both |= {name: one[name] * 2 for name in ("query_lens", "context_lens")}
    both |= {"token_pos_in_items_ptr": torch.cat((row, row)), "token_pos_in_items_len": stride}
    out = multi_item_attention(**(one | both))
    assert torch.equal(*out.chunk(2))
    assert relative_error(out[: len(out) // 2], first) < TOLERANCE[torch.float32]


def unsigned(*values, dtype=torch.uint16):
    return torch.tensor(values).to(dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_len_ptr": torch.tensor([5])}, r"prefix_len_ptr is torch.int64 \(1,\)"),
        ({"max_item_len_ptr": unsigned(4, 4)}, r"max_item_len_ptr is torch.uint16 \(2,\)"),
        ({"token_pos_in_items_len": 12}, r"token_pos_in_items_ptr is torch.uint16 \(13,\)"),
        ({"max_item_len_ptr": unsigned(3)}, "request 0 is 4 at 11, max_item_len 3"),
        ({"prefix_len_ptr": unsigned(19, dtype=torch.uint32)}, "prefix of 19 and a length of 18"),
        ({"prefix_len_ptr": unsigned(4, dtype=torch.uint32)}, "token_pos_in_items_len=13"),
        ({"places": {0: 2}}, "request 0 is 2 at 0"),
        ({"places": {2: 3}}, "request 0 is 3 at 2"),
    ],
    ids=str,
)
def test_the_bad_argument_is_named(changes, message, device):
    case = arguments(CASES["worked_example"], torch.float32, device)
    changes = dict(changes)
    places = case["token_pos_in_items_ptr"].to(torch.int64)
    for index, value in changes.pop("places", {}).items():
        places[index] = value
    case["token_pos_in_items_ptr"] = places.to(torch.uint16)
    with pytest.raises(ArgumentError, match=message):
        multi_item_attention(**(case | changes))
