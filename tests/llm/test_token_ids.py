"""A folder without `tokenizer.json` takes token ids, and refuses text by one clear line."""

import json
import random

import numpy as np
import pytest

from tests.cli.harness import error_line
from tests.hf_models import logits_of, make_model, own_tensors, sample_config, write_folder
from tests.serve.harness import NAME, start_server
from tiercel.errors import InvalidRequestError, ModelFormatError
from tiercel.ipc.tokenizer_wire import pack_tokenizer, unpack_tokenizer
from tiercel.llm import LLM
from tiercel.models.source import open_source
from tiercel.params import SamplingParams, StructuredOutputs

IDS = [5, 80, 4, 200, 17]
REASON = "m has no tokenizer.json, so it takes token ids alone: pass prompt_token_ids."
GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder without tokenizer, and the model of transformers that it holds."""
    values = sample_config(random.Random(3), "qwen3").values | {"eos_token_id": None}
    model = make_model(values)
    folder = tmp_path_factory.mktemp("ids") / "m"
    folder.mkdir()
    write_folder(folder, values, own_tensors(model))
    (folder / "tokenizer.json").unlink()
    return folder, model


@pytest.fixture(scope="module")
def llm(world):
    with LLM(world[0], device="cpu", dtype="float32") as loaded:
        yield loaded


def test_logits_are_those_of_transformers(llm, world):
    found, expected = llm.logits(IDS), logits_of(world[1], IDS)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def test_tokens_come_back_without_text(llm):
    output = llm.generate({"prompt_token_ids": IDS}, GREEDY)[0]
    answer = output.outputs[0]
    logits = llm.logits([*IDS, *answer.token_ids])
    assert answer.token_ids == logits.argmax(axis=1)[len(IDS) - 1 : -1].tolist()
    assert (answer.text, answer.finish_reason, output.prompt) == ("", "length", None)
    deltas = list(llm.stream({"prompt_token_ids": IDS}, GREEDY))
    assert [i for delta in deltas for i in delta.token_ids] == answer.token_ids
    assert {delta.text for delta in deltas} == {""}
    shown = SamplingParams(max_tokens=6, temperature=0, skip_special_tokens=False)
    assert llm.generate({"prompt_token_ids": IDS}, shown)[0].outputs[0].text == ""


def test_every_row_of_the_vocabulary_may_be_sampled(llm):
    for token_id in (0, llm.source.config.vocab_size - 1):
        params = SamplingParams(max_tokens=1, allowed_token_ids=[token_id])
        assert llm.generate({"prompt_token_ids": IDS}, params)[0].outputs[0].token_ids == [token_id]


def test_items_given_as_ids_are_scored(llm):
    scores = llm.score(IDS, [[1, 2], [3]], label_token_ids=[7, 8]).logprobs
    last = llm.logits([*IDS, 1, 2])[-1]
    logprobs = last - np.log(np.exp(last - last.max()).sum()) - last.max()
    assert np.allclose(scores[0], logprobs[[7, 8]], atol=1e-4)


def test_what_needs_text_is_refused(llm):
    ids = {"prompt_token_ids": IDS}
    form = StructuredOutputs(regex="a+")
    messages = [{"role": "user", "content": "Hi"}]
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.generate([ids, "text"]),
        lambda: llm.generate(ids, SamplingParams(stop=["x"])),
        lambda: llm.generate(ids, SamplingParams(bad_words=["x"])),
        lambda: llm.generate(ids, SamplingParams(structured_outputs=form)),
        lambda: llm.chat(messages),
        lambda: llm.encode("text"),
        lambda: llm.decode(IDS),
        lambda: llm.score("text", ["a"], ["b"]),
        lambda: llm.score(IDS, [[1]], ["b"]),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert str(caught.value) == REASON
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids  # it goes on


def write(folder, name, change):
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | change))


@pytest.fixture
def own_folder(world, tmp_path):
    """A copy of the folder that a test may change."""
    folder = tmp_path / "m"
    folder.mkdir()
    for path in world[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_end_ids_come_from_both_configs(own_folder, llm):
    output = llm.generate({"prompt_token_ids": IDS}, GREEDY)[0].outputs[0]
    end = output.token_ids[2]
    cut = output.token_ids[: output.token_ids.index(end) + 1]
    write(own_folder, "config.json", {"eos_token_id": 9, "bos_token_id": 3, "pad_token_id": None})
    write(own_folder, "generation_config.json", {"eos_token_id": [end, 9]})
    source = open_source(own_folder)
    for tokenizer in (source.tokenizer(), unpack_tokenizer(pack_tokenizer(source))):
        assert tokenizer.stop_ids == tuple(sorted({end, 9}))
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (3, 9, None)
        assert tokenizer.vocab_size == source.config.vocab_size
        assert not tokenizer.unused_ids
        assert not tokenizer.control_tokens
    with LLM(own_folder, device="cpu", dtype="float32") as ended:
        answer = ended.generate({"prompt_token_ids": IDS}, GREEDY)[0].outputs[0]
    assert (answer.token_ids, answer.finish_reason) == (cut, "stop")


@pytest.mark.parametrize("wrong", [-1, 10**6, "</s>", [3, True], 1.5])
def test_end_ids_are_ids(own_folder, wrong):
    write(own_folder, "generation_config.json", {"eos_token_id": wrong})
    with pytest.raises(ModelFormatError, match=r"m/generation_config\.json: eos_token_id is "):
        LLM(own_folder, device="cpu", dtype="float32")


def test_commands_say_so_before_they_load_weights(world, here):
    for command in (("generate", "--model", world[0], "text"), ("chat", world[0])):
        assert error_line(here(*command)) == f"error: {REASON}"
    shown = here("inspect", world[0], "--tokenizer").stdout
    assert "token ids alone (no tokenizer.json)" in shown


def test_a_server_completes_ids(world, llm, tmp_path):
    expected = llm.generate({"prompt_token_ids": IDS}, GREEDY)[0].outputs[0].token_ids
    log_path = tmp_path / "server.log"
    options = ("--device", "cpu", "--dtype", "float32")
    with start_server(world[0], *options, log_path=log_path, is_probed=False) as server:
        body = {"model": NAME, "prompt": IDS, "max_tokens": 6, "temperature": 0}
        answer = server.post("/v1/completions", {**body, "return_token_ids": True}).json()
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["choices"][0]["text"] == ""
        echoed = server.post("/v1/completions", {**body, "echo": True, "logprobs": 1}).json()
        names = echoed["choices"][0]["logprobs"]["tokens"]
        assert names == [f"token_id:{i}" for i in (*IDS, *expected)]
        scored = {"query": IDS, "items": [[1], [2]], "label_token_ids": [7]}
        assert server.post("/v1/score", {"model": NAME, **scored}).status_code == 200
        messages = [{"role": "user", "content": "Hi"}]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
        for path, fields in (
            ("/v1/completions", {**body, "prompt": "text"}),
            ("/v1/completions", {**body, "stop": "x"}),
            ("/v1/completions", {**body, "bad_words": ["x"]}),
            ("/v1/completions", {**body, "response_format": schema}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/chat/completions", {"messages": messages, "tools": [tool]}),
            ("/v1/messages", {"messages": messages, "max_tokens": 2}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/score", {"query": "Hi", "items": ["a"], "labels": ["x"]}),
            ("/v1/decisions", {"input": "Hi", "questions": [
                {"type": "predicate", "instructions": "Is it so?"}]}),
            ("/tokenize", {"prompt": "text"}),
            ("/tokenize", {"messages": messages}),
            ("/detokenize", {"tokens": IDS}),
        ):  # fmt: skip
            refused = server.post(path, {"model": NAME, **fields})
            assert refused.status_code == 400, (path, refused.text)
            assert REASON in refused.json()["error"]["message"], (path, refused.text)
        assert server.get("/tokenizer_info").json()["vocab_size"] == llm.tokenizer.vocab_size
        again = server.post("/v1/completions", {**body, "return_token_ids": True}).json()
        assert again["choices"][0]["token_ids"] == expected
        assert "Traceback" not in server.log
