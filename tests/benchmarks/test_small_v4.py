"""The trainable DeepSeek-V4: results as Tiercel's, files as released, and a loss that falls."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks import e2e_small_v4, figures
from benchmarks.common import environment
from benchmarks.small_v4 import checkpoint, corpus, train
from benchmarks.small_v4.__main__ import PLAIN_CONFIG, TOKENIZER
from benchmarks.small_v4.model import SmallV4
from benchmarks.small_v4.shape import CONFIG
from benchmarks.small_v4.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, learn, write
from tests.dsv4_engine import Steps, draft_states, expected, logits_of
from tests.dsv4_files import CONFIG as TINY_CONFIG
from tests.dsv4_files import stacked_tensors
from tiercel import LLM, SamplingParams
from tiercel.models.deepseek_v4 import read_hf
from tiercel.models.source import open_source
from tiercel.quant_types import QuantType

# Every kind of layer with every kind of routing, and sizes that are not alike; FP8 blocks and
# windows are partial. 300 tokens fill two HCA entries and more CSA entries than are chosen.
SHAPE = CONFIG | {
    "vocab_size": 270,
    "hidden_size": 160,
    "num_attention_heads": 6,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 56,
    "o_groups": 3,
    "o_lora_rank": 40,
    "sliding_window": 24,
    "index_n_heads": 12,
    "index_head_dim": 32,
    "index_topk": 9,
    "n_routed_experts": 6,
    "moe_intermediate_size": 64,
    "swiglu_limit": 1.25,
}
LENGTH = 300
SMALL = SHAPE | {
    "num_hidden_layers": 2,
    "compress_ratios": [4, 128, 0],
    "num_hash_layers": 1,
    "hc_sinkhorn_iters": 3,
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Small products: several threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(config, num_positions=LENGTH):
    """Weights without zeros and ones, so that every term of the formulas decides."""
    torch.manual_seed(3)
    model = SmallV4(read_hf(config, "test"), num_positions)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and not name.endswith("load"):
                tensor.add_(0.5 * torch.randn(tensor.shape))
    return model


def passed(model, ids):
    """The result for one sequence, with rounded weights; token 5 follows it."""
    following = torch.cat((ids[1:], ids.new_tensor([5])))
    weights = checkpoint.rounded_weights(model)
    with torch.no_grad():
        return torch.func.functional_call(model, weights, (ids[None], following[None])), following


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write(learn(["def add(a, b):\n    return a + b\n"] * 3, vocab_size=SHAPE["vocab_size"]), folder)
    return folder


# ---- the model


@pytest.mark.parametrize("number", [0, 1, 2])
def test_results_are_those_of_the_reference(number):
    """The tiny checkpoint, whose logits an independent implementation computed."""
    model = SmallV4(read_hf(TINY_CONFIG, "tiny"), 270)
    model.load_state_dict(stacked_tensors())
    result, _ = passed(model, expected()[f"p{number}.tokens"])
    wanted, drafts = (expected()[f"p{number}.{name}"] for name in ("logits", "mtp_logits"))
    torch.testing.assert_close(result.logits[0], wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(result.draft_logits[0, :-1], drafts, atol=1e-4, rtol=0)


def test_tiercel_computes_the_same(tmp_path, tokenizer_folder):
    """A checkpoint that this model wrote, with window, CSA and HCA layers and the MTP block."""
    model = random_model(SHAPE)
    checkpoint.write_checkpoint(model, SHAPE, tokenizer_folder, tmp_path)
    ids = torch.randint(2, SHAPE["vocab_size"], (LENGTH,))
    result, following = passed(model, ids)
    assert result.logits.std() > 0.5
    with LLM(tmp_path, device="cpu", dtype="float32", spec="mtp", threads=1) as llm:
        own = llm._engine.runner.model
        batch, hidden = Steps(own, [ids.tolist()]).step({0: LENGTH})
        drafts = draft_states(own, batch, hidden, following.int())
        with torch.inference_mode():
            pairs = ((logits_of(own, hidden), result.logits),
                     (own.draft_head.logits(drafts), result.draft_logits))  # fmt: skip
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted[0], atol=1e-4, rtol=1e-4)


def test_each_position_sees_earlier_ones_alone():
    model = random_model(SHAPE)
    ids = torch.randint(2, SHAPE["vocab_size"], (LENGTH,))
    whole = passed(model, ids)[0].logits[0]
    for cut in (3, 127, 129, 260):
        part = passed(model, ids[:cut])[0].logits[0]
        torch.testing.assert_close(part, whole[:cut], atol=1e-4, rtol=1e-4)


def test_every_weight_learns():
    """Each parameter has a gradient, the indexer's from its own loss alone."""
    model = random_model(SHAPE)
    ids = torch.randint(2, SHAPE["vocab_size"], (2, LENGTH))
    result = torch.func.functional_call(model, checkpoint.rounded_weights(model), (ids, ids))
    (result.logits.square().mean() + result.draft_logits.square().mean()).backward()
    still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert still == {name for name, _ in model.named_parameters() if ".indexer." in name}
    before = {name: p.grad.clone() for name, p in model.named_parameters() if name not in still}
    result = torch.func.functional_call(model, checkpoint.rounded_weights(model), (ids, ids))
    result.index_loss.backward()
    for name, parameter in model.named_parameters():
        if name in still:
            assert parameter.grad.any(), name
        else:
            assert torch.equal(parameter.grad, before[name]), name


