"""BOS and EOS at the ends of an input: added where missing, wherever else the text has them."""

import itertools

import pytest

from tests.text.test_tokenizer import make_bpe, make_spm
from tiercel.text.chat_template import ChatTemplate, encode_around, encode_chat
from tiercel.text.template_client import TemplateWorker

PIECES = ["<s>", "</s>", "the", ""]
BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def worker():
    worker = TemplateWorker()
    yield worker
    worker.close()


def with_ends(ids, *, add_bos, add_eos):
    """The expected input: the rule applied to the ids of the text."""
    first = [BOS] if add_bos and ids[:1] != [BOS] else []
    last = [EOS] if add_eos and ids[-1:] != [EOS] else []
    return [*first, *ids, *last]


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_ends_are_added_where_the_text_lacks_them(add_bos, add_eos):
    tokenizer = make_spm(add_bos_token=add_bos, add_eos_token=add_eos)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (add_bos, add_eos)
    for pieces in itertools.product(PIECES, repeat=4):
        text = "".join(pieces)
        for parse_special in (True, False):
            ids = tokenizer.encode(text, parse_special=parse_special)
            ended = tokenizer.encode(text, parse_special=parse_special, add_special_tokens=True)
            assert ended == with_ends(ids, add_bos=add_bos, add_eos=add_eos), text
    ids = tokenizer.encode("the")
    assert tokenizer.with_bos(ids) == with_ends(ids, add_bos=add_bos, add_eos=False)
    assert tokenizer.with_bos([*ids, BOS]) == with_ends([*ids, BOS], add_bos=add_bos, add_eos=False)


@pytest.mark.parametrize("changes", [{"bos_token_id": None}, {"eos_token_id": None}])
def test_a_model_without_the_token_gets_none(changes):
    tokenizer = make_spm(add_bos_token=True, add_eos_token=True, **changes)
    ids = tokenizer.encode("the")
    ended = tokenizer.encode("the", add_special_tokens=True)
    assert ended == ([*ids, EOS] if "bos_token_id" in changes else [BOS, *ids])


def test_byte_level_models_get_ends_where_the_file_says_so():
    """llama.cpp's defaults: SentencePiece-style vocabularies get a BOS, byte-level ones do not."""
    end = make_bpe().eos_id
    for changes, expected in (
        ({}, []),
        ({"bos_token_id": end}, []),
        ({"add_bos_token": True}, []),  # the file names no BOS
        ({"add_bos_token": True, "bos_token_id": end}, [end]),
    ):
        ids = make_bpe(**changes).encode("he", add_special_tokens=True)
        assert ids == [*expected, *make_bpe().encode("he")]
    assert make_spm().encode("the", add_special_tokens=True)[:1] == [BOS]
    assert make_spm().encode("the", add_special_tokens=True)[-1:] != [EOS]


@pytest.mark.parametrize(
    ("source", "ids"),
    [
        ("the", [BOS]),
        ("{{ bos_token }}the", [BOS]),
        ("the{{ bos_token }}the", [BOS, None, BOS]),
        ("{{ bos_token }}the{{ bos_token }}", [BOS, None, BOS]),
        ("{{ bos_token }}{{ bos_token }}the", [BOS, BOS]),
        ("{{ eos_token }}the", [BOS, EOS]),
        ("the{{ eos_token }}", [BOS, None, EOS]),
    ],
)
def test_a_prompt_opens_with_one_bos_wherever_its_template_writes_others(worker, source, ids):
    """A BOS that a template writes later in the prompt stays, and replaces none at the front."""
    tokenizer = make_spm()
    template = ChatTemplate(source, "<s>", "</s>", worker=worker)
    messages = [{"role": "user", "content": "<s></s>"}]  # text of a user is none of these tokens
    found = encode_chat(tokenizer, template, messages)
    runs = [i if i in (BOS, EOS) else None for i in found]
    kept = [i for place, i in enumerate(runs) if i or runs[place - 1] or not place]
    assert kept[: len(ids)] == ids
    assert kept.count(BOS) == ids.count(BOS)


def test_both_sides_of_an_open_message_have_one_bos_together(worker):
    tokenizer = make_spm()
    for source in ("{{ messages[0].content }}the", "{{ bos_token }}{{ messages[0].content }}the"):
        template = ChatTemplate(source, "<s>", "</s>", worker=worker)
        before, after = encode_around(tokenizer, template, [{"role": "user", "content": "abc"}])
        assert before == [BOS, *tokenizer.encode("abc")]
        assert BOS not in after
