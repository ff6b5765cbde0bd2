"""Tiercel for benchmarks/e2e_cpu.py: its public API, greedy, in a process of its own."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.e2e_cpu_pipe import serve
from tiercel import LLM, SamplingParams
from tiercel.bench.environment import installed_version
from tiercel.request.output import RequestOutput


class Tiercel:
    """An LLM. Rates are of the wall clock: they include sampling and text."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.llm = LLM(
            settings["model"],
            device="cpu",
            max_model_len=settings["context"],
            max_num_seqs=settings["requests"],
            threads=settings["threads"],
            spec=settings["spec"],
        )

    def describe(self) -> dict[str, Any]:
        """Versions, options and the size of the vocabulary."""
        return {
            "engine": "tiercel",
            "kernels": native_variant(),
            "dtype": str(self.llm.config.dtype),
            "torch": installed_version("torch"),
            "vocab_size": self.llm.source.config.vocab_size,
        }

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self.llm.encode(text, add_special_tokens=True)

    def encode_chat(self, text: str) -> list[int]:
        """The token ids of a conversation that a text opens."""
        return self.llm.encode_chat([{"role": "user", "content": text}])

    def decode(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """Decode after a prompt."""
        return self.batch([prompt], new_tokens)

    def batch(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Decode after several prompts together: the rate from the last first token to the end."""
        outputs = self._generate(prompts, new_tokens)
        start = max(output.metrics.first_token_s or 0.0 for output in outputs)
        seconds = max(output.metrics.finished_s for output in outputs) - start
        return {
            "tokens_per_second": len(prompts) * (new_tokens - 1) / seconds,
            "token_ids": outputs[0].outputs[0].token_ids,
        }

    def read(self, prompt: list[int]) -> dict[str, Any]:
        """The rate until the token after a prompt."""
        (output,) = self._generate([prompt], 1)
        return {"tokens_per_second": len(prompt) / (output.metrics.first_token_s or 0.0)}

    def drafts(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """Decode the same answer without and with draft tokens."""
        plain = self._rate(prompt, new_tokens, 0)
        before = self.llm.draft_counts
        drafted = self._rate(prompt, new_tokens, None)
        after = self.llm.draft_counts
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        steps = after.num_steps - before.num_steps
        return {
            "plain_tokens_per_second": plain,
            "tokens_per_second": drafted,
            "tokens_per_step": 1 + accepted / max(1, steps),
        }

    def _rate(self, prompt: list[int], new_tokens: int, drafts: int | None) -> float:
        (output,) = self._generate([prompt], new_tokens, drafts)
        seconds = output.metrics.finished_s - (output.metrics.first_token_s or 0.0)
        return (new_tokens - 1) / seconds

    def _generate(
        self, prompts: list[list[int]], new_tokens: int, drafts: int | None = None
    ) -> list[RequestOutput]:
        params = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, num_spec_tokens=drafts
        )
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


def native_variant() -> str:
    """The variant of the native library, or what computes without it."""
    try:
        found = importlib.import_module("tiercel.kernels.native.library")
    except ModuleNotFoundError:
        return "PyTorch"
    return str(getattr(found.library(), "variant", "PyTorch"))


if __name__ == "__main__":
    serve(Tiercel)
