# Needs python3 with venv and pip. Another interpreter: make PYTHON=python3.13 ...
PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.finished
UNFINISHED := $(VENV)/.unfinished

# fla and triton live apart: where triton can be imported without a GPU, other packages take kernels that crash there.
FLA_VENV := $(VENV)/fla
FLA_STAMP := $(FLA_VENV)/.finished
TRITON := triton==3.9.0

# One thread for each of the two workers, no waiting for a network, no window for a plot.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 MPLBACKEND=Agg
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n 2 -q

.DEFAULT_GOAL := help
.PHONY: help setup demo test check test-slow test-fla outside-test gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv with the tested versions; runs once, and again when the pins change

# A mark left from an interrupted set-up means that nothing in the folder can be trusted: start afresh.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "modeling_k3 needs Python 3.11 or newer: make PYTHON=python3.11 setup")'
	@if [ -e $(UNFINISHED) ]; then echo "an earlier set-up was interrupted: starting afresh"; rm -rf $(VENV); fi
	@mkdir -p $(VENV) && rm -f $(STAMP) && touch $(UNFINISHED)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm $(UNFINISHED) && touch $(STAMP)

demo: $(STAMP) ## show a small trained model; ARGS="--train" trains one from scratch; options in ARGS="..."
	$(BIN)/k3 demo $(ARGS)

test: $(STAMP) ## all tests but the slow ones and those for a GPU (below 10 minutes on two cores)
	$(PYTEST) -m "not gpu and not slow" $(ARGS)

check: $(STAMP) ## lint, format, unit tests (below 1 minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m "not gpu and not slow" tests/unit

# pytest ends with 5 when there is nothing to run, which is no failure here.
test-slow: $(STAMP) ## the slow tests
	$(PYTEST) -m "slow and not gpu" $(ARGS) || [ $$? -eq 5 ]

$(FLA_STAMP): setup.cfg pyproject.toml constraints.txt
	@rm -rf $(FLA_VENV)
	$(PYTHON) -m venv $(FLA_VENV)
	$(FLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fla]' pytest '$(TRITON)'
	@touch $(FLA_STAMP)

test-fla: $(FLA_STAMP) ## fla's kernels on the CPU, under Triton's interpreter (1 minute)
	$(TEST_ENV) TRITON_INTERPRET=1 $(FLA_VENV)/bin/python -m pytest -q tests/interpreter/fla_kernels.py $(ARGS)

# The one place where a test fetches a package: kept in .venv, never in the tree.
OUTSIDE := $(VENV)/outside

outside-test: $(STAMP) ## transformers' own common tests over our classes (1 minute; fetches their source distribution)
	$(BIN)/python -m tests.outside.fetch $(OUTSIDE)
	OUTSIDE_TESTS=$(OUTSIDE) $(PYTEST) -rfE tests/outside/transformers_common.py tests/outside/transformers_tokenizers.py $(ARGS)

gpu-check: $(STAMP) ## for whoever has a GPU: which kernels are right on it, and how fast they are
	$(BIN)/python -m modeling_k3.readiness.gpu_check $(ARGS)

clean: ## remove .venv, caches and build leftovers
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
