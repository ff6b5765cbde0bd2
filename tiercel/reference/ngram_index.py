"""Oracle of the n-gram index: a dictionary of first occurrences, filled token by token."""

from collections.abc import Sequence

from tiercel.reference.ngram_match import Hit


class FirstOccurrences:
    """The first occurrence of each window of some sizes, in a prompt and its generated text.

    An occurrence is (0, follower) in the prompt and (1, follower) in the generated text, so that
    the smaller of two is preferred.
    """

    def __init__(self, min_ngram_size: int, max_ngram_size: int) -> None:
        self.sizes = range(max_ngram_size, min_ngram_size - 1, -1)
        self.texts: tuple[list[int], list[int]] = ([], [])
        self.first: dict[tuple[int, ...], tuple[int, int]] = {}

    def append(self, kind: int, token: int) -> None:
        """Add a token to a text; windows that it follows are known from now on."""
        text = self.texts[kind]
        follower = len(text)
        for size in self.sizes:
            if size <= follower:
                window = tuple(text[follower - size :])
                self.first[window] = min(self.first.get(window, (2, 0)), (kind, follower))
        text.append(token)

    def search(self, query: Sequence[int]) -> Hit | None:
        """The token after the longest window that equals the end of the query."""
        for size in self.sizes:
            window = tuple(query[len(query) - size :])
            if size <= len(self.texts[1]) and window in self.first:
                kind, follower = self.first[window]
                return Hit(self.texts[kind], follower, size)
        return None
