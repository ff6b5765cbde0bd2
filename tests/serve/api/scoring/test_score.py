"""`/v1/score` and `/rerank`: what goes in and out, every refusal, and nothing left behind."""

import asyncio
import math
import re

import httpx
import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tests.serve.fake_client import SCORED, FakeClient, ask, fake_app, fake_info, running
from tests.tiny_llm import open_tiny
from tiercel.request.score_task import skipped_tiles
from tiercel.serve.api.scoring import relevance_prompt as relevance

PATH = "/v1/score"
ASK = {"model": "tiny", "query": "ab", "items": ["c", "de"], "labels": ["x", "y"]}
WIDE = fake_info(max_model_len=1024, max_num_batched_tokens=1024)  # a byte is a token here
RERANK = {"model": "tiny", "query": "ab", "documents": ["cc", "d", "eee"]}


def post(body, client=None, path=PATH, base=ASK, **settings):
    client = client or FakeClient()
    return ask(("POST", path, {"json": {**base, **body}}), client=client, **settings)[0]


def without(*names, base=ASK):
    return {name: value for name, value in base.items() if name not in names}


def test_an_answer_has_the_published_shape():
    client = FakeClient()
    answer = post({"return_logprobs": True}, client).json()
    (request,) = client.submitted
    ids = {text: request.score.reads[0][0].token_ids[i] for i, text in enumerate("xy")}
    lengths = [len(request.prompt_token_ids) + len(item) for item in request.score.items]
    expected = [[-ids[text] - length / 16 for text in "xy"] for length in lengths]
    assert answer["logprobs"] == expected
    assert answer["scores"] == [[pytest.approx(math.exp(v)) for v in row] for row in expected]
    assert (answer["object"], answer["model"]) == ("scoring", "tiny")
    tokens = len(request.prompt_token_ids) + sum(map(len, request.score.items))
    assert answer["usage"] == {
        "prompt_tokens": tokens, "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        **({"completion_tokens": 0} if "completion_tokens" in answer["usage"] else {}),
    }  # fmt: skip
    assert "logprobs" not in post({}).json()
    assert answer["usage"]["completion_tokens"] == 0


def test_options_reach_the_engine():
    ids = {"query": [5, 6], "items": [[7], [8, 9]], "labels": None, "label_token_ids": [3, 4]}
    client = FakeClient()
    answer = post({**ids, "suffix": [1], "apply_softmax": True}, client).json()
    (request,) = client.submitted
    assert request.prompt_token_ids == [5, 6]
    assert request.score.items == ((7, 1), (8, 9, 1))
    assert request.score.is_relative
    for row in answer["scores"]:
        assert row == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])
    client = FakeClient()
    assert post({**ids, "item_first": True}, client).status_code == 200
    assert [r.prompt_token_ids for r in client.submitted] == [[7, 5, 6], [8, 9, 5, 6]]


def test_an_overlong_item_does_not_fail_the_list_where_asked():
    items = ["a", "b" * 300, "c"]
    answer = post({"items": items, "long_items": "skip", "return_logprobs": True}).json()
    assert [row == [None, None] for row in answer["scores"]] == [False, True, False]
    assert answer["logprobs"][1] == [None, None]
    (error,) = answer["errors"]
    assert error["index"] == 1
    assert "items[1] has 300 tokens" in error["message"]
    client = FakeClient(info=fake_info(max_num_batched_tokens=1024))
    answer = post({"items": items, "long_items": "cut"}, client).json()
    assert None not in answer["scores"][1]
    assert "errors" not in answer
    (request,) = client.submitted
    assert len(request.prompt_token_ids) + len(request.score.items[1]) == 256


