"""Tensor tables of DeepSeek-V4 files: what is found, and the error for each thing that is wrong."""

import json
import shutil

import pytest
import torch

from tests import dsv4_files
from tests.dsv4_files import CONFIG, released_tensors, save_folder
from tiercel.config import LoadOptions
from tiercel.engine.load import resolve_config
from tiercel.errors import (
    ArgumentError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from tiercel.models.deepseek_v4_names import FoundName, file_name, from_gguf, from_hf
from tiercel.models.source import open_source

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu

NAMES = {
    "embed.weight": FoundName("embed.weight"),
    "model.embed.weight": FoundName("embed.weight"),
    "model.embed_tokens.weight": FoundName("embed.weight"),
    "lm_head.weight": FoundName("head.weight"),
    "model.norm.weight": FoundName("norm.weight"),
    "hc_head_scale": FoundName("hc_head_scale"),
    "model.hc_head.hc_scale": FoundName("hc_head_scale"),
    "layers.3.hc_ffn_scale": FoundName("layers.3.hc_ffn_scale"),
    "model.layers.3.ffn_hc.scale": FoundName("layers.3.hc_ffn_scale"),
    "layers.3.attn.wq_a.scale": FoundName("layers.3.attn.wq_a.weight", "scale"),
    "layers.3.attn.wq_a.weight_scale_inv": FoundName("layers.3.attn.wq_a.weight", "scale"),
    "model.layers.3.self_attn.q_a_proj.weight": FoundName("layers.3.attn.wq_a.weight"),
    "model.layers.3.self_attn.sinks": FoundName("layers.3.attn.attn_sink"),
    "model.layers.0.attn.norm.weight": FoundName("layers.0.attn.kv_norm.weight"),
    "model.layers.0.self_attn.kv_norm.weight": FoundName("layers.0.attn.kv_norm.weight"),
    "model.layers.0.self_attn.compressor.kv_norm.weight": FoundName(
        "layers.0.attn.compressor.norm.weight"
    ),
    "model.layers.0.self_attn.compressor.indexer.kv_norm.weight": FoundName(
        "layers.0.attn.indexer.compressor.norm.weight"
    ),
    "model.layers.0.mlp.gate.e_score_correction_bias": FoundName("layers.0.ffn.gate.bias"),
    "layers.1.ffn.experts.12.w3.weight_scale_2": FoundName(
        "layers.1.ffn.experts.w3.weight", "global_scale", 12
    ),
    "layers.1.ffn.experts.12.w3.input_scale": FoundName(
        "layers.1.ffn.experts.w3.weight", "input_scale", 12
    ),
    "layers.1.ffn.experts.0.w1.weight_packed": FoundName(
        "layers.1.ffn.experts.w1.weight", "weight", 0
    ),
    "layers.1.ffn.experts.0.w1.weight_global_scale": FoundName(
        "layers.1.ffn.experts.w1.weight", "divisor", 0
    ),
    "model.layers.1.mlp.experts.2.down_proj.weight": FoundName(
        "layers.1.ffn.experts.w2.weight", "weight", 2
    ),
    "model.layers.1.mlp.experts.gate_up_proj": FoundName("layers.1.ffn.experts.w1w3.weight"),
    "model.layers.1.mlp.experts.gate_up_proj_scale_inv": FoundName(
        "layers.1.ffn.experts.w1w3.weight", "scale"
    ),
    "model.layers.1.mlp.experts.down_proj": FoundName("layers.1.ffn.experts.w2.weight"),
    "mtp.0.e_proj.scale": FoundName("mtp.0.e_proj.weight", "scale"),
    "mtp.0.norm.weight": FoundName("mtp.0.norm.weight"),
    "mtp.0.attn_norm.weight": FoundName("mtp.0.attn_norm.weight"),
    "layers.0.norm.weight": None,
    "layers.0.attn.wq_a": None,
    "layers.0.attn.wq_a.bias": None,
    "layers.0.attn.attn_sink.weight": None,
    "layers.0.mlp.gate_proj.weight": None,
    "layers.x.attn.wq_a.weight": None,
    "wq_a.weight": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_safetensors_files(name):
    assert from_hf(name) == NAMES[name]


GGUF_NAMES = {
    "token_embd.weight": "embed.weight",
    "output_hc_base.weight": "hc_head_base",
    "blk.3.attn_sinks.weight": "layers.3.attn.attn_sink",
    "blk.3.exp_probs_b.bias": "layers.3.ffn.gate.bias",
    "blk.4.attn_kv_a_norm.weight": "mtp.0.attn.kv_norm.weight",
    "blk.4.nextn.shared_head_norm.weight": "mtp.0.norm.weight",
    "blk.4.nextn.hc_head_fn.weight": "mtp.0.hc_head_fn",
    "blk.3.nextn.enorm.weight": None,
    "blk.3.attn_q_a.bias": None,
    "blk.3.attn_q.weight": None,
    "rope_freqs.weight": None,
}


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_names_of_gguf_files(name):
    ours = GGUF_NAMES[name]
    assert from_gguf(name, 4) == (None if ours is None else FoundName(ours))


def test_every_name_of_a_gguf_file_has_its_inverse():
    for name in dsv4_files.gguf_tensors():
        found = from_gguf(name, 4)
        assert file_name(found.weight, frozenset(), 4, is_gguf=True) == name


def opened(tmp_path, config=CONFIG, remove=(), **tensors):
    """Open the tiny checkpoint with other tensors; `__` in a name is a dot."""
    changed = released_tensors() | {name.replace("__", "."): t for name, t in tensors.items()}
    for name in remove:
        del changed[name]
    return open_source(save_folder(tmp_path / "model", changed, config))


def refused(tmp_path, *words, kind=ModelFormatError, **changes):
    with pytest.raises(kind) as caught:
        opened(tmp_path, **changes)
    text = f"{caught.value} {caught.value.hint}"
    assert str(caught.value).startswith("model")
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    "name",
    [
        "layers.2.attn.wq_a.weight",
        "layers.0.ffn.gate.tid2eid",
        "layers.2.ffn.gate.bias",
        "hc_head_fn",
        "layers.3.attn.indexer.compressor.ape",
        "mtp.0.e_proj.weight",
        "embed.weight",
        "layers.1.ffn.experts.4.w3.weight",
        "mtp.0.hc_head_scale",
    ],
)
def test_a_missing_tensor(name, tmp_path):
    scale = name.replace(".weight", ".scale")
    drop = [n for n in dict.fromkeys((name, scale)) if n in released_tensors()]
    refused(tmp_path, f"tensor '{name}' is missing", remove=drop)


def test_a_scale_without_values(tmp_path):
    name = "layers.2.attn.wq_a.weight"
    refused(tmp_path, "'layers.2.attn.wq_a.scale'", "without the values", remove=[name])


def test_a_missing_tensor_is_named_as_the_file_would(tmp_path):
    folder = dsv4_files.write_transformers_memory(tmp_path / "model")
    tensors = dsv4_files.load_file(folder / "model.safetensors")
    config = dsv4_files.transformers_config()
    for name in (
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.2.mlp.experts.gate_up_proj",
        "model.hc_head.hc_fn",
        "lm_head.weight",
    ):
        save_folder(folder, {n: t for n, t in tensors.items() if n != name}, config)
        with pytest.raises(ModelFormatError, match=f"{name}' is missing"):
            open_source(folder)
    for name in ("blk.1.ffn_down_exps.weight", "blk.4.attn_sinks.weight", "blk.2.exp_probs_b.bias"):
        path = dsv4_files.write_gguf(
            tmp_path / "m.gguf", change=lambda tensors, name=name: tensors.pop(name)
        )
        with pytest.raises(ModelFormatError, match=rf"m.gguf: tensor '{name}' is missing"):
            open_source(path)


def test_doubled_tensors(tmp_path):
    refused(
        tmp_path,
        "'model.layers.0.self_attn.q_a_norm.weight'",
        "'layers.0.attn.q_norm.weight'",
        "mean the same",
        model__layers__0__self_attn__q_a_norm__weight=torch.ones(72),
    )
    refused(
        tmp_path,
        "layers.1.ffn.experts.down_proj",
        "mean the same",
        layers__1__ffn__experts__down_proj=torch.ones(6, 160, 64),
    )
    refused(
        tmp_path,
        "mean the same",
        layers__2__attn__wo_a__weight_scale_inv=torch.ones(1, 2),
    )


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.wq_c.weight",
        "layers.0.attn.wq_a.bias",
        "other",
        "mtp.0.main.weight",
        "layers.0.rotary.weight",
    ],
)
def test_an_unknown_tensor(name, tmp_path):
    refused(tmp_path, f"tensor '{name}' is unknown", **{name: torch.ones(3)})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.4.attn_norm.weight", "4 layers of 6 experts and an MTP block"),
        ("layers.0.ffn.experts.6.w1.weight", "6 experts"),
        ("layers.3.ffn.gate.tid2eid", "does not belong"),
        ("layers.0.ffn.gate.bias", "does not belong"),
        ("layers.0.attn.indexer.wq_b.weight", "does not belong"),
        ("mtp.1.enorm.weight", "does not belong"),
        ("mtp.0.attn.compressor.ape", "does not belong"),
    ],
)
def test_a_tensor_of_another_shape_of_model(name, words, tmp_path):
    refused(tmp_path, f"'{name}' does not belong", words, **{name: torch.ones(3)})


