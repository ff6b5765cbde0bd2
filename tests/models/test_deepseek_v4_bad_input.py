"""DeepSeek-V4 files that are wrong, from the command and from `LLM`: one line, no NaN answers.

Rules of config, names and planes have tests of their own; here are whole folders, and a fuzz of
`config.json` and of safetensors headers.
"""

import json
import os
import random
import struct

import numpy as np
import pytest
import torch

from tests.cli.harness import error_line, tiercel
from tests.dsv4_files import (
    CONFIG,
    TINY,
    released_tensors,
    save_folder,
    write_released,
    write_sharded,
    write_tokenizer,
)
from tests.tiny_llm import greedy, open_tiny
from tiercel.engine.memory import MemoryBudget
from tiercel.errors import OutOfMemoryError, TiercelError

ON_CPU = ("--device", "cpu", "--dtype", "float32")
NUM_DEFAULT, NUM_SLOW = 2, 60  # seeds of a fuzz
NUM_CASES = 25  # of a seed
SEEDS = [
    pytest.param(seed, marks=[pytest.mark.slow] * (seed >= NUM_DEFAULT)) for seed in range(NUM_SLOW)
]


VALUES = (  # JSON text
    *("NaN", "-Infinity", "1e400", "1e300", "1e-320", "-1", "0", "1", "2", "0.5", "4096"),
    *("67108864", "1" + "0" * 30, "9" * 5000, "true", "false", "null", '"x"', '""'),
    *("[]", "[1]", "[[]]", "[null, 4]", "{}", '{"a": 1}', '"\\ud800"', "[" * 2000),
)


def changed_folder(tmp_path, config=CONFIG, **tensors):
    """The tiny folder with a tokenizer and other tensors; `__` in a name is a dot."""
    changed = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return write_tokenizer(save_folder(tmp_path / "model", released_tensors() | changed, config))


def without_mtp(tmp_path, **config):
    kept = {k: v for k, v in released_tensors().items() if not k.startswith("mtp.")}
    return write_tokenizer(save_folder(tmp_path / "model", kept, CONFIG | config))


def nan_scale(tmp_path):
    scale = released_tensors()["layers.2.attn.wo_b.scale"].view(torch.uint8).clone()
    scale[1, 0] = 255
    tensor = scale.view(torch.float8_e8m0fnu)
    return changed_folder(tmp_path, layers__2__attn__wo_b__scale=tensor)


def missing_shard(tmp_path):
    folder = write_tokenizer(write_sharded(tmp_path / "model"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    return folder


def successor(tmp_path):
    return changed_folder(tmp_path, CONFIG | {"architectures": ["DeepseekV41ForCausalLM"]})


def no_tokenizer(tmp_path):
    return write_released(tmp_path / "model")


def uneven_heads(tmp_path):
    return changed_folder(tmp_path, CONFIG | {"qk_rope_head_dim": 16})


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (nan_scale, (), ("layers.2.attn.wo_b.scale", "E8M0 byte 255", "row 1")),
        (missing_shard, (), ("model-00002-of-00003.safetensors", "index.json")),
        (successor, (), ("DeepseekV41ForCausalLM", "not supported", "DeepseekV4ForCausalLM")),
        (no_tokenizer, (), ("no tokenizer.json", "prompt_token_ids")),
        (uneven_heads, ("--kv-dtype", "fp8"), ("head_dim - qk_rope_head_dim is 80", "64")),
    ],
)
def test_one_line_from_the_command(make, arguments, words, tmp_path, here):
    line = error_line(here("generate", "a", "-m", make(tmp_path), *ON_CPU, *arguments))
    for word in words:
        assert word in line


@pytest.mark.parametrize("make", [nan_scale, pytest.param(missing_shard, marks=pytest.mark.slow)])
def test_a_server_ends_with_the_same_line(make, tmp_path):
    process = tiercel("serve", make(tmp_path), "--port", "0", *ON_CPU)
    assert process.returncode != 0
    assert "Traceback" not in process.stderr
    assert "model" in process.stderr


@pytest.mark.parametrize("spec", ["mtp", "hybrid"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_nextn_predict_layers": 0}, "model has no layers for it"),
        ({"dspark_block_size": 5}, "block-draft head (dspark) is not supported"),
    ],
)
def test_drafts_without_a_head(spec, config, words, tmp_path):
    folder = without_mtp(tmp_path, **config)
    with pytest.raises(TiercelError) as caught, open_tiny(folder, spec=spec):
        pass
    assert f"spec='{spec}': " in str(caught.value)
    assert words in str(caught.value)
    assert "ngram" in caught.value.hint


def test_text_and_messages_for_a_folder_without_a_tokenizer():
    with open_tiny(TINY) as llm:
        with pytest.raises(TiercelError, match=r"no tokenizer\.json"):
            llm.generate("a")
        with pytest.raises(TiercelError, match=r"no tokenizer\.json"):
            llm.chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("token_id", [131, -1, 2**31, 2**63])