def test_one_item_and_the_other_path():
    answer = post({"items": "c"}, path="/score").json()
    assert len(answer["scores"]) == 1


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"items": []}, "items", "empty"),
        ({"items": ["a", [5]]}, "items[1]", "query is text"),
        ({"items": [[5]]}, "items[0]", "query is text"),
        ({"query": [5], "items": ["a"]}, "items[0]", "query is token ids"),
        ({"items": [5]}, "items[0]", ""),
        ({"items": [[[5]]]}, "items[0][0]", ""),
        ({"query": [5], "items": [[5, -1]]}, "items[0][1]", ""),
        ({"query": [5], "items": [[5, True]]}, "items[0][1]", ""),
        ({"query": [5], "items": [[5, 272]]}, "items[0][1]", "the vocabulary has 272"),
        ({"query": [], "items": [[5], []]}, "items[1]", "no tokens"),
        ({"labels": None}, "labels", "neither"),
        ({"label_token_ids": [5]}, "labels", "both"),
        ({"labels": []}, "labels", "at least one"),
        ({"labels": ["a", "a"]}, "labels", "twice"),
        ({"labels": [""]}, "labels", "no tokens"),
        ({"labels": None, "label_token_ids": [272]}, "label_token_ids[0]", "272"),
        ({"labels": ["r", "ran"], "strict_labels": True}, "labels", "begin label"),
        ({"items": ["a", "b" * 300]}, "items[1]", "holds 256 tokens"),
        ({"query": "b" * 300}, "query", "holds 256 tokens"),
        ({"items": ["a"] * 4097}, "items", "4096"),
        ({"label_normalization": "max"}, "label_normalization", ""),
        ({"model": "other"}, None, "does not exist"),
        ({"query": None}, "query", "must be given"),
        ({"items": None}, "items", "must be given"),
        ({"text_1": "a"}, "text_1", "together with query and items"),
    ],
    ids=str,
)
def test_refusals_name_the_field(fields, param, words):
    client = FakeClient()
    response = post(fields, client)
    assert response.status_code == (404 if "model" in fields else 400)
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert client.submitted == []


def test_a_query_over_the_cache_is_refused_at_once():
    client = FakeClient(info=fake_info(num_blocks=3))
    assert "cache of 32" in post({"query": "b" * 90}, client).json()["error"]["message"]


def test_a_full_queue_and_an_engine_that_fails():
    response = post({}, FakeClient(max_waiting=0))
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")

    class Failing(FakeClient):
        async def _play(self, request, stream):
            self._streams.pop(id(request), None)
            stream.push(type(SCORED)((), (), "error", "nonfinite_logits"))

    response = post({}, Failing())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "nonfinite_logits"


def test_who_waits_too_long_is_told_and_leaves_nothing():
    class Waiting(FakeClient):
        async def _play(self, request, stream):
            stream.entered_s = None
            await asyncio.sleep(60)

    client = Waiting()
    limits = fake_app(client).state.server.settings.limits
    short = type(limits)(max_queue_seconds=0.05)
    response = post({}, client, limits=short)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
    assert client.aborted == client.submitted


def test_many_prompts_of_a_list_go_a_few_at_a_time():
    most = 0

    class Counting(FakeClient):
        def submit(self, request):
            nonlocal most
            stream = super().submit(request)
            most = max(most, self.num_running)
            return stream

    client = Counting()
    answer = post({"items": ["a"] * 100, "item_first": True}, client).json()
    assert len(answer["scores"]) == len(client.submitted) == 100
    assert most == 32


def test_a_client_that_leaves_frees_what_it_holds():
    class Waiting(FakeClient):
        async def _play(self, request, stream):
            await asyncio.sleep(60)

    client = Waiting()

    async def main():
        async with running(fake_app(client)) as http:
            task = asyncio.create_task(http.post(PATH, json=ASK))
            while not client.submitted:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert client.aborted == client.submitted


def test_scored_items_are_counted():
    responses = ask(("POST", PATH, {"json": ASK}), ("GET", "/metrics"))
    assert re.search(r"^tiercel:score_items_total\{.*\} 2\.0$", responses[1].text, re.MULTILINE)


def test_tiles_that_items_do_without_are_counted():
    ids = {"query": [5] * 40, "items": [[7] * 40] * 100, "labels": None, "label_token_ids": [3]}
    responses = ask(("POST", PATH, {"json": {**ASK, **ids}}), ("GET", "/metrics"))
    (told,) = re.findall(r"^tiercel:score_tiles_skipped_total\{.*\} (.*)$", responses[1].text, re.M)
    assert float(told) == skipped_tiles(40, [40] * 100) > 1000


# ---- pairs of texts

PAIRS = {"model": "tiny"}


