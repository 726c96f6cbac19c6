PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_BENCH := .venv/.installed-bench

.PHONY: help install demo test test-gpu test-faults bench-training bench-tuning lint format

help:
	@echo "make demo            from a fresh clone to a prediction: install, start a cluster, tune, train, compile, deploy, ask"
	@echo "make test            every test that needs no GPU"
	@echo "make test-gpu        the tests that need a GPU"
	@echo "make test-faults     every fault that is survived, injected; with a table of them"
	@echo "make bench-training  training beside its peers, into benchmarks/training/RESULTS.md; the machine must be quiet"
	@echo "make bench-tuning    a search beside its peers, counted in epochs, into benchmarks/tuning/RESULTS.md; hours"
	@echo "make lint            ruff, mypy and the rules between the parts"
	@echo "make format          put the code into its one form"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv, a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: set PYTHON=...")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(INSTALLED)

# The demo tries two sets of rates for an epoch and trains the better one for two; the recipe as it stands searches and
# trains for longer, and does better.
demo: $(INSTALLED)
	@$(BIN)/rayloom status >/dev/null 2>&1 || $(BIN)/rayloom up
	@$(BIN)/rayloom submit lifecycle recipes/reviews.yaml train.epochs=2 tune.space=tune_spaces.text:rates tune.trials=2 tune.epochs=1
	@$(BIN)/rayloom status
	@echo
	@$(BIN)/rayloom predict reviews "这本书很好，内容生动，值得一读" "质量太差，用了一天就坏了"
	@echo
	@echo "Next: ask it yourself, paste the curl line with a text of your own; look at the runs in the dashboard;"
	@echo "train it in full with '$(BIN)/rayloom submit lifecycle recipes/reviews.yaml tune=null'; stop with '$(BIN)/rayloom down'."

test: $(INSTALLED)
	@$(BIN)/python -m pytest

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pytest tests/gpu

test-faults: $(INSTALLED)
	@$(BIN)/python -m pytest -m faults tests

$(INSTALLED_BENCH): $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@touch $(INSTALLED_BENCH)

bench-training: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.training

bench-tuning: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.tuning

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(INSTALLED)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
