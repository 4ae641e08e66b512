# The project's commands; `make help` lists them. Python 3.10 or newer and make are all that has to be there before.
#
#   PYTHON=python3.12             the interpreter that the environment is made from
#   TORCH_INDEX_URL=https://...   a package index with the torch build to take (one for CPUs, one for a CUDA version)
#   ARGS="..."                    further arguments of the command behind `train`, `test` or `bench`
#   TEST_WORKERS=3                processes that share the tests, some of which only wait; 0 runs them in one

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=
TEST_WORKERS ?= 3
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-all check format bench site tutorials clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

train: $(VENV)/.installed ## train the built-in example; about two minutes on two cores, no hub, no account
	$(BIN)/python -m rl4lms_like quickstart $(ARGS)

test: $(VENV)/.installed-dev ## run the tests, without the slowest ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-dev ## run all tests; some minutes more
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(ARGS)

check: $(VENV)/.installed-dev ## lint, format, types, layers, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d build/site # with -q, warnings would pass

format: $(VENV)/.installed-dev ## sort imports, correct what ruff can, and format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

site: $(VENV)/.installed-dev ## serve the documentation on this machine while it is edited
	$(BIN)/mkdocs serve

tutorials: $(VENV)/.installed-dev ## run the tutorials in full; about five minutes on one core
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.docs.tutorials $(ARGS)

bench: $(VENV)/.installed-dev ## time one PPO iteration beside other libraries
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ppo_iteration $(ARGS)

clean: ## remove caches and build products (to start over, remove the environment's folder as well)
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find rl4lms_like tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment: each stamp is a step that is done, and older than nothing it was made from --------------------

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Python 3.10 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 ..."; \
		exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
		echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu it needs the package python3-venv."; \
		exit 1; }
	@touch $@

# Without a GPU, the CPU build (hundreds of megabytes) instead of the CUDA build (gigabytes), where one can be had.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@if [ -n "$(TORCH_INDEX_URL)" ]; then \
		$(PIP) install -c constraints.txt --extra-index-url "$(TORCH_INDEX_URL)" "$(TORCH)"; \
	elif [ "$$(uname -s)" != Linux ] || nvidia-smi >/dev/null 2>&1; then \
		$(PIP) install -c constraints.txt "$(TORCH)"; \
	else \
		echo "No NVIDIA GPU answers: looking for a CPU build of torch."; \
		$(PIP) install -c constraints.txt "$(TORCH)+cpu" || { \
			echo "No CPU build at the package indexes that pip knows: taking the default one, which may bring"; \
			echo "gigabytes of CUDA libraries. Another index can be named: make TORCH_INDEX_URL=... (see torch's"; \
			echo "installation page)."; \
			$(PIP) install -c constraints.txt "$(TORCH)"; }; \
	fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py constraints.txt
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml setup.py constraints.txt
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.installed
