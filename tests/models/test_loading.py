"""What is read of a file beside its hyperparameters: rows of q and k, norms, pooling, templates."""

import json
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.gguf_files import NUM_TOKENS, tiny_model
from tests.hf_models import (
    CLASSES,
    Sample,
    logits_of,
    make_model,
    own_tensors,
    permute_rows,
    sample_config,
    write_as_gguf,
    write_folder,
)
from tests.mtp_model import mtp_model
from tests.tiny_llm import open_tiny
from tiercel.errors import ModelFormatError
from tiercel.loader import names
from tiercel.models import source as source_module
from tiercel.models.source import open_source
from tiercel.models.tensors import check_tensors
from tiercel.models.weights import WeightReader, unpermute_rows

CPU = torch.device("cpu")
TEXT = "They ran and ran and ran, é. " * 5
TOLERANCE = 2e-5  # of the largest value: float32 sums in another order


# --- Hidden states


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("family", CLASSES)
def test_vectors_are_normed_hidden_states_of_transformers(tmp_path, family, pooling):
    sample = sample_config(random.Random(family), family)
    model = make_model(sample.values)
    write_folder(tmp_path, sample.values, own_tensors(model))
    name = "mean_tokens" if pooling == "mean" else "lasttoken"
    (tmp_path / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": False, f"pooling_mode_{name}": True}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(modes))
    with open_tiny(tmp_path, max_num_batched_tokens=47) as llm:
        ids = llm.encode(TEXT, add_special_tokens=True)
        (vector,) = llm.embed(TEXT)
    with torch.inference_mode():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
    expected = states.mean(dim=0) if pooling == "mean" else states[-1]
    expected = (expected / expected.norm()).numpy()
    np.testing.assert_allclose(vector, expected, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(1, "mean"), (3, "last"), (0, None), (2, None), (4, None), ("1", None), (None, None)],
)
def test_pooling_of_gguf_files(tmp_path, kind, expected):
    path = tiny_model(tmp_path / "m.gguf", "qwen3", metadata={"qwen3.pooling_type": kind})
    assert open_source(path).pooling == expected


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_logits_of_some_tokens_are_those_of_all(tmp_path, family):
    """Also normed, and under the soft cap."""
    sample = sample_config(random.Random(3), family)
    values = sample.values | {"final_logit_softcapping": 1.5}
    write_folder(tmp_path, values, own_tensors(make_model(values)))
    ids, rows = torch.tensor([5, 299, 0, 5]), torch.tensor([6, 0, 3], dtype=torch.int32)
    with open_tiny(tmp_path) as llm, torch.inference_mode():
        model = llm._engine.runner.model
        hidden = 2 * torch.randn(7, values["hidden_size"])
        every = model.logits(hidden)
        found = model.token_logits(hidden, rows, ids)
        torch.testing.assert_close(found, every[rows.long()][:, ids], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.logits(hidden, rows), every[rows.long()])
        if family == "gemma3":
            assert 1.0 < every.abs().max() <= 1.5


# --- Rows of q and k


@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(3, 10, 10), (1, 2, 2), (4, 24, 14)])
def test_unpermuted_rows_are_those_before_the_conversion(heads, head_dim, rotary_dim):
    """llama.cpp permutes what rotates; the rest of a head stays where it is."""
    rows = np.random.default_rng(0).normal(size=(heads, head_dim, 3))
    turning = rows[:, :rotary_dim].reshape(heads * rotary_dim, 3)
    stored = rows.copy()
    stored[:, :rotary_dim] = permute_rows(turning, heads).reshape(heads, rotary_dim, 3)
    order = unpermute_rows(heads, head_dim, rotary_dim)
    assert order.dtype == torch.int64
    np.testing.assert_array_equal(stored.reshape(-1, 3)[order], rows.reshape(-1, 3))
    if rotary_dim > 2:
        assert not np.array_equal(stored, rows)


def partly_rotating(family, rotary_dim):
    """A sample, and a reference of which each head rotates in its first dimensions.

    transformers rotates whole heads of these families: pairs that do not turn have frequency 0.
    Its pair (j, j + head_dim / 2) is our (j, j + rotary_dim / 2), what is left fills the gaps.
    """
    values = dict(sample_config(random.Random(7), family, for_gguf=True).values)
    values |= {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 30.0}}
    values = {k: v for k, v in values.items() if k not in ("rope_theta", "rope_scaling")}
    model = make_model(values)
    half, frequencies = rotary_dim // 2, torch.zeros(8)
    frequencies[:half] = 30.0 ** (-torch.arange(half) / half)
    model.model.rotary_emb.inv_freq = frequencies
    place = torch.cat((torch.arange(half), torch.arange(half) + 8))
    place = torch.cat((place, torch.tensor([i for i in range(16) if i not in place])))
    tensors = own_tensors(model)
    for name, tensor in tensors.items():
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            tensors[name] = tensor.unflatten(0, (-1, 16))[:, place].flatten(0, 1).contiguous()
    return values, model, tensors


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_heads_that_rotate_in_part(tmp_path, family):
    values, model, tensors = partly_rotating(family, 10)
    ids = random.Random(1).choices(range(values["vocab_size"]), k=70)
    expected = logits_of(model, ids)
    write_folder(tmp_path, values | {"partial_rotary_factor": 10 / 16}, tensors)
    with open_tiny(tmp_path) as llm:
        actual = llm.logits(ids)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE * largest)
    whole = logits_of(make_model(values, model.state_dict()), ids)
    assert np.abs(whole - expected).max() > 1e-2 * largest


