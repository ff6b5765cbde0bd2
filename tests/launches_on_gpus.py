"""The command of a test that launches a kernel on several GPUs many times."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def run_on_gpus(description: str | None, run_rank: Callable[[int, int, str, int], None]) -> None:
    """Read the arguments, and run each rank in a process of its own.

    Args:
        description: of the command.
        run_rank: of rank, ranks, the place where they meet, and launches; raises if one is wrong.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.ranks, str(Path(folder) / "ranks"), args.launches)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=args.ranks)