def test_biases_move_towards_experts_with_few_tokens():
    gate = random_model(SMALL).layers[1].ffn.gate
    gate.bias.zero_()
    gate.load.copy_(torch.tensor([9.0, 0, 0, 3, 3, 3]))
    gate.balance(torch.tensor(0.5))
    assert gate.bias.tolist() == [-0.5, 0.5, 0.5, 0, 0, 0]


# ---- the files


def test_formats_names_and_sizes(tmp_path):
    """The checkpoint of the shape that is trained; `open_source` checks names and shapes."""
    model = random_model(CONFIG, num_positions=8)
    size = checkpoint.write_checkpoint(model, CONFIG, TOKENIZER, tmp_path / "rounded")
    assert size == sum(path.stat().st_size for path in (tmp_path / "rounded").iterdir())
    assert size <= 12_000_000
    assert sum(p.numel() for p in model.parameters()) <= 25_000_000
    stored = open_source(tmp_path / "rounded").stored
    for name, weight in stored.items():
        is_expert = ".experts." in name
        assert (weight.qtype is QuantType.MXFP4) == is_expert, name
        is_block = name.rpartition(".")[0].endswith(
            ("wq_a", "attn.wkv", "wq_b", "wo_a", "wo_b", "_proj", "s.w1", "s.w2", "s.w3")
        )
        is_block &= not is_expert and "weights_proj" not in name
        assert (weight.qtype is QuantType.FP8_BLOCK) == is_block, name
    checkpoint.write_checkpoint(model, PLAIN_CONFIG, TOKENIZER, tmp_path / "plain")
    plain = open_source(tmp_path / "plain").stored
    assert plain.keys() == stored.keys()
    assert {weight.qtype for weight in plain.values()} == {
        QuantType.BF16,
        QuantType.F32,
        QuantType.I64,
    }


def test_files_hold_the_rounded_weights(tmp_path, tokenizer_folder):
    model = random_model(SHAPE)
    checkpoint.write_checkpoint(model, SHAPE, tokenizer_folder, tmp_path)
    rounded = checkpoint.rounded_weights(model) | dict(model.state_dict())
    rounded |= checkpoint.rounded_weights(model)
    decoded = stacked_tensors(load_file(tmp_path / "model.safetensors"))
    assert decoded.keys() == rounded.keys()
    for name, weight in decoded.items():
        assert torch.equal(weight, rounded[name].detach()), name
    model.load_state_dict(decoded)
    for name, weight in checkpoint.rounded_weights(model).items():  # nothing is rounded twice
        assert torch.equal(weight, rounded[name]), name


def test_a_checkpoint_replaces_the_one_before(tmp_path, tokenizer_folder):
    model = random_model(SMALL)
    for factor in (1.0, 2.0):
        with torch.no_grad():
            model.head.weight.fill_(factor)
        checkpoint.write_checkpoint(model, SMALL, tokenizer_folder, tmp_path)
        assert load_file(tmp_path / "model.safetensors")["head.weight"][0, 0] == factor
    assert not list(tmp_path.glob("*.part"))


# ---- the text


def test_the_text_is_sorted_and_files_are_held_out(tmp_path):
    (tmp_path / "own/docs").mkdir(parents=True)
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    (tmp_path / "own/docs/page.md").write_text("a page")
    (tmp_path / "lib/site-packages/other.py").write_text("foreign = 1")
    (tmp_path / "lib/bytes.py").write_bytes(b"x = '\xff'")
    for i in range(200):
        (tmp_path / f"lib/m{i}.py").write_text(f"x = {i}")
    found = corpus.read_corpus(tmp_path / "own", tmp_path / "lib")
    labels = [d.label for d in found.train]
    assert labels == sorted(labels)
    assert "tiercel/docs/page.md" in labels
    assert found.num_skipped == 1
    assert len(found.train) + len(found.held_out) == 201
    assert 0 < len(found.held_out) < 12
    assert found == corpus.read_corpus(tmp_path / "own", tmp_path / "lib")