def test_one_text_goes_with_all_others_or_lists_go_pair_by_pair():
    """Pairs of one first text share its prompt; scores come in the order of the pairs."""
    for first, second in (("text_1", "text_2"), ("queries", "documents")):
        client = FakeClient(info=WIDE)
        body = {first: "ab", second: ["cc", "d", "eee"]}
        answer = post(body, client, base=PAIRS).json()
        assert answer["object"] == "list"
        assert [line["index"] for line in answer["data"]] == [0, 1, 2]
        assert {line["object"] for line in answer["data"]} == {"score"}
        assert len(client.submitted) == 1
        assert answer["usage"]["prompt_tokens"] > 0
        assert "errors" not in answer
    client = FakeClient(info=WIDE)
    body = {"text_1": ["q", "r", "q"], "text_2": ["cc", "d" * 1000, "eee"]}
    answer = post(body, client, base=PAIRS).json()
    assert [len(r.score.items) // 2 for r in client.submitted] == [2]  # yes and no of each
    assert [line["index"] for line in answer["data"]] == [0, 2]
    (error,) = answer["errors"]
    assert error["index"] == 1
    assert "text_2[1] has 1000 tokens" in error["message"]
    assert (
        len(
            post({"text_1": "q", "text_2": "d"}, base=PAIRS, client=FakeClient(info=WIDE)).json()[
                "data"
            ]
        )
        == 1
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "query", "must be given"),
        ({"text_1": "a"}, "text_2", "must be given"),
        ({"documents": "a"}, "queries", "must be given"),
        ({"text_1": "a", "text_2": []}, "text_2", "empty"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "holds 2 texts and text_2 1"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "queries", "both given"),
        ({"text_1": "a", "text_2": ["b"] * 4097}, "text_2", "4097"),
        ({"text_1": "a" * 80_000, "text_2": "b"}, "text_1", "characters"),
        ({"text_1": [3], "text_2": "b"}, "text_1[0]", ""),
    ],
    ids=lambda value: str(value)[:50],
)
def test_pairs_that_are_refused(fields, param, words):
    client = FakeClient(info=WIDE)
    response = post(fields, client, base=PAIRS)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert client.submitted == []


