"""lm-eval through `/v1/completions`: loglikelihood and generation on a small file of our own."""

import json
import shutil

import httpx
import pytest

from tests.clients.conftest import HERE

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def samples(run_client, server, tmp_path_factory):
    """What it logged of each document, by task."""
    folder = tmp_path_factory.mktemp("tasks")
    for path in (HERE / "tasks").iterdir():
        # The paths in a task are relative to the working folder of the process.
        text = path.read_text().replace("test: capitals", f"test: {folder}/capitals")
        (folder / path.name).write_text(text)
    options = (
        "model=tiny",
        f"base_url={server.url}/v1/completions",
        "tokenizer_backend=remote",
        "num_concurrent=2",
        "max_length=2048",
    )
    run_client(
        "-m", "lm_eval", "run",
        "--model", "local-completions",
        "--model_args", ",".join(options),
        "--tasks", "tiercel_scoring,tiercel_generation",
        "--include_path", folder,
        "--batch_size", "2",
        "--log_samples",
        "--output_path", folder / "out",
    )  # fmt: skip
    found = {}
    for path in (folder / "out").rglob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").partition("_2")[0]
        found[task] = [json.loads(line) for line in path.read_text().splitlines()]
    shutil.rmtree(folder)
    return found


def encode(server, text):
    body = {"prompt": text, "add_special_tokens": False}
    return httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]


def score(server, context, continuation):
    """The sum of the continuation's log-probabilities, asked for in another way."""
    start = len(encode(server, context))
    ids = encode(server, context + continuation)
    body = {"model": "tiny", "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    return sum(answer["choices"][0]["logprobs"]["token_logprobs"][start:])


def test_loglikelihood(samples, server):
    scoring = samples["tiercel_scoring"]
    assert len(scoring) == 5
    assert sum(sample["acc"] for sample in scoring) >= 4
    for sample in scoring:
        for choice, (response,) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            value, is_greedy = response
            expected = score(server, sample["doc"]["question"], f" {choice}")
            assert float(value) == pytest.approx(expected, abs=2e-2)  # another batch, bfloat16
            assert str(is_greedy) in ("True", "False")


def test_generation(samples, server):
    generated = samples["tiercel_generation"]
    assert len(generated) == 5
    for sample in generated:
        body = {"model": "tiny", "prompt": sample["doc"]["question"], "max_tokens": 8,
                "temperature": 0, "stop": ["."]}  # fmt: skip
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert sample["resps"][0][0] == answer["choices"][0]["text"]
