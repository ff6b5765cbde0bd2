"""The comparison on CPUs: real processes of Tiercel with a tiny model, and a peer made up here."""

import sys
from collections import Counter

import gguf
import msgspec
import pytest
import torch

from benchmarks import e2e_cpu, figures, synthetic_model
from benchmarks.e2e_cpu_pipe import EngineError, Worker
from tests.gguf_files import tiny_model
from tests.tiny_llm import LLAMA, NAMES, open_tiny

SIZES = e2e_cpu.Sizes(
    new_tokens=6,
    prompt_tokens=40,
    requests=3,
    batch_tokens=4,
    busy_tokens=4,
    edit_tokens=8,
    bandwidth_bytes=1 << 20,
)
PEER = """
import sys
from benchmarks.e2e_cpu_pipe import serve

class Engine:
    def __init__(self, settings):
        self.threads = settings["threads"]
        self.calls = 0
    def describe(self):
        return {"engine": "peer", "threads": self.threads}
    def decode(self, prompt, new_tokens):
        print("libraries print too")
        self.calls += 1
        ids = [7] * new_tokens
        return {"tokens_per_second": 100.0 * self.calls, "token_ids": ids}
    def read(self, prompt):
        return {"tokens_per_second": 10.0 * len(prompt)}
    def batch(self, prompts, new_tokens):
        return None
    def fail(self):
        sys.exit("on purpose")

serve(Engine)
"""
ENGINES = {"tiercel": [sys.executable, "-m", "benchmarks.e2e_cpu_tiercel"]}
PEERS = {"peer": [sys.executable, "-c", PEER], "absent": [sys.executable, "-c", "raise SystemExit"]}


@pytest.fixture
def peer():
    worker = Worker(PEERS["peer"], {"threads": 3})
    yield worker
    worker.close()


def test_every_job_has_rows(tmp_path, capfd, monkeypatch):
    """And a file of them is accepted; a peer that fails is said and left out."""
    monkeypatch.setattr(e2e_cpu, "PAUSE_S", 0.01)
    monkeypatch.setattr(e2e_cpu, "EDIT_PROMPT", "the thin man in the tent")
    path = tiny_model(tmp_path / "tiny.gguf", context=1024)
    case = e2e_cpu.Case("tiny", path, 1, can_draft=True)
    rows = e2e_cpu.measure(case, ENGINES | PEERS, e2e_cpu.JOBS, 2, SIZES)
    assert "absent is left out" in capfd.readouterr().out
    found = {(row["job"], row["engine"]): row for row in rows}
    both = "tiercel / peer"
    assert found.keys() == {
        *(
            (job, name)
            for job in ("decode", "prompt", "busy")
            for name in ("tiercel", "peer", both)
        ),
        *((job, "tiercel") for job in ("batch", "drafts", "bandwidth")),
        ("bandwidth", "peer"),
    }
    for row in rows:
        assert (row["model"], row["threads"]) == (path.name, 1)
        assert min(row.get("tokens_per_second", [1])) > 0
        assert row.get("ratio", 1) > 0
    # Of the peer's rates those of the warm-up turn, 100, 200 and 300, are left out.
    assert found["decode", "peer"]["tokens_per_second"] == [400.0, 700.0]
    assert found["prompt", "peer"]["tokens_per_second"] == [400.0, 400.0]
    assert found["busy", "peer"]["ratio"] == pytest.approx(750 / 650, rel=0.001)
    assert found["bandwidth", "peer"]["step_bytes"] == e2e_cpu.step_bytes(path)
    ours = found["decode", "tiercel"]["tokens_per_second"]
    assert found["decode", both]["ratio"] == pytest.approx(sum(ours) / 1100, rel=0.001)
    assert found["drafts", "tiercel"]["tokens_per_step"][0] >= 1
    out = tmp_path / "figures.json"
    figures.save(out, e2e_cpu.machine(), rows)
    assert len(msgspec.to_builtins(figures.read(out))["rows"]) == len(rows)


def test_a_process_that_ends_is_an_error(peer):
    assert peer.ask("describe") == {"engine": "peer", "threads": 3}
    with pytest.raises(EngineError, match="fail"):
        peer.ask("fail")
    with pytest.raises(EngineError, match="describe"):
        peer.ask("describe")


