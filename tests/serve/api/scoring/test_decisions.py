"""`/v1/decisions`: what goes in and out, every refusal, and answers that are the model's own."""

import itertools
import json
import math

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tests.serve.fake_client import FakeClient, ask, fake_info, fake_tokenizer
from tests.tiny_llm import open_tiny
from tiercel.request.score_task import make_trie
from tiercel.serve.api.scoring.decision_input import answer_labels, input_messages, question_text
from tiercel.serve.api.scoring.decision_types import (
    Choice,
    ChoiceQuestion,
    DecisionItem,
    DecisionPart,
    Level,
    PredicateQuestion,
    ScoreQuestion,
)
from tiercel.serve.api.scoring.decisions import make_answer

PATH = "/v1/decisions"
WIDE = fake_info(max_model_len=2048, max_num_batched_tokens=2048)  # a byte is a token here
SPAM = {"type": "predicate", "instructions": "Is it spam?", "name": "spam"}
TOPIC = {
    "type": "choice", "instructions": "What is it about?",
    "choices": [{"value": "billing"}, {"value": "bug", "description": "a defect"}, {"value": True}],
}  # fmt: skip
ANGER = {"type": "score", "instructions": "How angry?", "name": "anger",
         "levels": [{"label": "calm"}, {"label": "cross"}, {"label": "furious"}]}  # fmt: skip
ASK = {"model": "tiny", "input": "My invoice is wrong.", "questions": [SPAM, TOPIC, ANGER]}


def post(body, client=None, path=PATH):
    return ask(("POST", path, {"json": {**ASK, **body}}), client=client or FakeClient(info=WIDE))[0]


def text_of(ids):
    return fake_tokenizer().decode(list(ids), skip_special_tokens=False)


def test_an_answer_has_the_published_shape():
    client = FakeClient(info=WIDE)
    answer = post({}, client).json()
    spam, topic, anger = answer["answers"]
    assert list(answer) == ["model", "answers", "usage"]
    assert (spam["type"], spam["name"], set(spam)) == (
        "predicate", "spam", {"type", "name", "probability"},
    )  # fmt: skip
    assert topic["name"] is None
    assert [p["value"] for p in topic["probabilities"]] == ["billing", "bug", True]
    assert topic["choice"] == "billing"  # the fake engine prefers low ids
    assert [(p["value"], p["label"]) for p in anger["probabilities"]] == [
        (0, "calm"), (1, "cross"), (2, "furious"),
    ]  # fmt: skip
    shares = [p["probability"] for p in anger["probabilities"]]
    assert sum(shares) == pytest.approx(1)
    assert anger["score"] == pytest.approx(shares[1] + 2 * shares[2])
    (request,) = client.submitted
    paths = len(make_trie([fake_tokenizer().encode_inner(x) for x in ("Yes", "No")]).paths)
    own = [request.score.items[0], *request.score.items[paths:]]
    tokens = len(request.prompt_token_ids) + sum(map(len, own)) - 2  # y and e of Yes
    assert answer["usage"] == {
        "input_tokens": tokens,
        "input_tokens_details": {
            "cached_tokens": 0, "cache_write_tokens": len(request.prompt_token_ids) // 16 * 16,
        },
        "output_tokens": 0, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }  # fmt: skip
    masses = post({"debug": True}).json()["label_mass"]
    assert len(masses) == 3
    assert all(mass > 0 for mass in masses)


def test_all_questions_share_one_request_and_the_input():
    client = FakeClient(info=WIDE)
    post({"questions": [TOPIC] * 7}, client)
    (request,) = client.submitted
    assert len(request.score.items) == 7
    assert text_of(request.prompt_token_ids).endswith("[user] My invoice is wrong.\n\n")
    asked = text_of(request.score.items[0])
    assert asked.startswith("What is it about?\n\nA. billing\nB. bug: a defect\nC. true\n\n")
    assert asked.endswith("Answer with the letter of one option only.\n[assistant] ")


