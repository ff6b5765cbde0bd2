"""The environment: the meaning of each variable; a value that cannot be read is refused."""

import os
import re
from pathlib import Path

import platformdirs
import pytest

from tiercel import env
from tiercel.errors import ArgumentError

NAMES = ("TIERCEL_OFFLINE", "TIERCEL_MODEL", "TIERCEL_CACHE")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"), [(None, None), ("", None), ("0", False), ("1", True)]
)
def test_flag(monkeypatch, text, expected, default):
    if text is not None:
        monkeypatch.setenv("TIERCEL_X", text)
    else:
        monkeypatch.delenv("TIERCEL_X", raising=False)
    assert env.read_flag("TIERCEL_X", default=default) is (
        default if text in (None, "") else expected
    )


@pytest.mark.parametrize("text", ["yes", "true", "2", " 1", "1 ", "-1", "01"])
def test_unreadable_flag_names_variable_and_value(monkeypatch, text):
    monkeypatch.setenv("TIERCEL_OFFLINE", text)
    with pytest.raises(ArgumentError, match="TIERCEL_OFFLINE=") as caught:
        env.is_offline()
    assert repr(text) in str(caught.value)
    assert caught.value.hint == "Use 0 or 1."


@pytest.mark.parametrize(
    ("text", "expected"), [("", 7), ("0", 0), ("128", 128), ("-2", -2), ("+15", 15), ("007", 7)]
)
def test_integer(monkeypatch, text, expected):
    monkeypatch.setenv("TIERCEL_X", text)
    assert env.read_integer("TIERCEL_X", default=7) == expected
    monkeypatch.delenv("TIERCEL_X")
    assert env.read_integer("TIERCEL_X", default=7) == 7


@pytest.mark.parametrize("text", ["1.0", "1e3", "0x10", "1_000", " 5", "-", "٣", "9" * 30])
def test_unreadable_integer_names_variable_and_value(monkeypatch, text):
    monkeypatch.setenv("TIERCEL_X", text)
    with pytest.raises(ArgumentError, match=r"TIERCEL_X='.*' cannot be read"):
        env.read_integer("TIERCEL_X", default=7)


def test_offline(monkeypatch):
    assert env.is_offline() is False
    monkeypatch.setenv("TIERCEL_OFFLINE", "1")
    assert env.is_offline() is True


def test_paths(monkeypatch, tmp_path):
    assert env.default_model_path() is None
    assert env.cache_dir() == Path(platformdirs.user_cache_dir("tiercel", appauthor=False))
    for name in ("TIERCEL_MODEL", "TIERCEL_CACHE"):
        monkeypatch.setenv(name, "")
    assert env.default_model_path() is None
    assert env.cache_dir() == Path(platformdirs.user_cache_dir("tiercel", appauthor=False))
    monkeypatch.setenv("TIERCEL_MODEL", str(tmp_path / "a b.gguf"))
    monkeypatch.setenv("TIERCEL_CACHE", str(tmp_path / "none yet"))
    assert env.default_model_path() == tmp_path / "a b.gguf"
    assert env.cache_dir() == tmp_path / "none yet"
    assert not env.cache_dir().exists()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TIERCEL_API_KEYS", "TIERCEL_API_KEY"),
        ("TIERCEL_SERVE_PORT", "TIERCEL_PORT"),
        ("TIERCEL_MEGA_KERNEL", "TIERCEL_MEGAKERNEL"),
        ("TIERCEL_CACHE_DIR", "TIERCEL_CACHE"),
        ("TIERCEL_SERVICE_HOST", None),
        ("TIERCEL_", None),
    ],
)
def test_a_variable_that_nothing_reads(monkeypatch, name, nearest):
    for other in [other for other in os.environ if other.startswith("TIERCEL_")]:
        monkeypatch.delenv(other)
    options = ("TIERCEL_PORT", "TIERCEL_API_KEY", "TIERCEL_HOST")
    for known in ("TIERCEL_PORT", "TIERCEL_PDL", "TIERCEL_FAULTS"):
        monkeypatch.setenv(known, "1")
    monkeypatch.setenv(name, "")
    assert env.unknown_variables(options) == ()  # empty counts as unset
    monkeypatch.setenv(name, "1")
    assert env.unknown_variables(options) == (name,)
    assert env.unknown_variables(()) == tuple(sorted((name, "TIERCEL_PORT")))
    assert env.nearest_variable(name, options) == nearest