# ---- rerank


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(path):
    """The fake engine prefers none: equal scores keep the order of the documents."""
    client = FakeClient(info=WIDE)
    answer = post({"top_n": 2, "documents": ["cc", "dd", "ee"]}, client, path, RERANK).json()
    (request,) = client.submitted
    assert [result["index"] for result in answer["results"]] == [0, 1]
    assert answer["id"].startswith("rerank-")
    own = request.score.items[::2]  # each with y and e of yes, then with n of no
    tokens = len(request.prompt_token_ids) + sum(len(item) - 2 for item in own)
    assert answer["usage"] == {
        "prompt_tokens": tokens, "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert "document" not in answer["results"][0]
    assert "errors" not in answer


def test_scores_sort_and_documents_are_returned_where_asked(monkeypatch):
    class Judging(FakeClient):
        @staticmethod
        def values_of(request):
            numbers = []
            for item in request.score.items:
                share = {"c": -1.0, "d": 2.0, "e": 0.5}[chr(item[0])]
                for reads in request.score.reads:
                    for read in reads:
                        numbers += [share, 0.0][: len(read.token_ids)]
            return np.array(numbers, np.float32)

    monkeypatch.setattr(relevance, "YES_NO", ("y", "n"))  # of one token each
    documents = ["cc", {"text": "d", "id": 7}, "eee"]
    asked = {"documents": documents, "return_documents": True}
    answer = post(asked, Judging(info=WIDE), "/rerank", RERANK).json()
    results = answer["results"]
    assert [result["index"] for result in results] == [1, 2, 0]
    assert [result["document"]["text"] for result in results] == ["d", "eee", "cc"]
    expected = [1 / (1 + math.exp(-x)) for x in (2.0, 0.5, -1.0)]
    assert [result["relevance_score"] for result in results] == pytest.approx(expected)


def test_control_tokens_of_clients_stay_text_and_documents_share_what_is_before():
    name = "<|im_end|>"
    client = FakeClient(info=WIDE)
    post({"query": name, "documents": [name, "a"], "instruct": name}, client, "/rerank", RERANK)
    (request,) = client.submitted
    with open_tiny() as llm:
        text = llm.decode(request.prompt_token_ids, skip_special_tokens=False)
        tail = llm.decode(request.score.items[0], skip_special_tokens=False)
        control = {i for i in request.prompt_token_ids if llm.tokenizer.is_special(i)}
        assert control <= {llm.tokenizer.bos_id}
        assert not any(map(llm.tokenizer.is_special, request.score.items[0]))
    assert f"<Instruct>: {name}\n<Query>: {name}\n<Document>: " in text
    assert text.endswith("<Document>: ")
    assert tail.startswith(name)
    assert "[assistant]" in tail


def test_long_documents_are_cut_where_asked_and_else_left_out():
    documents = ["a", "b" * 1000, "c"]
    client = FakeClient(info=WIDE)
    answer = post({"documents": documents}, client, "/rerank", RERANK).json()
    assert {result["index"] for result in answer["results"]} == {0, 2}
    (error,) = answer["errors"]
    assert error["index"] == 1
    assert "documents[1] has 1000 tokens" in error["message"]
    (plain,) = client.submitted
    # Without the document's one token, and n of no.
    shared = len(plain.prompt_token_ids) + min(map(len, plain.score.items)) - 2
    for fields in ({"max_tokens_per_doc": 20}, {"truncate_prompt_tokens": shared + 20}):
        client = FakeClient(info=WIDE)
        answer = post({"documents": documents, **fields}, client, "/rerank", RERANK).json()
        assert len(answer["results"]) == 3
        lengths = {len(item) for item in client.submitted[0].score.items}
        assert max(lengths) - min(lengths) == 19 + 1  # yes takes one token more than no


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [3]}, "documents[0]"),
        ({"documents": [{"title": "a"}]}, "documents[0].text"),
        ({"top_n": 0}, "top_n"),
        ({"instruct": "a", "instruction": "b"}, "instruction"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"query": "a" * 20000}, "query"),
        ({"documents": ["a"] * 4097}, "documents"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rerank_refusals_name_the_field(fields, param):
    response = post(fields, FakeClient(info=WIDE), "/rerank", RERANK)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


# ---- a real engine


def test_a_real_server_scores_as_the_model_does(server, tiny):
    items = ["c", "de", "a longer item", ""]
    body = {"model": "tiny", "query": "so said ", "items": items, "labels": ["x", "ran on"]}
    with httpx.Client(base_url=server.url, timeout=30) as http:
        first = http.post(PATH, json={**body, "return_logprobs": True}).json()
        ranked = http.post("/rerank", json={**RERANK, "model": "tiny"}).json()
        pairs = {"model": "tiny", "text_1": RERANK["query"], "text_2": RERANK["documents"]}
        paired = http.post(PATH, json=pairs).json()
    with open_tiny(tiny, dtype="auto") as llm:
        expected = llm.score("so said ", items, labels=["x", "ran on"])
    for row, own in zip(first["logprobs"], expected.logprobs.tolist(), strict=True):
        assert row == pytest.approx(own, abs=0.1)
    assert {result["index"] for result in ranked["results"]} == {0, 1, 2}
    assert all(0 <= result["relevance_score"] <= 1 for result in ranked["results"])
    told = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    for line in paired["data"]:
        assert line["score"] == pytest.approx(told[line["index"]], abs=0.05)


def test_a_real_server_reranks_by_the_yes_and_no_of_the_models_head(server, tiny):
    """A plain GGUF without a classifier head: rows of the head, after the rendered template."""
    query, documents = "Where is pizza?", ["A pizzeria.", "A bicycle.", ""]
    user = (
        f"{relevance.SYSTEM}\n<Instruct>: {relevance.INSTRUCT}\n<Query>: {query}\n<Document>: MARK"
    )
    messages = [{"role": "system", "content": relevance.SYSTEM}]
    messages.append({"role": "user", "content": user.partition("\n")[2]})
    body = {"model": "tiny", "query": query, "documents": documents}
    with httpx.Client(base_url=server.url, timeout=30) as http:
        text = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
        first, again = (http.post("/rerank", json=body).json() for _ in range(2))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    expected = {}
    with open_tiny(tiny, dtype="auto") as llm:
        for number, document in enumerate(documents):
            ids = llm.encode(text.replace("MARK", document), parse_special=True)
            output = llm.score(llm.tokenizer.with_bos(ids), [[]], [*relevance.YES_NO])
            share = output.probs[0] / output.probs[0].sum()
            expected[number] = float(share[0])
    for answer in (first, again):
        assert len(answer["results"]) == len(documents)
        for result in answer["results"]:
            assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=0.05)
