"""The head that drafts: read and checked like all tensors, computed as its formula says."""

import numpy as np
import pytest
import torch

from tests.mtp_model import HIDDEN, LAYERS, mtp_model
from tests.tiny_llm import ids_of, open_tiny
from tiercel.batch import Batch
from tiercel.errors import ModelFormatError
from tiercel.models.source import open_source
from tiercel.params import SamplingParams

PROMPT = {"prompt_token_ids": [5, 9, 7, 30, 200, 11]}
NEXTN = f"blk.{LAYERS}.nextn"


def test_the_file_says_that_it_has_a_head(tmp_path):
    config = open_source(mtp_model(tmp_path / "m.gguf")).config
    assert (config.num_layers, config.num_mtp_layers) == (LAYERS, 1)
    heads = {"qwen3.attention.head_count": [4] * (LAYERS + 1)}  # the head is a block too
    assert open_source(mtp_model(tmp_path / "m.gguf", metadata=heads)).config == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensors": {f"{NEXTN}.enorm.weight": None}},
            r"'blk\.2\.nextn\.enorm\.weight' is missing",
        ),
        (
            {"tensors": {f"blk.{LAYERS}.attn_q.weight": None}},
            r"'blk\.2\.attn_q\.weight' is missing",
        ),
        ({"tensors": {f"{NEXTN}.eh_proj.weight": np.ones((HIDDEN, HIDDEN))}}, "64 x 64"),
        ({"metadata": {"qwen3.nextn_predict_layers": 2}}, "nextn_predict_layers is 2"),
        ({"metadata": {"qwen3.nextn_predict_layers": None}}, "does not belong to"),
    ],
)
def test_a_head_that_is_not_whole_is_refused(tmp_path, changes, message):
    path = mtp_model(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelFormatError, match=message):
        open_source(path)


def test_answers_without_it_are_those_of_the_model_alone(tmp_path):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for seed in (6, 7):  # of the head; the model is the same
        path = mtp_model(tmp_path / f"{seed}.gguf", head_seed=seed)
        with open_tiny(path, spec="mtp") as llm:
            answers.append(ids_of(llm.generate(PROMPT, params)))
    assert answers[0] == answers[1]


def rms(x, weight):
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def test_the_head_computes_its_formula(tmp_path):
    """With a layer that adds nothing, what is left is two norms, a product, a norm and the head."""
    zeros = {
        f"blk.{LAYERS}.attn_output.weight": np.zeros((HIDDEN, 64)),
        f"blk.{LAYERS}.ffn_down.weight": np.zeros((HIDDEN, 128)),
    }
    path = mtp_model(tmp_path / "m.gguf", tensors=zeros)
    ids = torch.tensor([5, 77, 260], dtype=torch.int32)
    hidden = torch.randn(3, HIDDEN) * 4
    with open_tiny(path, spec="mtp") as llm:
        runner = llm._engine.runner
        model, rows = runner.model, runner.rows
        batch = Batch(
            input_ids=ids,
            positions=torch.arange(3, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
            seq_lens=torch.tensor([3], dtype=torch.int32),
            rows=torch.zeros(1, dtype=torch.int32),
            logits_rows=torch.arange(3, dtype=torch.int32),
            slot_mapping=torch.arange(64, 67).unsqueeze(0),
            block_tables=rows.block_tables,
            query_lens=(3,),
            context_lens=(3,),
            num_tokens=3,
            num_reqs=1,
            max_query_len=3,
            max_seq_len=3,
        )
        with torch.inference_mode():
            found = model.draft_head.logits(model.draft_head.forward(batch, hidden))
        source = llm.source

        def tensor(name):
            info = source.tensors[name]
            return torch.from_numpy(np.frombuffer(source.data(name).tobytes(), np.float32).copy()
                                    .reshape(info.shape))  # fmt: skip

        embedded = rms(tensor("token_embd.weight")[ids.long()], tensor(f"{NEXTN}.enorm.weight"))
        states = rms(hidden, tensor(f"{NEXTN}.hnorm.weight"))
        x = torch.cat((embedded, states), dim=1) @ tensor(f"{NEXTN}.eh_proj.weight").double().T
        x = rms(x, tensor(f"{NEXTN}.shared_head_norm.weight"))
        expected = x @ tensor("output.weight").double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