def test_a_draft_block_that_the_config_does_not_count(tmp_path):
    config = CONFIG | {"num_nextn_predict_layers": 0}
    refused(tmp_path, "'mtp.0.", "does not belong", "no MTP block", config=config)


def test_a_draft_block_that_the_file_does_not_have(tmp_path):
    mtp = [name for name in released_tensors() if name.startswith("mtp.")]
    source = opened(tmp_path, remove=mtp)
    assert source.config.num_mtp_layers == 0
    assert not source.config.no_draft_head
    assert source.config.compress_ratios == (128, 128, 4, 4)


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_main_model_of_a_dspark_checkpoint(has_keys, tmp_path):
    extra = {f"mtp.{i}.main_proj.weight": torch.ones(3, 5) for i in range(3)}
    extra |= {"mtp.2.markov_head.markov_w1": torch.ones(7), "mtp.1.norm.weight": torch.ones(160)}
    config = CONFIG | {"compress_ratios": [128, 128, 4, 4, 0, 0, 0]}
    config |= {"dspark_num_layers": 3} if has_keys else {}
    source = opened(tmp_path, config, **extra)
    assert source.config.num_mtp_layers == 0
    assert source.config.no_draft_head == (
        "this checkpoint's block-draft head (dspark) is not supported"
    )
    assert not any(name.startswith("mtp.") for name in source.stored)
    assert len(source.config.compress_ratios) == 4
    with pytest.raises(ArgumentError, match=r"spec='mtp': .*\(dspark\) is not supported"):
        resolve_config(source, LoadOptions(device="cpu", spec="mtp"))