def test_control_tokens_of_clients_stay_text():
    name = "<|im_end|>"
    client = FakeClient(info=WIDE)
    option = {"value": name, "description": name}
    question = {**TOPIC, "instructions": name, "choices": [option, {"value": "b"}]}
    post({"input": name, "questions": [question]}, client)
    (request,) = client.submitted
    tokenizer = fake_tokenizer()
    ids = [*request.prompt_token_ids, *request.score.items[0]]
    assert {i for i in ids if tokenizer.is_special(i)} <= {tokenizer.bos_id}
    assert text_of(ids).count(name) == 4


def test_conversations_and_calls_are_written_out_in_turns():
    items = [
        DecisionItem(role="system", content="Be strict."),
        DecisionItem(role="user", content=[
            DecisionPart(type="input_text", text="Look:"),
            DecisionPart(type="input_json", data={"b": [1, None, "é"], "a": {}}),
        ]),
        DecisionItem(type="function_call", call_id="1", name="find", arguments='{"x": 1}'),
        DecisionItem(type="custom_tool_call", call_id="2", name="run", input="ls -l"),
        DecisionItem(type="function_call_output", call_id="1", output="found"),
        DecisionItem(type="custom_tool_call_output", call_id="2", output=[
            DecisionPart(type="input_text", text="two"),
        ]),
        DecisionItem(role="assistant", content=[
            DecisionPart(type="output_text", text="Done."),
            DecisionPart(type="refusal", refusal="No more."),
        ]),
    ]  # fmt: skip
    assert input_messages(items) == [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": 'Look:\n{"b":[1,null,"é"],"a":{}}'},
        {"role": "assistant", "content": 'Called find with: {"x": 1}\n\nCalled run with: ls -l'},
        {"role": "user", "content": "Result of find: found\n\nResult of run: two"},
        {"role": "assistant", "content": "Done.\nNo more."},
    ]
    client = FakeClient(info=WIDE)
    messages = [{"role": "developer", "content": "d"}, {"role": "assistant", "content": "a"}]
    post({"input": messages}, client)
    (request,) = client.submitted
    text = text_of(request.prompt_token_ids)
    assert "[system] d\n[assistant] a\n[user] " in text


def part(**fields):
    return [{"role": "user", "content": [fields]}]


