"""The completions of a call: which prompt each belongs to, its counts and its times."""

import itertools
import random

import numpy as np
import pytest

from tiercel.errors import InternalError
from tiercel.params import SamplingParams
from tiercel.request.completions import Completion, collect_outputs, unit_vectors
from tiercel.request.request import Request, TokenLogprobs
from tiercel.request.text_stream import TextStream


class Bytes:
    """Ids are bytes."""

    strips_leading_space = False
    vocab_size = 256

    def token_bytes(self, token_id, *, with_special=False):
        return bytes([token_id])


def make_completion(index, stream, params, prompt, output):
    request = Request(f"{index}-{stream}", prompt, params, 0, stream, frozenset(), 9)
    completion = Completion(request, TextStream(request, Bytes()), index)
    request.num_cached = 10 * index + stream
    request.prompt_logprobs += [TokenLogprobs(i, -0.5, ()) for i in prompt[1:]]
    for token_id in output:
        request.output_token_ids.append(token_id)
        request.logprobs.append(TokenLogprobs(token_id, -token_id / 64, ()))
        completion.text.push((token_id,))
    request.finish_reason, request.stop_reason = "length", f"why {stream}"
    return completion


def test_results_hold_the_answers_of_their_own_prompt():
    draw = random.Random(3)
    texts = ["a", None, "b"]
    prompts = [[1, 2, 3], [4], [5, 6]]
    counts = [3, 1, 2]
    completions, times = [], {}
    for index, stream in ((i, s) for i, n in enumerate(counts) for s in range(n)):
        params = SamplingParams(n=counts[index], logprobs=1 if index == 0 else None,
                                prompt_logprobs=0 if index == 2 else None)  # fmt: skip
        output = [draw.randrange(97, 123) for _ in range(1 + 2 * index + stream)]
        completion = make_completion(index, stream, params, prompts[index], output)
        seconds = sorted(draw.sample(range(1, 99), 4))
        for second, has_tokens in zip(seconds, (False, True, True, False), strict=True):
            completion.note_time(float(second), has_tokens=has_tokens)
        times[index, stream] = (seconds[1], seconds[3])
        completions.append(completion)
    draw.shuffle(completions)
    completions.sort(key=lambda completion: completion.request.stream)
    results = collect_outputs(texts, completions)
    for index, result in enumerate(results):
        own = [a.request for a in completions if a.prompt_index == index]
        assert (result.prompt, result.prompt_token_ids) == (texts[index], prompts[index])
        assert (result.request_id, result.finished) == (own[0].request_id, True)
        assert [output.index for output in result.outputs] == list(range(counts[index]))
        for request, output in zip(own, result.outputs, strict=True):
            assert output.token_ids == request.output_token_ids
            assert output.text == bytes(output.token_ids).decode()
            assert (output.finish_reason, output.stop_reason) == ("length", request.stop_reason)
            if index == 0:
                assert output.logprobs == request.logprobs
                total = -sum(output.token_ids) / 64
                assert output.cumulative_logprob == pytest.approx(total)
            else:
                assert output.logprobs is output.cumulative_logprob is None
        metrics = result.metrics
        mine = [times[index, stream] for stream in range(counts[index])]
        assert metrics.first_token_s == min(first for first, _ in mine)
        assert metrics.finished_s == max(last for _, last in mine)
        assert metrics.num_prompt_tokens == len(prompts[index])
        assert metrics.num_output_tokens == sum(len(r.output_token_ids) for r in own)
        assert metrics.num_cached_tokens == own[0].num_cached
    assert results[0].prompt_logprobs is None
    assert results[2].prompt_logprobs[0] is None
    assert [e.token_id for e in results[2].prompt_logprobs[1:]] == [6]


def test_an_answer_without_tokens_has_no_first_one():
    completion = make_completion(0, 0, SamplingParams(prompt_logprobs=0), [1, 2], [])
    completion.note_time(4.0, has_tokens=False)
    completion.request.finish_reason = "error"
    (result,) = collect_outputs([None], [completion])
    assert (result.metrics.first_token_s, result.metrics.finished_s) == (None, 4.0)
    assert result.prompt_logprobs is None, "an error says nothing of the prompt"


@pytest.mark.parametrize("asked", [None, 0, 2])
def test_a_piece_holds_the_entries_of_its_own_tokens(asked):
    params = SamplingParams(logprobs=asked)
    completion = make_completion(0, 3, params, [1], list(b"abcdef"))
    for size in range(7):
        new = tuple(completion.request.output_token_ids[6 - size :])
        delta = completion.delta("piece", new)
        assert (delta.index, delta.text, delta.token_ids) == (3, "piece", list(new))
        if asked is None or not new:
            assert delta.logprobs is None
        else:
            assert [e.token_id for e in delta.logprobs] == list(new)
        assert (delta.finish_reason, delta.stop_reason) == ("length", "why 3")


def test_vectors_have_length_one_and_keep_their_order():
    requests, expected = [], []
    for count, scale in itertools.product((1, 2), (1e-6, 1.0, 1e6)):
        vector = scale * np.random.default_rng(count).standard_normal(5).astype("<f4")
        request = Request("", [1], SamplingParams(), 0, 0, frozenset(), 0)
        request.embedding = vector.astype(np.float32)
        requests.append(request)
        expected.append(vector.astype(np.float64) / np.linalg.norm(vector.astype(np.float64)))
    requests[2].embedding = np.zeros(5, np.float32)
    expected[2] = np.zeros(5)
    vectors = unit_vectors(requests, 5)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-6)  # two roundings of float32
    requests[1].finish_reason, requests[1].stop_reason = "error", "nonfinite_logits"
    with pytest.raises(InternalError, match="nonfinite_logits"):
        unit_vectors(requests, 5)