def test_prompts_differ_and_fit_the_vocabulary():
    turns = [e2e_cpu.make_turn(number, SIZES, 300, [1]) for number in range(-1, 3)]
    prompts = [tuple(ids) for turn in turns for ids in (turn.long, *turn.several)]
    assert len(set(prompts)) == 4 * (1 + SIZES.requests)
    assert all(0 < token < 300 for ids in prompts for token in ids)
    assert turns[0] == e2e_cpu.make_turn(-1, SIZES, 300, [1])


def test_the_longest_request_fits():
    for sizes, edit in ((SIZES, 0), (SIZES, 600), (e2e_cpu.Sizes(), 0)):
        context = sizes.context(edit)
        assert context % 256 == 0
        assert context > sizes.prompt_tokens
        assert context >= edit + sizes.edit_tokens


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_step(name):
    """All weights, less an embedding that is not the output matrix."""
    path = LLAMA.parent / f"{name}.gguf"
    tensors = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(path).tensors}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    assert e2e_cpu.step_bytes(path) == sum(tensors.values())


def test_missing_peers_are_said(capsys):
    found = e2e_cpu.find_engines([sys.executable, "/nowhere/python"], ["/nowhere/llama-bench"])
    assert list(found) == ["tiercel", sys.executable]
    shown = capsys.readouterr().out
    assert "/nowhere/python is missing" in shown
    assert "/nowhere/llama-bench is missing" in shown


LLAMA_BENCH = """#!{python}
import json, sys
values = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if values["-m"] == "broken":
    sys.exit("a model that cannot be read")
new, past, threads = (int(values[name]) for name in ("-n", "-d", "-t"))
rate = 1000 * int(values["-p"]) + 10 * new + past + threads / 10
row = {{"avg_ts": rate, "build_number": 1, "build_commit": "c0ffee", "cpu_info": "a processor"}}
print(json.dumps([row | {{"backends": "CPU", "flash_attn": -1}}]))
"""


def test_llama_bench_is_a_peer(tmp_path, capfd):
    """A stand-in for the program, whose rate tells the sizes of a run."""
    program = tmp_path / "llama-bench"
    program.write_text(LLAMA_BENCH.format(python=sys.executable))
    program.chmod(0o755)
    command = e2e_cpu.find_engines(None, [str(program)])[str(program)]
    worker = Worker(command, {"model": "m.gguf", "threads": 2})
    try:
        assert worker.ask("describe")["engine"] == "llama_bench"
        assert worker.ask("decode", prompt=[1, 2, 3], new_tokens=8) == {"tokens_per_second": 73.2}
        assert worker.ask("read", prompt=[1, 2]) == {"tokens_per_second": 2000.2}
        assert worker.ask("batch", prompts=[[1], [2]], new_tokens=8) is None
    finally:
        worker.close()
    worker = Worker(command, {"model": "broken", "threads": 2})
    with pytest.raises(EngineError):
        worker.ask("describe")
    assert "cannot be read" in capfd.readouterr().err


def test_bandwidth_is_of_the_buffer():
    threads = torch.get_num_threads()
    try:
        assert 0.01 < e2e_cpu.read_gbps(torch.ones(1 << 18), 1) < 10_000
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "counts"),
    [  # of published files
        ("qwen2.5-0.5b", {"Q5_0": 132, "Q8_0": 13, "Q4_K": 12, "Q6_K": 12}),
        ("qwen2.5-1.5b", {"Q4_K": 168, "Q6_K": 29}),
        ("gemma3-270m", {"Q4_0": 126, "Q8_0": 1}),
        ("smollm2-135m", {"Q4_1": 210, "Q8_0": 1}),
    ],
)
def test_types_of_synthetic_files(name, counts):
    matrices = synthetic_model.matrices(synthetic_model.SHAPES[name])
    assert Counter(matrix.kind.name for matrix in matrices) == counts


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3", "llama"])
@pytest.mark.parametrize("mixture", synthetic_model.MIXTURES)
def test_synthetic_files_run(arch, mixture, tmp_path, monkeypatch):
    """With rows of whole and of broken blocks; logits are neither NaN nor all alike."""
    shape = synthetic_model.Shape(
        96, 2, 4, 2, 64, 256, 512, 512, arch, arch != "llama", 64 * (arch == "gemma3"), mixture
    )
    monkeypatch.setitem(synthetic_model.SHAPES, "tiny", shape)
    monkeypatch.setattr(synthetic_model, "CODES", 1 << 16)
    path = tmp_path / "tiny.gguf"
    synthetic_model.write("tiny", path)
    with open_tiny(path) as llm:
        logits = llm.logits([5, 6, 7, 8])
    assert 0.05 < logits.std() < 50