def test_llama_files_of_heads_that_rotate_in_part(tmp_path):
    """There rows of adjacent pairs are stored side by side, within what rotates."""
    values, model, tensors = partly_rotating("llama", 10)
    ids = random.Random(1).choices(range(values["vocab_size"]), k=70)
    expected = logits_of(model, ids)
    sample = Sample("llama", values, {})
    model.load_state_dict(tensors, strict=False)
    for layer in model.model.layers:
        for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            rows = proj.weight.data.unflatten(0, (-1, 16))
            pairs = torch.arange(10).view(2, 5).t().flatten()
            stored = torch.cat((rows[:, pairs], rows[:, 10:]), dim=1).flatten(0, 1).numpy()
            # `write_as_gguf` permutes whole heads: undo that.
            order = np.argsort(permute_rows(np.arange(len(stored)), len(rows)))
            proj.weight.data = torch.from_numpy(stored[order])
    path = write_as_gguf(tmp_path / "m.gguf", sample, model, **{"rope.dimension_count": 10})
    with open_tiny(path) as llm:
        actual = llm.logits(ids)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("arch", [*CLASSES, "head for drafts"])
def test_every_tensor_counts(tmp_path, arch):
    """One that is missing, of another shape or surplus is named; only the head may be left out."""
    path = tmp_path / "m.gguf"
    path = mtp_model(path) if arch not in CLASSES else tiny_model(path, arch, tied=False)
    source = open_source(path)
    found = {ours: (stored, source.tensors[stored].shape) for ours, stored in source.names.items()}
    check = partial(check_tensors, source.config, file="f", file_name_of=names.to_gguf)
    check(found)
    for ours, (stored, (rows, columns)) in found.items():
        others = {name: value for name, value in found.items() if name != ours}
        if ours == "head.weight":
            check(others)
        else:
            with pytest.raises(ModelFormatError, match=f"tensor {stored!r} is missing"):
                check(others)
        for shape in ((rows + 1, columns), (rows, columns + 1), (rows, columns - 1)):
            with pytest.raises(ModelFormatError, match=f"tensor {stored!r} is {shape[0]} x"):
                check({**others, ours: (stored, shape)})
    layers = source.config.num_layers + source.config.num_mtp_layers
    surplus = [f"layers.{layers}.q.weight", "layers.0.o.bias", "layers.0.mtp_proj.weight"]
    surplus += [] if arch == "qwen2" else ["layers.0.q.bias"]
    surplus += ["layers.0.q_norm.weight"] if arch in ("llama", "qwen2") else []
    surplus += [] if arch == "gemma3" else ["layers.0.post_mlp_norm.weight"]
    for ours in surplus:
        with pytest.raises(ModelFormatError, match="'more' does not belong to"):
            check({**found, ours: ("more", (1, 64))})


def test_divisors_of_frequencies_are_one_for_each_pair(tmp_path):
    metadata = {"llama.rope.dimension_count": 10}
    for count in (5, 8):
        tensors = {"rope_freqs.weight": np.full(count, 2.0)}
        path = tiny_model(tmp_path / "m.gguf", metadata=metadata, tensors=tensors)
        if count == 5:
            assert "rope_factors" in open_source(path).names
        else:
            with pytest.raises(ModelFormatError, match=r"'rope_freqs\.weight' is 1 x 8"):
                open_source(path)


# --- Bytes


def test_progress_reaches_all_bytes_once(tmp_path):
    path = tiny_model(tmp_path / "m.gguf", "qwen2", tied=False)
    source, seen = open_source(path), []
    reader = WeightReader(source, CPU, lambda done, total: seen.append((done, total)))
    total = sum(info.nbytes for info in source.tensors.values())
    for name in source.names:
        (reader.vector if name.endswith(("norm.weight", "bias")) else reader.file_tensor)(name)
    assert [of for _, of in seen] == [total] * len(source.names)
    sizes = [source.tensors[stored].nbytes for stored in source.names.values()]
    assert [done for done, _ in seen] == np.cumsum(sizes).tolist()
    reader.file_tensor("embed.weight")  # a second time: not more than all
    assert seen[-1] == (total, total)


