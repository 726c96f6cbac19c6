PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed-dev
INSTALLED_BENCH := .venv/.installed-bench
INSTALLED_MUTATION := .venv/.installed-mutation

.NOTPARALLEL:  # what is installed for two goals goes into one environment
PYTHON_VERSION ?= 3.12

.PHONY: help install demo test test-slow test-cluster test-faults test-fresh test-gpu gpu-kit mutation bench-training bench-tuning bench-compile bench-serving bench-planning bench-finetuning bench-many bench-network bench-monitoring bench-data bench-generation coverage docs lint format

help:
	@echo "make demo            from a fresh clone to a prediction: install, start a cluster, tune, train, compile, deploy, ask"
	@echo "make test            the tests that need no GPU, except slow ones and fault injection"
	@echo "make test-slow       the slow tests, except fault injection"
	@echo "make test-cluster    the tests of multi-machine clusters, simulated with namespaces; needs root"
	@echo "make test-fresh      run 'make demo' and 'make test' of the last commit on a bare Debian; needs root and debootstrap"
	@echo "make test-faults     fault injection, with a table of the outcomes"
	@echo "make coverage        which lines the unit tests run, with the modules that lack most first"
	@echo "make test-gpu        the tests that need a GPU"
	@echo "make gpu-kit         pack what a GPU machine without network access needs for benchmarks/gpu/run.sh, into build/gpu-kit"
	@echo "make mutation        mutation tests of six modules; lists the mutants that no unit test catches"
	@echo "make bench-training  training beside its peers, into benchmarks/training/RESULTS.md; the machine must be quiet"
	@echo "make bench-tuning    a search beside its peers, counted in epochs, into benchmarks/tuning/RESULTS.md; the machine must be quiet"
	@echo "make bench-compile   compiled models beside PyTorch and ONNX Runtime, into benchmarks/compile/RESULTS.md; the machine must be quiet"
	@echo "make bench-serving   the endpoint beside other model servers, into benchmarks/serving/RESULTS.md; needs wrk and h2load; the machine must be quiet"
	@echo "make bench-planning  the planner beside published runs and this machine, into benchmarks/planning/RESULTS.md; the machine must be quiet"
	@echo "make bench-finetuning  fine-tuning beside its peers, after pruning and by a teacher, and every built-in task, into pages of benchmarks/finetuning; the machine must be quiet"
	@echo "make bench-many      the cost of many runs, trials, versions, models and nodes, into benchmarks/many/RESULTS.md"
	@echo "make bench-network   training over 20 Mbit/s to 1 Gbit/s, into benchmarks/network/RESULTS.md; needs root; the machine must be quiet"
	@echo "make bench-data      data that do not fit into memory: prepared, read, trained on, killed; into pages of benchmarks/data; takes 30 GB of disk; the machine must be quiet"
	@echo "make bench-generation  language models beside llama.cpp, transformers and the bare engine, into benchmarks/generation/RESULTS.md; the machine must be quiet"
	@echo "make bench-monitoring  what metrics and traces cost, into benchmarks/monitoring/RESULTS.md; needs Prometheus and wrk; the machine must be quiet"
	@echo "make docs            the documentation as a site, into build/docs; a warning or a page of long sentences is an error"
	@echo "make lint            ruff, mypy and the rules between the parts"
	@echo "make format          put the code into its one form"

install: $(INSTALLED)

# Each of them holds Rayloom and what it runs on, so none has to wait for another.
# Modules are compiled on all cores, because pip compiles on one. Some packages have files that Python cannot compile.
$(INSTALLED): EXTRAS := [demo]
$(INSTALLED_DEV): EXTRAS := [dev]
$(INSTALLED_BENCH): EXTRAS := [bench]
$(INSTALLED_MUTATION): EXTRAS := [mutation]
$(INSTALLED) $(INSTALLED_DEV) $(INSTALLED_BENCH) $(INSTALLED_MUTATION): pyproject.toml constraints.txt
	@echo "installing rayloom$(EXTRAS) into .venv, a few minutes"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: set PYTHON=...")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.$(EXTRAS)'
	@$(BIN)/python -m compileall -qq --workers 0 .venv/lib || true
	@touch $(INSTALLED) $@