def test_every_variable_of_the_source_is_known():
    source = Path(env.__file__).read_text()
    read = set(re.findall(r'(?:read_flag|read_integer|environ.get)\(\s*"(TIERCEL_\w+)"', source))
    assert len(read) > 15
    assert read <= {*env._SWITCHES, *env._SETTINGS}


SECRETS = (
    *("TIERCEL_API_KEY", "TIERCEL_API_KEY_FILE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
)


def test_child_environment_is_a_copy_without_secrets(monkeypatch):
    monkeypatch.setenv("TIERCEL_MODEL", "x")
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    without = dict(os.environ)
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret-{name}")
    child = env.child_environment()
    assert child == without
    tokens = {name: f"secret-{name}" for name in SECRETS if "TOKEN" in name}
    assert env.child_environment(has_hub_token=True) == without | tokens
    child["TIERCEL_MODEL"] = "y"
    assert os.environ["TIERCEL_MODEL"] == "x"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"TIERCEL_MEGAKERNEL": "1"}, True),
        ({"TIERCEL_MEGAKERNEL": "0"}, False),
        ({"TIERCEL_EXACT": "1"}, False),
        ({"TIERCEL_MEGAKERNEL": "1", "TIERCEL_EXACT": "0"}, True),
        ({"TIERCEL_INT8_ACTIVATIONS": "0"}, False),
    ],
    ids=str,
)
def test_the_kernel_for_whole_steps_can_be_forbidden(monkeypatch, values, expected):
    for name in ("TIERCEL_MEGAKERNEL", "TIERCEL_EXACT", "TIERCEL_INT8_ACTIVATIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert env.has_megakernel() is expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"TIERCEL_DECODE_CHAIN": "1"}, True),
        ({"TIERCEL_DECODE_CHAIN": "0"}, False),
        ({"TIERCEL_DECODE_CHAIN": "1", "TIERCEL_EXACT": "1"}, False),
    ],
    ids=str,
)
def test_the_kernel_between_attentions_can_be_forbidden(monkeypatch, values, expected):
    for name in ("TIERCEL_DECODE_CHAIN", "TIERCEL_EXACT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert env.has_fused_layer_tail() is expected


@pytest.mark.parametrize("value", ["0", "1"])
def test_exact_products_stay_with_the_reader_of_16_tokens(monkeypatch, value):
    monkeypatch.delenv("TIERCEL_PREFILL_GEMM", raising=False)
    monkeypatch.setenv("TIERCEL_EXACT", value)
    assert env.has_prefill_gemm() is (value == "0")


@pytest.mark.parametrize(
    ("mmq", "int8", "expected"),
    [("", "", False), ("0", "", False), ("1", "", True), ("1", "0", False)],
)
def test_tokens_of_8_bits_are_asked_for_and_can_be_forbidden(monkeypatch, mmq, int8, expected):
    monkeypatch.setenv("TIERCEL_PREFILL_MMQ", mmq)
    monkeypatch.setenv("TIERCEL_INT8_ACTIVATIONS", int8)
    assert env.has_prefill_mmq() is expected


def test_switches_that_are_set(monkeypatch):
    for name in env.switches():
        monkeypatch.delenv(name)
    assert env.switches() == {}
    monkeypatch.setenv("TIERCEL_PREFILL_MMQ", "0")
    monkeypatch.setenv("TIERCEL_PDL", "")
    assert env.switches() == {"TIERCEL_PREFILL_MMQ": "0"}
    monkeypatch.setenv("TIERCEL_PREFILL_MMQ", "never")
    for read in (env.switches, env.has_prefill_mmq):
        with pytest.raises(ArgumentError, match="TIERCEL_PREFILL_MMQ='never' cannot be read"):
            read()


# Every switch: its reader, its default, and other switches that forbid it.
SWITCHES = {
    "OFFLINE": (env.is_offline, False, {}),
    "PREFIX_CACHE": (env.has_prefix_cache, True, {}),
    "CUDA_GRAPH": (env.has_cuda_graphs, True, {}),
    "Q4K_SOA": (env.has_q4k_soa, True, {}),
    "PDL": (env.has_dependent_launch, True, {}),
    "PREFILL_GEMM": (env.has_prefill_gemm, True, {"EXACT": "1"}),
    "FUSED_GEMM": (env.has_fused_gemm, True, {}),
    "BLOCK_KERNEL": (env.has_block_kernel, True, {}),
    "MOE_KERNEL": (env.has_moe_kernel, True, {}),
    "MOE_TILES": (env.has_moe_tiles, True, {"MOE_KERNEL": "0"}),
    "MOE_GEMM": (env.has_moe_gemm, True, {"MOE_TILES": "0", "MOE_KERNEL": "0", "EXACT": "1"}),
    "PREFILL_MMQ": (env.has_prefill_mmq, False, {"INT8_ACTIVATIONS": "0"}),
    "EXACT": (env.is_exact, False, {}),
    "INT8_ACTIVATIONS": (env.has_int8_activations, True, {}),
    "MEGAKERNEL": (env.has_megakernel, True, {"EXACT": "1", "INT8_ACTIVATIONS": "0"}),
    "MEGAKERNEL_PAIRS": (
        env.has_megakernel_pairs,
        False,
        {"MEGAKERNEL": "0", "EXACT": "1", "INT8_ACTIVATIONS": "0"},
    ),
    "ONE_COPY": (
        env.has_one_copy,
        False,
        {"MEGAKERNEL": "0", "EXACT": "1", "INT8_ACTIVATIONS": "0"},
    ),
    "DECODE_CHAIN": (env.has_fused_layer_tail, True, {"EXACT": "1"}),
    "BATCH_STEP": (env.has_batch_step, False, {}),
    "SPARSE_ATTENTION_KERNEL": (env.has_sparse_attention_kernel, True, {}),
    "INDEXER_KERNEL": (env.has_indexer_kernel, True, {}),
    "SMALL_ALL_REDUCE": (env.has_small_all_reduce, True, {}),
    "SYNC_DEBUG": (env.is_sync_debug, False, {}),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_hears_its_own_name_and_what_forbids_it(name, monkeypatch):
    read, default, forbidden_by = SWITCHES[name]
    for other in SWITCHES:
        monkeypatch.delenv(f"TIERCEL_{other}", raising=False)
    assert read() is default
    for value in ("0", "1"):
        monkeypatch.setenv(f"TIERCEL_{name}", value)
        assert read() is (value == "1")
        for other in SWITCHES.keys() - {name}:
            for setting in ("0", "1"):
                with monkeypatch.context() as patch:
                    patch.setenv(f"TIERCEL_{other}", setting)
                    is_forbidden = forbidden_by.get(other) == setting
                    assert read() is (value == "1" and not is_forbidden), (other, setting)


@pytest.mark.parametrize("default", [True, False])
def test_overlap_has_the_default_of_its_caller(default, monkeypatch):
    monkeypatch.delenv("TIERCEL_OVERLAP", raising=False)
    assert env.has_overlap(default=default) is default
    for value in ("0", "1"):
        monkeypatch.setenv("TIERCEL_OVERLAP", value)
        assert env.has_overlap(default=default) is (value == "1")


def test_reports_name_every_switch_of_an_engine(monkeypatch):
    names = {*SWITCHES, "OVERLAP"} - {"OFFLINE"}
    for name in names:
        monkeypatch.setenv(f"TIERCEL_{name}", "1")
    assert env.switches() == {f"TIERCEL_{name}": "1" for name in names}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "https://huggingface.co"),
        ("", "https://huggingface.co"),
        ("https://mirror.example/hub//", "https://mirror.example/hub"),
        ("http://localhost:1", "http://localhost:1"),
    ],
)
def test_the_address_of_the_hub(value, expected, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_ENDPOINT", value)
    assert env.hub_endpoint() == expected


def test_integers_of_18_digits(monkeypatch):
    for text in ("9" * 18, "-" + "9" * 18):
        monkeypatch.setenv("TIERCEL_X", text)
        assert env.read_integer("TIERCEL_X", default=0) == int(text)
    monkeypatch.setenv("TIERCEL_X", "1" * 19)
    with pytest.raises(ArgumentError, match="cannot be read"):
        env.read_integer("TIERCEL_X", default=0)


def test_multicast_is_forbidden_whatever_was_set(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    env.forbid_multicast()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_the_monitor_of_nccl_is_forbidden_whatever_was_set(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    env.forbid_nccl_monitor()
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_a_wait_that_the_user_set_stays(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    env.shorten_openmp_spins()
    assert os.environ["GOMP_SPINCOUNT"] == "3000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    env.shorten_openmp_spins()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.setenv("TIERCEL_FAULTS", "die")
    assert env.faults() == "die"
    monkeypatch.delenv("TIERCEL_FAULTS")
    assert env.faults() == ""
