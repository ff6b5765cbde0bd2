"""llama.cpp for benchmarks/e2e_cpu.py, through either of two packages, in their own environment.

llama-cpp-python by its low-level API, or cyllama where it is not installed. A context with
llama.cpp's defaults (flash attention, repacked weights), threads = threads of batches, one
llama_decode for each token and the greedy sampler. The rate of decoding is the better of the wall
clock and llama.cpp's own timer of llama_decode alone, so that no cost of a binding counts against
it. The package cyllama decodes one request only.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.e2e_cpu_pipe import serve

# Instructions in the wheels of cyllama, counted with objdump.
WHEELS = {"0.2.18": "portable x86-64 wheel: AVX2, no AVX-512 and no VNNI instructions"}


class LlamaCpp:
    """A context of llama-cpp-python."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp  # noqa: PLC0415 - one package of two

        self.api = llama_cpp
        self.settings = settings
        self.log: list[str] = []

        @llama_cpp.llama_log_callback
        def keep(_level: int, text: bytes, _data: object) -> None:
            self.log.append(text.decode(errors="replace").strip())

        self._keep = keep  # ctypes does not hold it
        llama_cpp.llama_log_set(keep, None)
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), options)
        if not self.model:
            raise SystemExit("\n".join(self.log[-5:]))
        self.greedy = llama_cpp.llama_sampler_init_greedy()
        self.context = self._make_context(settings["context"], 1)
        self.together: Any = None  # a context for several requests, on the first use

    def _make_context(self, length: int, requests: int) -> Any:
        options = self.api.llama_context_default_params()
        options.n_ctx = length * requests
        options.n_seq_max = requests
        options.n_threads = options.n_threads_batch = self.settings["threads"]
        options.no_perf = False
        return self.api.llama_init_from_model(self.model, options)

    def describe(self) -> dict[str, Any]:
        """Versions and options."""
        instructions = self.api.llama_print_system_info().decode()
        attention = [line for line in self.log if "Flash Attention" in line]
        return {
            "engine": "llama_cpp",
            "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
            "ggml": ggml_version(Path(self.api.__file__).parent),
            "instructions": " ".join(instructions.replace(" = 1", "").replace("|", "").split()),
            "flash_attention": attention[0] if attention else "auto",
            "repacked": any("CPU_REPACK model buffer" in line for line in self.log),
            "api": "llama_decode of one token, greedy sampler",
        }

    def decode(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """Decode after a prompt."""
        api = self.api
        token_ids = [self._first(prompt)]
        one = (api.llama_token * 1)()
        api.llama_perf_context_reset(self.context)
        start = time.perf_counter()
        for _ in range(new_tokens - 1):
            one[0] = token_ids[-1]
            check(api.llama_decode(self.context, api.llama_batch_get_one(one, 1)))
            token_ids.append(api.llama_sampler_sample(self.greedy, self.context, -1))
        wall = (new_tokens - 1) / (time.perf_counter() - start)
        timer = api.llama_perf_context(self.context)
        own = 1000.0 * timer.n_eval / timer.t_eval_ms if timer.t_eval_ms else 0.0
        return {
            "tokens_per_second": max(wall, own),
            "wall_tokens_per_second": wall,
            "token_ids": token_ids,
        }

    def read(self, prompt: list[int]) -> dict[str, Any]:
        """The rate until the token after a prompt."""
        start = time.perf_counter()
        self._first(prompt)
        return {"tokens_per_second": len(prompt) / (time.perf_counter() - start)}

    def batch(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Decode after several prompts together, one llama_decode for a token of each."""
        api, count = self.api, len(prompts)
        if self.together is None:
            self.together = self._make_context(self.settings["context"], count)
        api.llama_memory_clear(api.llama_get_memory(self.together), True)
        last = []
        for request, prompt in enumerate(prompts):
            self._decode_together([(request, i, token) for i, token in enumerate(prompt)])
            last.append(api.llama_sampler_sample(self.greedy, self.together, -1))
        token_ids = [last[0]]
        start = time.perf_counter()
        for step in range(new_tokens - 1):
            places = [len(prompt) + step for prompt in prompts]
            self._decode_together(list(zip(range(count), places, last, strict=True)))
            last = [api.llama_sampler_sample(self.greedy, self.together, i) for i in range(count)]
            token_ids.append(last[0])
        seconds = time.perf_counter() - start
        return {"tokens_per_second": count * (new_tokens - 1) / seconds, "token_ids": token_ids}

    def _decode_together(self, tokens: list[tuple[int, int, int]]) -> None:
        """llama_decode of (request, position, token id), with logits of each request's last."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (request, position, token_id) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token_id, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, request
            batch.logits[i] = i + 1 == len(tokens) or tokens[i + 1][0] != request
        check(self.api.llama_decode(self.together, batch))
        self.api.llama_batch_free(batch)

    def _first(self, prompt: list[int]) -> int:
        """The token after a prompt in an empty cache."""
        api = self.api
        api.llama_memory_clear(api.llama_get_memory(self.context), False)
        tokens = (api.llama_token * len(prompt))(*prompt)
        check(api.llama_decode(self.context, api.llama_batch_get_one(tokens, len(prompt))))
        return int(api.llama_sampler_sample(self.greedy, self.context, -1))


class Cyllama:
    """A context of cyllama."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from cyllama.llama import llama_cpp  # noqa: PLC0415 - one package of two

        self.api = llama_cpp
        lines: list[str] = []
        llama_cpp.set_log_callback(lambda _, text: lines.append(text.strip()))
        llama_cpp.llama_backend_init()
        llama_cpp.ggml_backend_load_all()
        self.model = llama_cpp.LlamaModel(settings["model"], llama_cpp.LlamaModelParams())
        options = llama_cpp.LlamaContextParams()
        options.n_ctx = settings["context"]
        options.n_threads = options.n_threads_batch = settings["threads"]
        options.no_perf = False
        self.context = llama_cpp.LlamaContext(self.model, options)
        llama_cpp.disable_logging()  # also forgets the callback, which must not outlive Python
        self.attention = next((line for line in lines if "Flash Attention" in line), "auto")
        self.sampler = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
        self.sampler.add_greedy()

    def describe(self) -> dict[str, Any]:
        """Versions and options."""
        config = Path(self.api.__file__).parents[1] / "build_config.json"
        versions = json.loads(config.read_text())["versions"] if config.exists() else {}
        package = importlib.metadata.version("cyllama")
        return {
            "engine": "cyllama",
            "cyllama": package,
            "instructions": WHEELS.get(package, "unknown"),
            "llama_cpp": versions.get("llama_cpp_version"),
            "ggml": self.api.ggml_version(),
            "flash_attention": self.attention,
            "api": "LlamaContext.decode of one token, LlamaSampler greedy",
        }

    def decode(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """Decode after a prompt."""
        token_ids = [self._first(prompt)]
        self.context.reset_perf_data()
        start = time.perf_counter()
        for place in range(new_tokens - 1):
            batch = self.api.llama_batch_get_one(token_ids[-1:], len(prompt) + place)
            self.context.decode(batch)
            token_ids.append(self.sampler.sample(self.context, -1))
        wall = (new_tokens - 1) / (time.perf_counter() - start)
        timer = self.context.get_perf_data()
        own = 1000.0 * timer["n_eval"] / timer["t_eval_ms"] if timer["t_eval_ms"] else 0.0
        return {
            "tokens_per_second": max(wall, own),
            "wall_tokens_per_second": wall,
            "token_ids": token_ids,
        }

    def read(self, prompt: list[int]) -> dict[str, Any]:
        """The rate until the token after a prompt."""
        start = time.perf_counter()
        self._first(prompt)
        return {"tokens_per_second": len(prompt) / (time.perf_counter() - start)}

    def batch(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Nothing: one request only."""

    def _first(self, prompt: list[int]) -> int:
        self.context.kv_cache_clear(False)
        self.context.decode(self.api.llama_batch_get_one(prompt))
        return int(self.sampler.sample(self.context, -1))


def ggml_version(package: Path) -> str:
    """Version and commit of the ggml library in a package."""
    for path in sorted(package.glob("lib/*ggml-base.*")):
        library = ctypes.CDLL(str(path))
        library.ggml_version.restype = library.ggml_commit.restype = ctypes.c_char_p
        return f"{library.ggml_version().decode()}, {library.ggml_commit().decode()}"
    return "unknown"


def check(status: int) -> None:
    """Stop where llama_decode failed."""
    if status:
        raise RuntimeError(f"llama_decode returned {status}")


def make(settings: dict[str, Any]) -> LlamaCpp | Cyllama:
    """The engine of the installed package."""
    try:
        return LlamaCpp(settings)
    except ModuleNotFoundError:
        return Cyllama(settings)


if __name__ == "__main__":
    serve(make)