# The demo tries two sets of rates for a third of an epoch and trains the better one for two epochs; the recipe as it
# stands searches and trains for longer, and does better.
demo: $(INSTALLED)
	@$(BIN)/rayloom status 2>/dev/null || $(BIN)/rayloom up
	@$(BIN)/rayloom submit lifecycle recipes/reviews.yaml train.epochs=2 tune.space=tune_spaces.text:rates tune.trials=2 tune.epochs=1 tune.max_steps=72
	@echo
	@echo "Next: open the endpoint in a browser and ask it; '$(BIN)/rayloom status' has a command to paste;"
	@echo "train it in full with '$(BIN)/rayloom submit lifecycle recipes/reviews.yaml tune=null'; stop with '$(BIN)/rayloom down'."
	@echo
	@$(BIN)/rayloom predict reviews "这本书很好，内容生动，值得一读" "质量太差，用了一天就坏了"

# One process for each of two cores. Tests that share an expensive fixture run in the same process: see tests/conftest.py.
# Ray's workers are forked from a process that has imported the slow modules: see tests/workers.
# If a test process dies, the run ends and names its test. When pytest-xdist 3.8 replaces the process, it hangs or fails
# with a KeyError (github.com/pytest-dev/pytest-xdist/issues/1323, /1362).
PYTEST_ON_2_CORES := RAYLOOM_TEST_FORKED_WORKERS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
SLOW := slow and not faults and not gpu

test: $(INSTALLED_DEV)
	@$(PYTEST_ON_2_CORES) -m "not slow" tests/cluster tests/e2e tests/integration tests/unit

# The machines of tests/cluster are namespaces on the same cores, and their times are limited: one test at a time.
test-slow: $(INSTALLED_DEV) $(INSTALLED_BENCH)
	@status=0; for tests in "tests/e2e tests/integration" tests/unit; do \
		$(PYTEST_ON_2_CORES) -m "$(SLOW)" $$tests || status=1; \
	done; $(BIN)/python -m pytest -m "$(SLOW)" tests/cluster || status=1; exit $$status

test-fresh:
	@.ci/fresh

test-cluster: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest tests/cluster

test-faults: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest -m faults tests

# Unit tests alone: what runs in Ray's workers, and what only integration tests reach, counts as not run.
coverage: $(INSTALLED_DEV)
	@$(BIN)/python -m coverage run -m pytest --quiet -m "not slow" tests/unit
	@$(BIN)/python -m coverage report

test-gpu: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest tests/gpu

gpu-kit: $(INSTALLED_DEV)
	@$(BIN)/python -m benchmarks.gpu.kit build/gpu-kit --python $(PYTHON_VERSION)

mutation: $(INSTALLED_MUTATION)
	@OMP_NUM_THREADS=1 $(BIN)/python -m mutmut run --max-children 1
	@$(BIN)/python -m mutmut results

bench-training: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.training

bench-tuning: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.tuning

bench-compile: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.compile

bench-serving: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.serving

bench-planning: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.planning

bench-finetuning: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.finetuning
	@$(BIN)/python -m benchmarks.finetuning.pruning
	@$(BIN)/python -m benchmarks.finetuning.distillation
	@$(BIN)/python -m benchmarks.finetuning.tasks

bench-many: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.many

bench-network: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.network

bench-generation: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.generation

bench-data: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.data
	@$(BIN)/python -m benchmarks.data.pictures
	@$(BIN)/python -m benchmarks.data.batches
	@$(BIN)/python -m benchmarks.data.kills

bench-monitoring: $(INSTALLED_BENCH)
	@$(BIN)/python -m benchmarks.monitoring

docs: $(INSTALLED_DEV)
	@$(BIN)/sphinx-build --quiet --fail-on-warning --builder html docs build/docs
	@$(BIN)/python docs/prose.py
	@echo "the site is in build/docs/index.html"

lint: $(INSTALLED_DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(INSTALLED_DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
