"""Hub names, and the files of a repository that they select."""

import pytest

from tiercel.errors import ModelNotFoundError
from tiercel.loader.hub_names import (
    RemoteFile,
    Selection,
    check_file_name,
    check_revision,
    parse,
    select,
    select_matching,
    show,
)
from tiercel.loader.store import Content

QUANTS = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "README.md"]
SPLIT = ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf", "m-Q4_K_M.gguf"]
FOLDER = [
    "config.json",
    "tokenizer.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "onnx/model.safetensors",
    "README.md",
]


def files(names):
    return [RemoteFile(name, Content(7, "0" * 64)) for name in names]


def taken(names, text):
    """The names that `text` selects, and the one to open."""
    selection = select(files(names), parse(text))
    return [file.name for file in selection.files], selection.entry


def refusal(function, *arguments):
    with pytest.raises(ModelNotFoundError) as caught:
        function(*arguments)
    text = f"{caught.value} {caught.value.hint}"
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", ("owner", "name", None)),
        ("Owner-1/na.me_2", ("Owner-1", "na.me_2", None)),
        ("o/n:Q4_K_M", ("o", "n", "Q4_K_M")),
        ("o/n:sub/a-00001-of-00002.gguf", ("o", "n", "sub/a-00001-of-00002.gguf")),
        ("o/n:a:b", ("o", "n", "a:b")),
        ("name", None),
        ("a/b/c", None),
        ("../b", None),
        ("a/..", None),
        ("a/b..c", None),
        ("a/.b", None),
        ("-a/b", None),
        ("/a/b", None),
        ("a/b/", None),
        ("a/b:", None),
        ("a/b\n", None),
        ("a/b\x00", None),
        ("ä/b", None),
        ("a/b c", None),
        ("https://host/name", None),
        ("a" * 97 + "/b", None),
        ("a/" + "b" * 97, None),
        ("a/b:" + "c" * 256, None),
        ("a" * 96 + "/" + "b" * 96, ("a" * 96, "b" * 96, None)),
        ("a/b:" + "c" * 255, ("a", "b", "c" * 255)),
    ],
)
def test_parse(text, expected):
    name = parse(text)
    assert (None if name is None else (name.owner, name.name, name.choice)) == expected


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        (["only.gguf", "mmproj-only.gguf", "only.imatrix.gguf"], "o/n", "only.gguf"),
        (QUANTS, "o/n", "m-Q4_K_M.gguf"),
        (QUANTS, "o/n:Q8_0", "m-Q8_0.gguf"),
        (QUANTS, "o/n:q4_k_s", "m-Q4_K_S.gguf"),
        (QUANTS, "o/n:m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
    ],
)
def test_one_file_is_taken(names, text, expected):
    assert taken(names, text) == ([expected], expected)


@pytest.mark.parametrize("choice", ["Q8_0", SPLIT[0], SPLIT[1]])
def test_a_split_file_comes_whole(choice):
    assert taken(SPLIT, f"o/n:{choice}") == (SPLIT[:2], SPLIT[0])


def test_a_folder_comes_without_what_is_not_read():
    names, entry = taken(FOLDER, "o/n")
    assert sorted(names) == sorted(FOLDER[:5])
    assert entry is None


@pytest.mark.parametrize(
    ("names", "text", "words"),
    [
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "o/n", "holds 2 models: a-Q8_0, b-Q8_0. Name one: o/n:"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "o/n", "holds 2 models"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "o/n:Q4_K_M", "fits 2 files: a-Q4_K_M, b-Q4_K_M."),
        (QUANTS, "o/n:Q4", "no GGUF file is 'Q4'. It has m-Q4_K_M, m-Q4_K_S, m-Q8_0."),
        (QUANTS, "o/n:../m-Q8_0.gguf", "no GGUF file is '../m-Q8_0.gguf'"),
        (FOLDER, "o/n:Q8_0", "It holds no GGUF file."),
        (SPLIT[1:], "o/n:Q8_0", "has 2 parts but the repository 1"),
        (["pytorch_model.bin", "config.json"], "o/n", "pytorch_model.bin holds pickled weights"),
        (["pytorch_model.bin"], "o/n:pytorch_model.bin", "holds pickled weights"),
        (["README.md"], "o/n", "neither a GGUF file nor model.safetensors"),
        ([], "o/n", "neither a GGUF file nor model.safetensors"),
        ([f"m{i}.gguf" for i in range(99)], "o/n", "and 87 more"),
        (["m.gguf", "m\n\x1b.gguf"], "o/n", "m\\n\\x1b"),
    ],
)
def test_what_does_not_fit_one_model_is_refused(names, text, words):
    assert words in refusal(taken, names, text)


def test_a_pattern_takes_files_of_any_kind():
    assert select_matching(files(QUANTS), "*.md", "o/n") == Selection(
        tuple(files(["README.md"])), None
    )
    assert select_matching(files(SPLIT), "Q8_0/*", "o/n").entry == SPLIT[0]
    assert select_matching(files(QUANTS), "*.gguf", "o/n").entry is None
    assert "no file matches '*.txt'" in refusal(select_matching, files(QUANTS), "*.txt", "o/n")
    assert "pickled" in refusal(select_matching, files(FOLDER), "*", "o/n")


@pytest.mark.parametrize(
    "name",
    [
        *("a.gguf", "sub/a b+c.gguf", "ä.gguf", "a..b", ".gitattributes"),
        *("a" * 200, "ä" * 100, "/".join("abcdefgh")),
    ],
)
def test_safe_file_names(name):
    check_file_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "a/../../x", "/etc/x", "a//x", "./x", "", "a/", "a\\x", "C:x", "x\n", "x\x00"),
        *("x.", "x ", "a" * 201, "ä" * 101, "/".join("abcdefghi"), "\udcff", "\u202egguf"),
    ],
)
def test_unsafe_file_names(name):
    assert "which is not a safe name" in refusal(check_file_name, name)


@pytest.mark.parametrize("revision", ["", "..", "a/../b", "-x", "a b", "a\n", "a%2F", "x" * 129])
def test_revisions_that_are_none(revision):
    check_revision("refs/pr/1")
    check_revision("x" * 128)
    assert "not the name of a revision" in refusal(check_revision, revision)


def test_names_are_shown_on_one_short_line():
    assert show("a\n\x1b[0m") == "a\\n\\x1b[0m"
    assert show("x" * 120) == "x" * 120
    assert show("x" * 121) == show("x" * 500) == "x" * 120 + "..."
