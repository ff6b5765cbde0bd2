"""Walks through a grammar as a model would: allowed tokens, random answers, given texts."""

import numpy as np

from tiercel.grammar.matcher import GrammarMatcher, GrammarVocabulary
from tiercel.grammar.spec import compile_spec
from tiercel.params import StructuredOutputs

CONTEXT = 2048
_CLOSERS = b'"}])>/'


class Walker:
    """A vocabulary with matchers of grammars."""

    def __init__(self, tokenizer, vocab_size):
        self.tokenizer = tokenizer
        self.vocabulary = GrammarVocabulary.of(tokenizer, vocab_size)
        tokens = [tokenizer.token_bytes(i, with_special=True) for i in range(tokenizer.vocab_size)]
        # Short, visible tokens make short answers: free text would not end otherwise.
        self.is_plain = np.array(
            [len(t) < 6 and t.isascii() and t.isprintable() for t in map(str_of, tokens)]
        )
        self.closes = np.array([any(char in token for char in _CLOSERS) for token in tokens])

    def matcher(self, spec=None, stop_ids=None, **form):
        """The matcher of a spec, or of a form given like the fields of `StructuredOutputs`."""
        if spec is None:
            spec = compile_spec(StructuredOutputs(**form), max_tokens=CONTEXT)
        return GrammarMatcher(self.vocabulary, spec, stop_ids)

    def ids(self, text, parse_special=False):
        if parse_special:
            return self.tokenizer.encode(text, parse_special=True)
        return self.tokenizer.encode_inner(text)

    def accepts(self, matcher, text, parse_special=False):
        """Whether the whole text may be written, and may end there."""
        ids = self.ids(text, parse_special)
        if matcher.num_valid(ids) < len(ids):
            return False
        for token_id in ids:
            matcher.advance(token_id)
        return matcher.is_accepting

    def sample(self, matcher, rng, steps=200):
        """The ids of a random answer and whether it is complete; checks every mask on the way."""
        stops = sorted(self.vocabulary.stop_ids)
        ids = []
        for _ in range(steps):
            found = allowed(matcher)
            assert matcher.error is None
            assert len(found), "there is always a way on"
            has_stop = np.isin(stops, found)
            assert has_stop.all() == has_stop.any() == matcher.is_accepting
            found = found[~np.isin(found, stops)]
            if has_stop.any() and (not len(found) or rng.random() < 0.3):
                matcher.advance(stops[0])
                assert matcher.is_finished
                return ids, True
            for wanted, share in ((self.is_plain, 1.0), (self.closes, 0.7)):
                better = found[wanted[found]]
                found = better if len(better) and rng.random() < share else found
            ids.append(int(rng.choice(found)))
            assert matcher.num_valid(ids[-1:]) == 1
            matcher.advance(ids[-1])
        return ids, False


def str_of(token):
    return token.decode("latin-1")


def mask(matcher):
    row = np.full(matcher.num_words, -1, np.int32)
    matcher.fill_mask(row)
    return row


def allowed(matcher):
    """Ids that may come next, in ascending order."""
    return np.flatnonzero(np.unpackbits(mask(matcher).view(np.uint8), bitorder="little"))
