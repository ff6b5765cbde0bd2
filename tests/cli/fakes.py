"""A model that answers immediately: the commands' own behaviour, without weights."""

from typing import ClassVar

from tiercel.errors import ContextLengthError
from tiercel.request.output import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from tiercel.request.request import TokenLogprobs


class FakeLLM:
    """Answers every prompt with its words in upper case, one token a word.

    The class attributes are for one test each: `calls` records the calls, `fail_after` ends an
    answer with an error, `on_token` is called before each token, `prompt_steps` are the arguments
    of the calls of `progress`.
    """

    calls: ClassVar[list] = []
    fail_after = None
    on_token = None
    prompt_steps: ClassVar[tuple] = ()

    def __init__(self, model=None, **options):
        self.calls.append(("load", model, options))
        self.source = model

    def close(self):
        self.calls.append(("close",))

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(f"<{token_id}>" for token_id in ids)

    def stream(self, prompt, params=None, *, parse_special=True, progress=None):
        self.calls.append(("stream", prompt, params, parse_special))
        return self._pieces(prompt, progress)

    def stream_chat(self, messages, params=None, *, progress=None):
        self.calls.append(("stream_chat", messages, params))
        if sum(len(message["content"]) for message in messages) > 1000:
            raise ContextLengthError("prompt has 1001 tokens.", hint="Shorten the prompt.")
        return self._pieces(messages[-1]["content"], progress)

    def generate(self, prompts, params=None, *, parse_special=True, progress=None):
        self.calls.append(("generate", prompts, params, parse_special))
        self._report(progress)
        return [self._whole(prompt, params) for prompt in prompts]

    def chat(self, messages, params=None, *, progress=None):
        self.calls.append(("chat", messages, params))
        self._report(progress)
        return self._whole(messages[-1]["content"], params)

    def _report(self, progress):
        for step in self.prompt_steps:
            progress(*step)

    def _pieces(self, text, progress):
        self._report(progress)
        try:
            for index, word in enumerate(text.upper().split()):
                if self.on_token is not None:
                    type(self).on_token(index)
                is_error = index == self.fail_after
                yield StreamDelta(
                    index=0,
                    text="" if is_error else f" {word}",
                    token_ids=[index],
                    logprobs=None,
                    finish_reason="error" if is_error else None,
                    stop_reason="nonfinite_logits" if is_error else None,
                )
        finally:
            self.calls.append(("stream ended",))

    def _whole(self, text, params):
        words = text.upper().split()
        places = [TokenLogprobs(i, -0.5, ((i, -0.5), (99, -2.0))) for i in range(len(words))]
        is_error = self.fail_after is not None
        outputs = [
            CompletionOutput(
                index=index,
                text=" " + " ".join(words),
                token_ids=list(range(len(words))),
                cumulative_logprob=None,
                logprobs=places if params.logprobs is not None else None,
                finish_reason="error" if is_error else "stop",
                stop_reason="nonfinite_logits" if is_error else None,
            )
            for index in range(params.n)
        ]
        return RequestOutput(
            request_id="r",
            prompt=text,
            prompt_token_ids=[7] * len(words),
            prompt_logprobs=None,
            outputs=outputs,
            finished=True,
            metrics=RequestMetrics(0.0, 0.0, len(words), len(words), num_cached_tokens=0),
        )