def test_ids_outside_the_vocabulary(token_id):
    with open_tiny(TINY) as llm:
        with pytest.raises(TiercelError):
            llm.generate({"prompt_token_ids": [5, token_id]}, greedy(2))
        with pytest.raises(TiercelError):
            llm.logits([5, token_id])
        (output,) = llm.generate({"prompt_token_ids": [5]}, greedy(2))
        assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("name", ["norm.weight", "layers.2.attn.attn_sink", "layers.2.hc_attn_fn"])
def test_nan_in_a_weight_ends_the_request(name, tmp_path):
    tensor = released_tensors()[name].clone()
    tensor.view(-1)[1] = float("nan")
    with open_tiny(changed_folder(tmp_path, **{name: tensor})) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(3))
    assert output.outputs[0].finish_reason == "error"
    assert not output.outputs[0].token_ids


def test_too_little_memory_is_told_before_weights_are_read(tmp_path, monkeypatch):
    """Weights fit and a sequence does not; the spoiled scale would be found by reading."""
    folder = nan_scale(tmp_path)
    monkeypatch.setattr(MemoryBudget, "left", lambda self: 3_500_000)
    with pytest.raises(OutOfMemoryError) as caught, open_tiny(folder):
        pass
    for word in ("the weights need", "one sequence of 4096 tokens", "but cpu has 0.0 GiB"):
        assert word in str(caught.value)
    assert "Lower max_model_len" in caught.value.hint


def test_files_that_are_none(tmp_path):
    folder = write_released(tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 1000, len(whole) - 1000):
        path.write_bytes(whole[:size])
        refused(folder)
    path.write_bytes(whole + b"x")
    refused(folder)
    path.unlink()
    os.mkfifo(path)
    assert "a pipe" in refused(folder)
    path.unlink()
    path.mkdir()
    assert "a folder" in refused(folder)


def refused(folder):
    with pytest.raises(TiercelError) as caught, open_tiny(folder):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Fuzz --------------------------------------------------------------------------------------


def load_and_run(folder):
    """Whether a file is refused in one line, or an answer ends with an error or is finite."""
    try:
        with open_tiny(folder, max_num_batched_tokens=64) as llm:
            logits = llm.logits([5, 6, 7])
            (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(1))
    except TiercelError as error:
        return "\n" not in str(error)
    return output.outputs[0].finish_reason == "error" or np.isfinite(logits).all()


def random_value(rng, old):
    """JSON text: of another type, at a border, or near the old value."""
    if rng.random() < 0.3 and isinstance(old, int) and not isinstance(old, bool):
        return str(old + rng.choice((-1, 1, old)))
    return rng.choice(VALUES)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_values_of_the_config(seed, tmp_path):
    rng = random.Random(seed)
    folder = write_released(tmp_path / "model")
    scaling = CONFIG["rope_scaling"]
    for _ in range(NUM_CASES):
        values = dict(CONFIG)
        if rng.random() < 0.3:
            key = rng.choice(list(scaling))
            old, values["rope_scaling"] = scaling[key], scaling | {key: "@"}
        else:
            key = rng.choice(list(CONFIG))
            old, values[key] = CONFIG[key], "@"
        text = json.dumps(values).replace('"@"', random_value(rng, old))
        (folder / "config.json").write_text(text)
        assert load_and_run(folder), text


@pytest.mark.parametrize("seed", SEEDS)
def test_random_changes_of_a_safetensors_header(seed, tmp_path):
    """An entry with another dtype, shape, place or name, or bytes of the header overwritten."""
    rng = random.Random(seed)
    folder = write_released(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    header, data = whole[8 : 8 + length], whole[8 + length :]
    for _ in range(NUM_CASES):
        if rng.random() < 0.4:
            spoiled = bytearray(header)
            for _ in range(rng.randint(1, 4)):
                spoiled[rng.randrange(length)] = rng.choice((*b'0123456789{}[]",:-', 0, 255))
        else:
            spoiled = changed_header(rng, json.loads(header))
        content = struct.pack("<Q", len(spoiled)) + bytes(spoiled) + data
        (folder / "model.safetensors").write_bytes(content)
        assert load_and_run(folder), spoiled


def changed_header(rng, entries):
    name = rng.choice([name for name in entries if name != "__metadata__"])
    entry = entries[name]
    match rng.randrange(5):
        case 0:
            entry["dtype"] = rng.choice(("F32", "BF16", "F8_E4M3", "F8_E8M0", "I8", "U8", "I64", 3))
        case 1:
            shape = entry["shape"]
            choices = (0, 1, -1, 2**31, 2**63, 2**80, 1.5, None)
            entry["shape"] = [rng.choice((*choices, size * 2)) for size in shape] or [2]
        case 2:
            entry["data_offsets"] = [rng.choice((0, 1, 2**40, -5)), rng.choice((0, 64, 2**62))]
        case 3:
            entries[rng.choice((name + "x", "", "layers.99.x", "a\0b"))] = entries.pop(name)
        case _:
            del entry[rng.choice(list(entry))]
    return json.dumps(entries).encode()