def test_tables_of_angles_are_passed_over(tmp_path):
    source = opened(tmp_path, **{"model.rotary_emb.main_inv_freq": torch.ones(16)})
    assert len(source.stored) == 162


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (
            "layers.2.attn.wq_b.weight",
            torch.ones(384, 64).to(FP8),
            "expected [384, 72] F8_E4M3, BF16, F16 or F32, or [384, 36] I8 or U8, "
            "found [384, 64] F8_E4M3",
        ),
        ("layers.2.attn.wq_b.weight", torch.ones(384, 72).to(torch.int32), "found [384, 72] I32"),
        ("layers.2.attn.wq_b.weight", torch.ones(384).to(FP8), "found [384] F8_E4M3"),
        ("layers.2.attn_norm.weight", torch.ones(161), "expected [160] F32, BF16 or F16"),
        ("layers.2.attn_norm.weight", torch.ones(160).to(FP8), "found [160] F8_E4M3"),
        ("layers.2.attn_norm.weight", torch.ones(1, 160), "found [1, 160] F32"),
        ("layers.2.attn.compressor.ape", torch.ones(192, 4), "expected [4, 192]"),
        ("layers.0.ffn.gate.tid2eid", torch.ones(131, 2), "expected [131, 2] I64 or I32"),
        ("layers.0.ffn.gate.tid2eid", torch.ones(131, 3).long(), "found [131, 3] I64"),
        ("layers.1.ffn.experts.3.w1.weight", torch.ones(64, 81).to(torch.int8), "[64, 80] I8"),
        ("embed.weight", torch.ones(130, 160), "expected [131, 160]"),
    ],
)
def test_a_wrong_shape_or_type(name, tensor, words, tmp_path):
    refused(tmp_path, f"tensor '{name}': expected", words, **{name: tensor})


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("layers.2.attn.wq_b.scale", torch.ones(3, 2).to(E8M0), "[3, 1] F8_E8M0 or U8 or F32"),
        ("layers.2.attn.wq_b.scale", torch.ones(3, 1, dtype=torch.bfloat16), "[3, 1] BF16"),
        ("layers.2.attn.wq_b.scale", torch.ones(1), "[1] F32"),
        ("layers.1.ffn.experts.3.w1.scale", torch.ones(64, 10).to(E8M0), "[64, 5]"),
        ("layers.1.ffn.experts.3.w1.scale", torch.ones(64, 5), "[64, 5] F8_E8M0 or U8"),
        ("layers.1.ffn.experts.3.w1.scale", torch.ones(64, 5).to(FP8), "[64, 10] F8_E4M3"),
    ],
)
def test_a_scale_that_does_not_fit_its_weight(name, tensor, words, tmp_path):
    weight = name.replace(".scale", ".weight")
    refused(tmp_path, f"'{name}'", "does not fit", f"'{weight}'", words, **{name: tensor})


