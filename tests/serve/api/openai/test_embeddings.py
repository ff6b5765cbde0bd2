"""`/v1/embeddings`: vectors of length 1 where the model's file says how to pool, else 400."""

import base64
import math
import struct

import numpy as np
import pytest

from tests.serve.fake_client import FakeClient, ask, fake_info
from tiercel.request.request import TokenUpdate

PATH = "/v1/embeddings"
ASK = {"model": "tiny", "input": "ab"}


class PoolingClient(FakeClient):
    """The vector of a prompt is (its last id, its length, 0)."""

    def submit(self, request):
        stream = super().submit(request)
        ids = request.prompt_token_ids
        stream.set_embedding(np.array([ids[-1], len(ids), 0], np.float32))
        return stream


def pooling(kind="mean"):
    client = PoolingClient(info=fake_info(pooling=kind, hidden_size=3))
    client.script = lambda request: [TokenUpdate((), (), "length", None)]
    return client


def post(body, client=None, **settings):
    return ask(("POST", PATH, {"json": {**ASK, **body}}), client=client, **settings)[0]


def unit(*numbers):
    return [number / math.hypot(*numbers) for number in numbers]


def test_a_chat_model_has_no_embeddings():
    client = FakeClient()
    response = post({}, client)
    assert (response.status_code, client.submitted) == (400, [])
    assert response.json()["error"]["code"] == "unsupported_model"


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_vectors_in_the_order_of_the_texts(kind):
    client = pooling(kind)
    whole = post({"input": ["ab", "c"]}, client).json()
    assert whole["object"] == "list"
    assert [entry["index"] for entry in whole["data"]] == [0, 1]
    assert whole["data"][0]["embedding"] == pytest.approx(unit(98, 3, 0))
    assert whole["data"][1]["embedding"] == pytest.approx(unit(99, 2, 0))
    assert whole["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert [(r.pooling, r.max_tokens) for r in client.submitted] == [(kind, 0)] * 2


def test_token_ids_are_taken_as_they_are():
    client = pooling()
    assert post({"input": [[97, 98], [99]]}, client).status_code == 200
    assert [r.prompt_token_ids for r in client.submitted] == [[97, 98], [99]]


def test_base64_holds_the_same_numbers():
    numbers = post({}, pooling()).json()["data"][0]["embedding"]
    text = post({"encoding_format": "base64"}, pooling()).json()["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(text)) == pytest.approx(numbers)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, None),  # a text gets its BOS, so it is not empty
        ({"input": [[]]}, "input"),
        ({"input": [97, "a"]}, "input"),
        ({"input": [272]}, "input"),
        ({"input": [97] * 257}, "input"),
        ({"input": ["a"] * 257}, "input"),
        ({"dimensions": 2}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 3}, None),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_name_the_field(fields, param):
    response = post(fields, pooling())
    if param is None:
        assert response.status_code == 200
    else:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
