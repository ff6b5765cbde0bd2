"""Train a small DeepSeek-V4 on text, and write it as a checkpoint in the released formats.

    python -m benchmarks.small_v4 --device cuda --out small_v4 --curve small_v4.json
    python -m benchmarks.small_v4 --device cpu --out small_v4 --steps 20 --batch 1 --length 256

It has every kind of layer of DeepSeek-V4 and its MTP block (shape.py), and learns from this
repository and Python's library (corpus.py), so what it writes, drafts and loses by a conversion is
real. `tiercel generate --model small_v4` runs it. --seconds is the time of training alone: reading
the text before and writing after take a minute together. --unrounded writes a second folder with
the weights before their rounding to FP8 and FP4, in BF16, to tell what the rounding costs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.common import environment
from benchmarks.figures import save
from benchmarks.small_v4.checkpoint import write_checkpoint
from benchmarks.small_v4.corpus import ROOT, encode, read_corpus
from benchmarks.small_v4.model import SmallV4
from benchmarks.small_v4.shape import CONFIG
from benchmarks.small_v4.train import AHEAD, Settings, Trainer
from tiercel.models.deepseek_v4 import read_hf

TOKENIZER = ROOT / "tests/data/small_v4"
PLAIN_CONFIG = {
    key: value
    for key, value in CONFIG.items()
    if key not in ("quantization_config", "expert_dtype")
}


def make_trainer(settings: Settings, device: torch.device) -> tuple[Trainer, dict[str, Any]]:
    """Read the text and make the model; returns what is trained, and figures of the text."""
    start = time.perf_counter()
    corpus = read_corpus()
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    text, held_out = (encode(tokenizer, part) for part in (corpus.train, corpus.held_out))
    torch.manual_seed(settings.seed)
    model = SmallV4(read_hf(CONFIG, "shape.py"), settings.length + AHEAD)
    row = {
        "name": "text",
        "files": len(corpus.train),
        "characters": sum(len(document.text) for document in corpus.train),
        "tokens": text.numel(),
        "held_out_files": len(corpus.held_out),
        "held_out_tokens": held_out.numel(),
        "skipped_files": corpus.num_skipped,
        "sha256": corpus.digest,
        "parameters": sum(p.numel() for p in model.parameters()),
        "read_seconds": round(time.perf_counter() - start, 1),
    }
    parts = (part.to(device) for part in (text, held_out))
    return Trainer(model.to(device), *parts, settings), row


def main() -> None:
    """Train, write the checkpoint, and keep the curve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--unrounded", type=Path, help="folder of the weights in BF16")
    parser.add_argument("--curve", type=Path, help="JSON of losses by step")
    parser.add_argument("--seconds", type=float, default=420.0, help="of training")
    parser.add_argument("--steps", type=int, help="of training, at most")
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--length", type=int, default=Settings.length)
    parser.add_argument("--rate", type=float, default=Settings.peak_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-graph", action="store_true", help="launch each kernel of a step")
    options = parser.parse_args()
    settings = Settings(
        options.seconds,
        options.steps,
        options.batch,
        options.length,
        options.rate,
        options.seed,
        not options.no_graph,
    )
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    head = environment(device)
    trainer, text = make_trainer(settings, device)
    print(text, flush=True)

    def write() -> None:
        size = write_checkpoint(trainer.model, CONFIG, TOKENIZER, options.out)
        if options.unrounded is not None:
            write_checkpoint(trainer.model, PLAIN_CONFIG, TOKENIZER, options.unrounded)
        rows = [text | {"checkpoint_bytes": size, "graph_refusal": trainer.graph_refusal}]
        save(options.curve, head, rows + trainer.curve)
        print(f"{options.out}: {size / 1e6:.2f} MB", flush=True)

    trainer.run(write)


if __name__ == "__main__":
    main()
