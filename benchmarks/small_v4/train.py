"""Training of the small model: one GPU, a time limit, the released formats from the first step.

The learning rate is a function of the share of the time (or of the steps) that has passed, so the
schedule always ends, whatever the machine. On a GPU a step is one CUDA graph: it has about 15,000
small launches, most of them of the normalisations of stream mixes, and the host cannot keep up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from benchmarks.small_v4.checkpoint import rounded_weights
from benchmarks.small_v4.model import Result, SmallV4

AHEAD = 2  # tokens after a sequence: the targets of the model and of the draft block
DRAFT_WEIGHT = 0.3  # of the draft block's loss, as in arXiv 2412.19437
BALANCE_RATE = 1e-3  # of the routers' biases a step, as there
BALANCED_SHARE = 0.9  # of the training: biases rest in the end
WARM_UP_SHARE = 0.02
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices
MAX_NORM = 1.0  # of all gradients
SYNC_STEPS = 8  # results are read this often: so far the host runs ahead of the device
NUM_EVALUATIONS = 12
EVAL_BATCHES = 4


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        seconds: of training, > 0.
        steps: at most; None for no limit.
        batch: sequences of a step.
        length: tokens of a sequence.
        peak_rate: the highest learning rate.
        seed: of the weights, the hash tables and the order of the text.
        uses_graph: whether a step on a GPU is captured.
    """

    seconds: float
    steps: int | None = None
    batch: int = 16
    length: int = 1024
    peak_rate: float = 3e-3
    seed: int = 0
    uses_graph: bool = True


def rate_at(share: float, peak: float) -> float:
    """The learning rate after a share of the training: warm-up, then a line to a hundredth."""
    if share < WARM_UP_SHARE:
        return peak * (0.05 + 0.95 * share / WARM_UP_SHARE)
    left = (1 - share) / (1 - WARM_UP_SHARE)
    return peak * max(0.01, left)


class Trainer:
    """A model in training, and the text.

    Attributes:
        curve: figures of the steps that were evaluated.
        graph_refusal: why steps are not a CUDA graph; "" if they are.
    """

    def __init__(self, model: SmallV4, text: Tensor, held_out: Tensor, settings: Settings) -> None:
        """Take the tokens (n,) of the text and of what is held out, on the model's device."""
        self.model = model
        self.curve: list[dict[str, Any]] = []
        self.graph_refusal = "not on a GPU" if text.device.type != "cuda" else ""
        self._text, self._settings = text, settings
        device = text.device
        self._held_out = _windows(held_out, settings)
        self._balance_rate = torch.zeros((), device=device)
        self._batch = torch.zeros(
            settings.batch, settings.length + AHEAD, dtype=torch.int64, device=device
        )
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        on_gpu = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=torch.zeros((), device=device),  # a captured step reads it
            betas=BETAS,
            fused=on_gpu,
            capturable=on_gpu,
        )
        self._random = torch.Generator(device).manual_seed(settings.seed)

    def run(self, save: Callable[[], None], saves_at: tuple[float, ...] = (0.5, 0.8)) -> None:
        """Train until the time or the steps are over.

        Args:
            save: called when these shares of the training have passed, and at the end.
            saves_at: ascending.
        """
        settings, start = self._settings, time.perf_counter()
        step, pending, evaluations = 0, list(saves_at), 0
        replay: Callable[[], Tensor] = self._step
        share = 0.0
        while share < 1:
            if step == 3 and not self.graph_refusal:
                replay = self._capture()
            self._set_rate(rate_at(share, settings.peak_rate))
            self._balance_rate.fill_(BALANCE_RATE if share < BALANCED_SHARE else 0.0)
            self._fill_batch()
            losses = replay()
            step += 1
            if step % SYNC_STEPS == 0 or step <= 3:
                found = losses.tolist()
                if not all(loss == loss for loss in found):
                    raise SystemExit(f"the loss is NaN in step {step}")
            share = (time.perf_counter() - start) / settings.seconds
            if settings.steps is not None:
                share = max(share, step / settings.steps)
            if share * NUM_EVALUATIONS >= evaluations or share >= 1:
                evaluations = int(share * NUM_EVALUATIONS) + 1
                self._note(step, time.perf_counter() - start, losses.tolist())
            if pending and share >= pending[0]:
                pending.pop(0)
                save()
        save()

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"].fill_(rate)

    def _fill_batch(self) -> None:
        last = self._text.numel() - self._batch.shape[1]
        device = self._text.device
        size = (self._batch.shape[0], 1)
        starts = torch.randint(0, last + 1, size, generator=self._random, device=device)
        self._batch.copy_(self._text[starts + torch.arange(self._batch.shape[1], device=device)])

    def _step(self) -> Tensor:
        """One step: (3,) losses of the model, of the draft block, and of the indexers."""
        self._optimizer.zero_grad(set_to_none=True)
        losses = self._losses(self._batch)
        total = losses[0] + DRAFT_WEIGHT * losses[1] + losses[2]
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=True)
        self._optimizer.step()
        for gate in self.model.gates():
            gate.balance(self._balance_rate)
        return losses.detach()

    def _capture(self) -> Callable[[], Tensor]:
        """Make a step one CUDA graph, or say why it is not."""
        if not self._settings.uses_graph:
            self.graph_refusal = "switched off"
            return self._step
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)
            self._optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                losses = self._step()
        except RuntimeError as error:
            self.graph_refusal = str(error).partition("\n")[0]
            print(f"no CUDA graph: {self.graph_refusal}", flush=True)
            return self._step

        def replay() -> Tensor:
            graph.replay()
            return losses

        return replay

    def _losses(self, batch: Tensor) -> Tensor:
        ids, following, after = batch[:, :-2], batch[:, 1:-1], batch[:, 2:]
        result = self._pass(ids, following)
        return torch.stack(
            (_cross_entropy(result.logits, following), _cross_entropy(result.draft_logits, after),
             result.index_loss)
        )  # fmt: skip

    def _pass(self, ids: Tensor, following: Tensor) -> Result:
        device = ids.device.type
        # Without a cache of casts: its entries would outlive the graph that made them.
        with torch.autocast(device, torch.bfloat16, device == "cuda", cache_enabled=False):
            return functional_call(self.model, rounded_weights(self.model), (ids, following))

    @torch.no_grad()
    def _evaluate(self) -> list[float]:
        found = [self._losses(batch) for batch in self._held_out]
        return torch.stack(found).mean(0).tolist()

    def _note(self, step: int, seconds: float, losses: list[float]) -> None:
        """Add a row to the curve."""
        held_out = self._evaluate()
        settings = self._settings
        names = ("loss", "draft_loss", "index_loss")
        row: dict[str, Any] = {"name": "step", "step": step, "elapsed_seconds": round(seconds, 1)}
        row["tokens_seen"] = step * settings.batch * settings.length
        for kind, values in (("train", losses), ("held_out", held_out)):
            for name, value in zip(names, values, strict=True):
                row[f"{kind}_{name}_nats_per_token"] = round(value, 4)
        self.curve.append(row)
        print(*(f"{key}={value}" for key, value in row.items() if key != "name"), flush=True)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _windows(tokens: Tensor, settings: Settings) -> list[Tensor]:
    """Batches of sequences that are spread evenly over the tokens."""
    width = settings.length + AHEAD
    count = settings.batch * EVAL_BATCHES
    last = tokens.numel() - width
    starts = torch.arange(count, device=tokens.device) * max(1, last // count)
    rows = starts.clamp(max=last)[:, None] + torch.arange(width, device=tokens.device)
    return list(tokens[rows].long().split(settings.batch))