def test_scales_that_a_format_does_not_have(tmp_path):
    name = "layers.2.attn.wq_b.weight_scale_2"
    refused(tmp_path, f"'{name}' does not fit", "no such scale", **{name: torch.ones(1)})
    name = "layers.2.ffn.gate.scale"
    refused(tmp_path, f"'{name}' does not fit", "[6, 160] BF16", **{name: torch.ones(1)})
    name = "layers.2.attn_norm.scale"
    refused(tmp_path, f"'{name}' does not fit", **{name: torch.ones(1)})


@pytest.mark.parametrize("name", ["layers.2.attn.wq_b", "layers.1.ffn.experts.3.w1"])
def test_a_missing_scale(name, tmp_path):
    refused(tmp_path, f"'{name}.weight' is", "has no scale", remove=[f"{name}.scale"])


def test_nvfp4_needs_its_global_scale(tmp_path):
    folder = dsv4_files.write_nvfp4(tmp_path / "model")
    tensors = dsv4_files.load_file(folder / "model.safetensors")
    name = "layers.3.ffn.experts.2.w2"
    factor = tensors.pop(f"{name}.weight_scale_2")
    with pytest.raises(ModelFormatError, match=f"'{name}.weight' is NVFP4 and has no global"):
        open_source(save_folder(folder, tensors))
    tensors[f"{name}.weight_scale_2"] = factor.expand(2)
    with pytest.raises(ModelFormatError, match=f"{name}.weight_scale_2.* does not fit"):
        open_source(save_folder(folder, tensors))


def test_experts_of_a_layer_are_stored_alike(tmp_path):
    name = "layers.1.ffn.experts.3.w1"
    refused(
        tmp_path,
        f"'{name}.weight' is BF16",
        "'layers.1.ffn.experts.0.w1.weight' MXFP4",
        remove=[f"{name}.scale"],
        **{f"{name}.weight": torch.ones(64, 160, dtype=torch.bfloat16)},
    )


