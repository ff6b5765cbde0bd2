r"""Learns the small model's tokenizer: BPE of bytes, split as DeepSeek splits, 4,096 tokens.

    python -m benchmarks.small_v4.tokenizer tests/data/small_v4

The file is part of the repository, so that checkpoints of different machines have the same tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.small_v4.corpus import BOS, EOS, read_corpus
from tiercel.text.tokenizer_build import SPLITS

VOCAB_SIZE = 4096
_BAR, _SPACE = "\uff5c", "\u2581"  # as DeepSeek writes them in tokens
SPECIAL_TOKENS = (
    f"<{_BAR}begin{_SPACE}of{_SPACE}sentence{_BAR}>",
    f"<{_BAR}end{_SPACE}of{_SPACE}sentence{_BAR}>",
    f"<{_BAR}User{_BAR}>",
    f"<{_BAR}Assistant{_BAR}>",
    "<think>",
    "</think>",
    f"{_BAR}DSML{_BAR}",
)


def learn(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn a tokenizer; the special tokens have the lowest ids."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in SPLITS["deepseek-v3"]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos_token": SPECIAL_TOKENS[BOS], "eos_token": SPECIAL_TOKENS[EOS]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names) + "\n")


def main() -> None:
    """Learn from the files of this machine, but those held out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    corpus = read_corpus()
    write(learn(document.text for document in corpus.train), options.folder)
    size = sum(len(document.text) for document in corpus.train)
    print(f"{len(corpus.train)} files, {size / 1e6:.1f} M characters")


if __name__ == "__main__":
    main()