def nested(levels, *innermost):
    return [*innermost] if levels == 1 else [nested(levels - 1, *innermost)]


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"questions": []}, "questions", "1 to 400"),
        ({"questions": [SPAM] * 401}, "questions", "holds 401"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"content": "a"}]}, "input[0].role", "must be given"),
        ({"input": [{"role": "user"}]}, "input[0].content", "string or a list"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", ""),
        ({"input": [{"type": "reasoning"}]}, "input[0].type", "'reasoning'"),
        ({"input": [OUTPUT]}, "input[0].call_id", "earlier function_call"),
        ({"input": [CALL, CALL]}, "input[1].call_id", "occurs twice"),
        ({"input": [CALL, {**OUTPUT, "type": "custom_tool_call_output"}]}, "input[1].call_id",
         "earlier custom_tool_call"),
        ({"input": [{**CALL, "name": None}]}, "input[0]", "call_id, name and arguments"),
        ({"input": [{**CALL, "type": "custom_tool_call"}]}, "input[0]", "name and input"),
        ({"input": part(type="input_image", image_url="http://x")}, "input[0].content[0].type",
         "takes no images"),
        ({"input": part(type="output_text", text="x")}, "input[0].content[0].type", "input_text"),
        ({"input": part(type="input_text")}, "input[0].content[0].text", "must be a string"),
        ({"input": part(type="input_json")}, "input[0].content[0].data", "must be given"),
        ({"input": part(type="input_json", data=nested(33))}, "input[0].content[0].data",
         "deeper than 32"),
        ({"input": part(type="input_json", data=[1] * 10_000)}, "input[0].content[0].data",
         "more than 10000 values"),
        ({"input": part(type="input_json", data="a" * 262_143)}, "input[0].content[0].data",
         "262145 bytes"),
        ({"questions": [{"type": "guess", "instructions": "x"}]}, "questions[0].type", ""),
        ({"questions": [{**SPAM, "instructions": " "}]}, "questions[0].instructions", "empty"),
        ({"questions": [{**TOPIC, "choices": TOPIC["choices"][:1]}]}, "questions[0].choices", ""),
        ({"questions": [{**TOPIC, "choices": [{"value": str(i)} for i in range(256)]}]},
         "questions[0].choices", ""),
        ({"questions": [{**TOPIC, "choices": [{"value": "a"}, {"value": "a"}]}]},
         "questions[0].choices[1].value", "occurs twice"),
        ({"questions": [{**TOPIC, "choices": [{"value": 3}, {"value": "a"}]}]},
         "questions[0].choices[0].value", ""),
        ({"questions": [{**ANGER, "levels": [{"label": "a"}]}]}, "questions[0].levels", ""),
        ({"input": "a" * 2100}, "input", "holds 2048 tokens"),
        ({"input": "a" * 200_000}, "input", "characters"),
        ({"questions": [SPAM, {**SPAM, "instructions": "a" * 2040}]}, "questions[1]",
         "holds 2048 tokens"),
        ({"model": "other"}, None, "does not exist"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_refusals_name_the_field(fields, param, words):
    client = FakeClient(info=WIDE)
    response = post(fields, client)
    assert response.status_code == (404 if "model" in fields else 400)
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert client.submitted == []


def test_what_lies_at_the_limits_is_taken():
    wide = FakeClient(info=fake_info(max_model_len=300_000, num_blocks=40_000))
    for data in (nested(32), nested(32, 1)):
        assert post({"input": part(type="input_json", data=data)}, wide).status_code == 200
    assert post({"input": part(type="input_json", data=[1] * 9_999)}, wide).status_code == 200
    assert post({"input": part(type="input_json", data="a" * 262_142)}, wide).status_code == 200
    both = {**TOPIC, "choices": [{"value": "true"}, {"value": True}]}
    assert post({"questions": [both] * 400}, wide).status_code == 200
    extra = {
        "safety_identifier": "u",
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "30m"},
    }
    assert post(extra, wide, path="/decisions").status_code == 200


@pytest.mark.parametrize("count", [2, 26, 27, 255])
def test_many_options_have_labels_of_two_letters(count):
    choices = [Choice(value=f"v{i}") for i in range(count)]
    question = ChoiceQuestion(instructions="x", choices=choices)
    labels = answer_labels(question)
    assert len(set(labels)) == count
    assert {len(label) for label in labels} == {1 if count <= 26 else 2}
    text = question_text(question, "q")
    assert f"\n{labels[-1]}. v{count - 1}\n" in text
    assert ("letters" in text) == (count > 26)
    client = FakeClient(info=fake_info(max_model_len=8192, max_num_batched_tokens=8192))
    asked = {
        "type": "choice",
        "instructions": "x",
        "choices": [{"value": f"v{i}"} for i in range(count)],
    }
    (answer,) = post({"questions": [asked, SPAM][:1]}, client).json()["answers"]
    shares = [p["probability"] for p in answer["probabilities"]]
    assert sum(shares) == pytest.approx(1)
    assert len(shares) == count


def test_probabilities_and_confidence():
    values = np.log([0.2, 0.6, 0.2]) - 3.0  # among other tokens; shares are among the labels
    choice = make_answer(
        ChoiceQuestion(instructions="x", choices=[Choice(value=v) for v in "abc"]), values
    )
    assert choice.choice == "b"
    assert choice.confidence == pytest.approx((0.6 - 1 / 3) / (2 / 3))
    score = make_answer(
        ScoreQuestion(instructions="x", levels=[Level(label=v) for v in "abc"]), values
    )
    assert score.score == pytest.approx(1.0)
    assert score.confidence == pytest.approx(1 - math.sqrt(0.4))
    ends = make_answer(
        ScoreQuestion(instructions="x", levels=[Level(label=v) for v in "ab"]), np.zeros(2)
    )
    assert ends.confidence == pytest.approx(0.0)
    sure = make_answer(PredicateQuestion(instructions="x"), np.array([-1.0, -800.0]))
    assert sure.probability == 1.0


def test_a_question_longer_than_a_step_has_a_prompt_of_its_own():
    client = FakeClient(info=fake_info(max_model_len=2048, max_num_batched_tokens=256))
    long = {**SPAM, "instructions": "a" * 300}
    answer = post({"questions": [long, TOPIC]}, client).json()
    assert len(client.submitted) > 1
    assert client.submitted[0].score.items  # the short one is packed
    assert [x["type"] for x in answer["answers"]] == ["predicate", "choice"]


def test_a_real_server_answers_as_the_model_does(server, tiny):
    """Through the published client; each question as a prompt of its own gives the same."""
    many = [{"value": f"v{i}"} for i in range(30)]
    questions = [SPAM, TOPIC, ANGER, {**TOPIC, "choices": many, "name": "many"}]
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    decision = client.decisions.create(model="tiny", input=ASK["input"], questions=questions)
    assert [answer.type for answer in decision.answers] == [
        "predicate",
        "choice",
        "score",
        "choice",
    ]
    assert [answer.name for answer in decision.answers] == ["spam", None, "anger", "many"]
    assert len(decision.answers[3].probabilities) == 30
    assert decision.usage.output_tokens == 0
    again = client.decisions.create(model="tiny", input=ASK["input"], questions=questions)
    cached = again.usage.input_tokens_details.cached_tokens
    assert cached == decision.usage.input_tokens_details.cache_write_tokens
    for first, second in itertools.pairwise([decision, again]):
        assert first.answers[0].probability == pytest.approx(
            second.answers[0].probability, abs=0.05
        )
    alone = [
        client.decisions.create(model="tiny", input=ASK["input"], questions=[question])
        for question in questions
    ]
    for one, whole in zip(alone, decision.answers, strict=True):
        expected = json.loads(one.answers[0].model_dump_json())
        told = json.loads(whole.model_dump_json())
        for name in ("probability", "score", "confidence"):
            if expected.get(name) is not None:
                assert told[name] == pytest.approx(expected[name], abs=0.05)
    with httpx.Client(base_url=server.url, timeout=30) as http:
        assert http.post(PATH, json={**ASK, "model": "tiny", "questions": []}).status_code == 400


def test_probabilities_are_the_models_own(server, tiny):
    """From logits after the very text that was asked."""
    with httpx.Client(base_url=server.url, timeout=30) as http:
        props = http.post(
            "/apply-template", json={"messages": [{"role": "user", "content": "MARK"}]}
        )
        body = {**ASK, "model": "tiny", "questions": [TOPIC]}
        (answer,) = http.post(PATH, json=body).json()["answers"]
    asked = f"{ASK['input']}\n\nWhat is it about?\n\nA. billing\nB. bug: a defect\nC. true\n\n"
    text = props.json()["prompt"].replace(
        "MARK", f"{asked}Answer with the letter of one option only."
    )
    with open_tiny(tiny, dtype="auto") as llm:
        ids = llm.tokenizer.with_bos(llm.encode(text, parse_special=True))
        logits = llm.logits(ids)[-1].astype(np.float64)
        labels = [llm.tokenizer.encode_inner(x) for x in "ABC"]
        assert all(len(label) == 1 for label in labels)
        own = np.array([logits[label[0]] for label in labels])
    expected = np.exp(own - own.max())
    expected /= expected.sum()
    told = [p["probability"] for p in answer["probabilities"]]
    assert told == pytest.approx(expected.tolist(), abs=0.05)
