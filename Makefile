# `make demo` and `make test` install what they need; they require Python 3.11 or newer and make.

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; print("$(name)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS_VENV ?= .venv-clients
AARCH64 ?= .aarch64
CLIENTS := "litellm>=1.100,<2" mcp "lm-eval[api]==0.4.13" "instructor==1.17.*"
# pip compiles bytecode on one core, which is half of its time: COMPILE does it on all cores afterwards,
# without a third of the files: tests of libraries, and what is rarely imported.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	-c constraints.txt
UNUSED := /tests?/|/transformers/models/|/torch/(_inductor|ao|onnx|testing)/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib || true
BENCH ?= dequantize
PROMPT ?= Why is the sky blue? Answer in three sentences.

# The native library of an editable installation follows its sources; without it PyTorch computes.
NATIVE := $(BIN)/python -m tiercel.kernels.native.build --quiet || true

.PHONY: demo test test-gpu sanitize test-clients test-aarch64 mutants lint bench-cpu wheel clean

# Answers with the default model on the terminal; the first run downloads the model.
demo: $(VENV)/.demo
	@$(NATIVE)
	@$(BIN)/tiercel generate --chat "$(PROMPT)" --max-tokens 120 --temperature 0

# Hundreds of processes import the same modules: they are compiled once, even where the shell asks for
# no bytecode.
test: lint
	@$(NATIVE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Tests that need a GPU; without one they are skipped. Modules without such tests
# are not imported: a machine for kernels may lack browsers and clients.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu -n 6 --dist loadfile \
		$$(grep -rl 'mark\.gpu' --include='test_*.py' tests)

# Runs kernels under compute-sanitizer, on a machine with a GPU.
sanitize: $(VENV)/.dev
	$(BIN)/python -m benchmarks.sanitize

# litellm, lm-eval and instructor need an older OpenAI client and have a separate environment.
# The server and pytest run in the usual environment.
test-clients: $(VENV)/.dev $(CLIENTS_VENV)/.clients
	CLIENTS_PYTHON=$(CLIENTS_VENV)/bin/python $(BIN)/python -m pytest -m clients tests/clients

# Runs the native library's tests for aarch64 under qemu; needs Debian's packages qemu-user and mmdebstrap.
test-aarch64: $(VENV)/.dev $(AARCH64)/.machine
	@$(NATIVE)
	AARCH64_MACHINE=$(AARCH64) $(BIN)/python -m pytest -m qemu tests/kernels/native

# Mutation tests: one-line faults, each of which must make a test fail. 18 minutes on two cores.
mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutations.run

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# Runs one benchmark on this machine's CPU: make bench-cpu BENCH=dequantize
bench-cpu: $(VENV)/.demo
	@$(NATIVE)
	$(BIN)/python -m benchmarks.$(BENCH) --device cpu

# Builds dist/tiercel-*.whl.
wheel: $(VENV)/.python
	@rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) $(AARCH64) build dist tiercel/kernels/native/lib .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer: python3 is older or missing. Install one, or run make PYTHON=/path/to/python." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# With a GPU (nvidia-smi works) the CUDA extra is installed too.
$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing Tiercel into $(VENV); the first time takes a few minutes." >&2
	@if nvidia-smi -L >/dev/null 2>&1; then extra='[cuda]'; else extra=''; fi; \
		$(PIP_INSTALL) -e ".$$extra"
	@$(COMPILE)
	@touch $@

$(CLIENTS_VENV)/.clients: $(VENV)/.python
	@echo "Installing the clients into $(CLIENTS_VENV)." >&2
	$(PYTHON) -m venv --clear $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt $(CLIENTS)
	@touch $@

$(AARCH64)/.machine: $(VENV)/.python tests/kernels/native/aarch64.py
	rm -rf $(AARCH64)
	$(BIN)/python -m tests.kernels.native.aarch64 $(AARCH64)
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing Tiercel and its development tools into $(VENV); the first time takes a few minutes." >&2
	@if nvidia-smi -L >/dev/null 2>&1; then extra=',cuda'; else extra=''; fi; \
		$(PIP_INSTALL) -e ".[dev$$extra]"
	@$(COMPILE)
	@touch $@