def test_the_tokenizer_of_the_checkpoint():
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == CONFIG["vocab_size"]
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    text = "def f(x):\n    return '<think>\u00e9\U0001f600'\n"
    ids = corpus.encode(tokenizer, [corpus.Document("a", text), corpus.Document("b", "x")]).tolist()
    assert (ids[0], ids[-1], ids.count(corpus.BOS), ids.count(corpus.EOS)) == (0, 1, 2, 2)
    assert tokenizer.decode(ids[1 : ids.index(corpus.EOS)]) == text


# ---- training


def make_trainer(device="cpu", **changes):
    settings = train.Settings(seconds=1e6, batch=2, length=32)
    text = torch.arange(4000, device=device).remainder(17).int() + 2
    model = random_model(SMALL, num_positions=34).to(device)
    return train.Trainer(model, text, text[:200], replace(settings, **changes))


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_thirty_steps_lower_the_loss(on, monkeypatch):
    monkeypatch.setattr(train, "NUM_EVALUATIONS", 2)
    trainer, saves = make_trainer(on, steps=30, peak_rate=1e-2), []
    trainer.run(lambda: saves.append(len(trainer.curve)))
    first, last = trainer.curve[0], trainer.curve[-1]
    for name in ("loss", "draft_loss"):
        key = f"held_out_{name}_nats_per_token"
        assert last[key] < first[key] - 1, (name, first[key], last[key])
    assert (last["step"], len(saves)) == (30, 3)  # half, four fifths, the end
    assert trainer.graph_refusal == ("not on a GPU" if on == "cpu" else "")


def test_the_time_ends_training():
    trainer = make_trainer(seconds=1e-9)
    trainer.run(lambda: None)
    assert trainer.curve[-1]["step"] == 1


def test_the_rate_rises_then_falls_to_a_hundredth():
    rates = [train.rate_at(share, 2.0) for share in (0.0, 0.01, 0.02, 0.5, 1.0)]
    assert rates == pytest.approx([0.1, 1.05, 2.0, 1.0204, 0.02], rel=1e-3)


# ---- the benchmark of a checkpoint


def test_the_benchmark_measures_formats_and_drafts(tmp_path, tokenizer_folder, monkeypatch):
    folder = tmp_path / "model"
    checkpoint.write_checkpoint(random_model(SMALL), SMALL, tokenizer_folder, folder)
    text = "def add(a, b):\n    return a + b\n" * 20
    held_out = corpus.Corpus([], [corpus.Document("a", text)], 0, "")
    monkeypatch.setattr(e2e_small_v4, "read_corpus", lambda: held_out)
    options = e2e_small_v4.argparse.Namespace(
        folder=folder, device="cpu", unrounded=None, spec=["mtp"], out=tmp_path / "found.json"
    )
    sizes = e2e_small_v4.Sizes(1, 40, 12, 2, 50, (2,))
    e2e_small_v4.measure_all(options, sizes, environment(torch.device("cpu")))
    rows = figures.read(options.out).rows
    by_weights = {row["weights"]: row for row in rows if row["name"] == "perplexity"}
    same = "perplexity_per_token"
    assert by_weights["nvfp4 experts"]["rounded_matrices"] == 0
    assert by_weights["nvfp4 experts"][same] == by_weights["released"][same]
    (drafts,) = [row for row in rows if row["name"] == "drafts"]
    assert (drafts["spec"], drafts["limit"]) == ("mtp", 2)
    assert (drafts["equal_answers"], drafts["answers"]) == (1, 1)
    assert drafts["largest_parting_gap_nats_per_token"] == 0


def test_answers_part_by_the_difference_of_two_logits(tmp_path, tokenizer_folder):
    checkpoint.write_checkpoint(random_model(SMALL), SMALL, tokenizer_folder, tmp_path)
    with LLM(tmp_path, device="cpu", dtype="float32", threads=1) as llm:
        logits = llm.logits([3, 4, 5])[-1]
        gap = e2e_small_v4.parting_gap(llm, [3, 4], [5, 9, 1], [5, 7, 2])
        assert gap == pytest.approx(abs(logits[9] - logits[7]), rel=1e-5)
        assert e2e_small_v4.parting_gap(llm, [3, 4], [5, 9], [5, 9]) == 0


@pytest.mark.parametrize("spec", ["off", "mtp"])
def test_the_trained_checkpoint_writes_text(spec):
    """What the folder of test data holds: text of its kind, with drafts that are often right."""
    config = json.loads((TOKENIZER / "config.json").read_text())
    assert config == CONFIG
    with LLM(TOKENIZER, device="cpu", dtype="float32", spec=spec, threads=1) as llm:
        (output,) = llm.generate("import os\nimport", SamplingParams(temperature=0, max_tokens=24))
        assert output.outputs[0].text.strip()
        if spec == "mtp":
            assert llm.draft_counts.num_accepted_tokens > 0
