"""The text of one completion as its tokens arrive: detokenised, and cut at a stop string.

    token ids -> decode -> text -> until_stop -> text that may be shown

The Python API calls `push` and `text`. The HTTP server splits the text between the two steps into
reasoning and content (`serve/generation/output_parser.py`), so it calls the steps themselves.
"""

from __future__ import annotations

from tiercel.request.request import Request
from tiercel.text.detokenize import Detokenizer
from tiercel.text.stop_strings import StopStrings
from tiercel.text.tokenizer import Tokenizer


class TextStream:
    """The text of one completion.

    Attributes:
        num_tokens: tokens taken so far, up to the one that completed a stop string.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, *, keeps_special: bool = False
    ) -> None:
        """Set up.

        Args:
            request: its parameters say what is shown and where to stop.
            tokenizer: gives the bytes of each token.
            keeps_special: whether the names of control tokens stay in the text, whatever the
                request says, because a parser reads them.
        """
        params = request.params
        self._request = request
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens and not keeps_special
        )
        self._stops = StopStrings(params.stop, include_stop_str=params.include_stop_str_in_output)
        self._texts: list[str] = []
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All text that `push` has returned."""
        return "".join(self._texts)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the completion."""
        return self._stops.matched

    def push(self, token_ids: tuple[int, ...]) -> str:
        """Add the new tokens of a step, or none; return the text that is certain now.

        The last token is the end of the completion if the request has finished. Where a stop string
        is complete before it, the request is cut after the token that completed the stop string:
        the later tokens of the step never show.
        """
        request, text = self._request, ""
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            is_stopped = request.finish_reason == "stop" and position == last
            text += self.until_stop(self.decode(token_id, is_stopped=is_stopped))
            if self.matched is not None:
                break
        if self.matched is None and request.finish_reason is not None:
            text += self.until_stop(self.finish_decoding()) + self.finish_stops()
        if self.matched is not None:
            del request.output_token_ids[self.num_tokens :]
            del request.logprobs[self.num_tokens :]
        self._texts.append(text)
        return text

    def decode(self, token_id: int, *, is_stopped: bool) -> str:
        """Add one token; return its text and that of a character which it completes.

        Args:
            token_id: the token.
            is_stopped: whether the engine ended the completion here, for the reason ``stop``. A
            stop
                token is counted but not shown, unless the request includes stop strings.
        """
        self.num_tokens += 1
        request, params = self._request, self._request.params
        if not params.detokenize:
            return ""
        if is_stopped and token_id in request.stop_ids and not params.include_stop_str_in_output:
            return ""
        return self._detokenizer.push((token_id,))

    def finish_decoding(self) -> str:
        """End the tokens: U+FFFD if a character was cut, else nothing."""
        return self._detokenizer.finish()

    def until_stop(self, text: str) -> str:
        """Add decoded text; return what may be shown: all of it within the first `min_tokens`."""
        if self.num_tokens <= self._request.params.min_tokens:
            return text
        return self._stops.push(text)[0]

    def finish_stops(self) -> str:
        """End the text: what was held back for a stop string that did not come."""
        return self._stops.finish()[0]