@pytest.mark.usefixtures("without_native")
def test_stored_weights_do_not_need_the_file(tmp_path):
    source = open_source(tiny_model(tmp_path / "m.gguf", "qwen2"))
    reader = WeightReader(source, CPU)
    view, kept = reader.file_tensor("embed.weight"), reader.stored("embed.weight")
    assert torch.equal(view.planes["data"], kept.planes["data"])
    assert view.planes["data"].data_ptr() != kept.planes["data"].data_ptr()
    assert (kept.qtype, kept.layout, kept.shape) == (view.qtype, view.layout, view.shape)
    assert reader.has("embed.weight")
    assert not reader.has("head.weight")


def test_the_embedding_has_a_row_for_each_token(tmp_path):
    rows = np.random.default_rng(0).normal(size=(NUM_TOKENS, 64))
    for count in (NUM_TOKENS, NUM_TOKENS + 5):
        table = np.concatenate((rows, rows))[:count]
        path = tiny_model(tmp_path / "m.gguf", "qwen2", tensors={"token_embd.weight": table})
        assert open_source(path).config.vocab_size == count
    path = tiny_model(tmp_path / "m.gguf", "qwen2", tensors={"token_embd.weight": rows[:-1]})
    with pytest.raises(ModelFormatError, match="has 300 entries") as raised:
        open_source(path)
    assert "has 299 rows" in raised.value.hint


def test_two_names_of_one_tensor_are_refused(tmp_path):
    tensors = {"blk.01.attn_norm.weight": np.ones(64)}
    path = tiny_model(tmp_path / "m.gguf", "qwen2", tensors=tensors)
    with pytest.raises(ModelFormatError, match=r"blk\.0?1\.attn_norm.* mean the same"):
        open_source(path)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_head_of_a_gguf_file_is_its_own_where_it_is_there(tmp_path, arch, is_tied):
    source = open_source(tiny_model(tmp_path / "m.gguf", arch, tied=is_tied))
    assert source.config.tie_embeddings is is_tied
    assert ("head.weight" in source.names) is not is_tied


# --- Text files of a folder


@pytest.fixture
def folder(tmp_path):
    sample = sample_config(random.Random(0), "qwen3")
    return write_folder(tmp_path, sample.values, own_tensors(make_model(sample.values)))


def test_chat_templates_of_a_folder(folder):
    """The file of its own comes first."""
    assert open_source(folder).chat_template is None
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "inline"}))
    assert open_source(folder).chat_template == "inline"
    (folder / "chat_template.jinja").write_text("own é")
    assert open_source(folder).chat_template == "own é"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "a"}]}))
    assert open_source(folder).chat_template is None


def test_the_files_of_a_model_are_all_named(folder, tmp_path):
    """What a server compares before it starts another engine on them."""
    (folder / "1_Pooling").mkdir()
    for name in ("1_Pooling/config.json", "chat_template.jinja", "README.md"):
        (folder / name).write_text("{}")
    names = [str(path.relative_to(folder)) for path in open_source(folder).file_paths]
    assert names[0] == "model.safetensors"
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} < set(names)
    assert "1_Pooling/config.json" in names
    assert "README.md" not in names
    source = open_source(tiny_model(tmp_path / "m.gguf"))
    assert source.file_paths == (tmp_path / "m.gguf",)
    parts = tuple(SimpleNamespace(path=tmp_path / f"{number}.gguf") for number in range(3))
    split = replace(source, files=replace(source.files, parts=parts))
    assert split.file_paths == tuple(part.path for part in parts)


@pytest.mark.parametrize("text", ["[]", "3", "{", "", '{"a": NaN}', '"x"', "{" * 5000])
def test_text_files_are_objects(folder, text):
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        before = (folder / name).read_text() if (folder / name).is_file() else "{}"
        (folder / name).write_text(text)
        with pytest.raises(ModelFormatError, match=name) as raised:
            open_source(folder)
        assert "JSON object" in raised.value.hint
        (folder / name).write_text(before)
    open_source(folder)


def test_text_files_have_a_most_size(folder, monkeypatch):
    config = folder / "config.json"
    config.write_text(config.read_text().ljust(2000))
    monkeypatch.setattr(source_module, "MAX_JSON_BYTES", 2000)
    (folder / "chat_template.jinja").write_text("x" * 2000)
    assert open_source(folder).chat_template == "x" * 2000
    (folder / "chat_template.jinja").write_text("x" * 2001)
    assert open_source(folder).chat_template is None
    config.write_text(config.read_text().ljust(2001))
    with pytest.raises(ModelFormatError, match=r"config\.json: 2001 bytes") as raised:
        open_source(folder)
    assert "2000" in raised.value.hint


def test_the_key_of_a_file_changes_with_it(tmp_path):
    path = tiny_model(tmp_path / "m.gguf")
    keys = [open_source(path).file_key]
    assert open_source(path).file_key == keys[0]
    path.write_bytes(path.read_bytes() + bytes(32))
    keys.append(open_source(path).file_key)
    path.rename(tmp_path / "n.gguf")
    keys.append(open_source(tmp_path / "n.gguf").file_key)
    assert len(set(keys)) == 3