def test_float_experts_of_a_layer_have_one_type(tmp_path):
    folder = dsv4_files.write_transformers_disk(tmp_path / "model", torch.bfloat16)
    tensors = dsv4_files.load_file(folder / "model.safetensors")
    name = "model.layers.1.ffn.experts.3.w1.weight"
    tensors[name] = tensors[name].half()
    with pytest.raises(ModelFormatError, match=f"{name}' is F16 .* BF16"):
        open_source(save_folder(folder, tensors, dsv4_files.transformers_config()))


def test_fp4_columns_without_the_key_of_the_config(tmp_path):
    """The experts' own type counts: some revisions have no `expert_dtype`."""
    config = {k: v for k, v in CONFIG.items() if k != "expert_dtype"} | {
        "moe_intermediate_size": 72
    }
    tensors = {}
    for layer in [f"layers.{i}" for i in range(4)] + ["mtp.0"]:
        for e in range(6):
            for part, shape in (("w1", (72, 80)), ("w3", (72, 80)), ("w2", (160, 36))):
                name = f"{layer}.ffn.experts.{e}.{part}.weight"
                tensors[name] = torch.zeros(shape, dtype=torch.int8)
    refused(tmp_path, "moe_intermediate_size is 72", "multiple of 32", config=config, **tensors)


def test_a_missing_shard(tmp_path):
    folder = dsv4_files.write_sharded(tmp_path / "model")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="model-00002-of-00003"):
        open_source(folder)


def test_a_shard_that_the_index_does_not_list(tmp_path):
    folder = dsv4_files.write_sharded(tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "layers.2.attn.wq_a.weight"
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if k != name}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match="not listed"):
        open_source(folder)


def test_a_folder_of_a_successor(tmp_path):
    config = CONFIG | {"architectures": ["DeepseekV41ForCausalLM"]}
    refused(
        tmp_path,
        "DeepseekV41ForCausalLM",
        "not supported",
        "DeepseekV4ForCausalLM",
        kind=UnsupportedModelError,
        config=config,
    )


def test_a_folder_without_a_tokenizer_opens(tmp_path):
    source = open_source(dsv4_files.write_released(tmp_path / "model"))
    assert sorted(p.name for p in source.path.iterdir()) == ["config.json", "model.safetensors"]
    assert source.config.arch == source.family.name == "deepseek4"
    assert not source.names
    assert "DSML" in source.chat_template, "ours"
    shutil.rmtree(source.path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.0.ffn_gate_exps.weight", "expected [6, 64, 160] a type of GGML, found"),
        ("blk.0.ffn_gate_tid2eid.weight", "expected [131, 2] I64 or I32, found"),
        ("blk.0.attn_q_a_norm.weight", "expected [72] F32, BF16 or F16, found"),
    ],
)
def test_a_wrong_tensor_of_a_gguf_file(name, words, tmp_path):
    def change(tensors):
        array, kind = tensors[name]
        tensors[name] = array[:-1], kind

    path = dsv4_files.write_gguf(tmp_path / "m.gguf", change=change)
    with pytest.raises(ModelFormatError) as caught:
        open_source(path)
    assert str(caught.value).startswith(f"m.gguf: tensor '{name}': ")
    assert words in str(caught.value)


@pytest.mark.parametrize("naming", ["transformers_disk", "transformers_memory"])
def test_transformers_itself_reads_its_namings(naming, tmp_path):
    """The files of the other tests are what transformers has: it computes the expected logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = dsv4_files.WRITERS[naming](tmp_path / "model")
    if naming == "transformers_disk":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(dsv4_files.load_file(folder / "model.safetensors"))
    expected = dsv4_files.load_file(dsv4_files.DATA / "expected.safetensors")
    with torch.no_grad():
        logits = model.eval()(expected["p1.tokens"][None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected["p1.logits"], atol=1e-4, rtol=0)
