# `make serve` talks, `make test` proves, `make check` is what CI asks before it.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP_WITH_PROGRESS := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
PIP := $(PIP_WITH_PROGRESS) --quiet

.PHONY: serve setup test matrix test-slow test-gpu sanitize snapshots check audit fix docs docs-serve bench clean

serve: $(VENV)/.run  ## install and serve the demo model on 127.0.0.1:8000
	$(BIN)/frame serve

setup: $(VENV)/.dev  ## install everything that developing needs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing frame and its packages into $(VENV) (once; it takes some minutes)."
	$(PIP_WITH_PROGRESS) --editable '.[fast]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[fast,test,check,docs]'
	touch $@ $(VENV)/.run

test: $(VENV)/.dev  ## all tests that need no GPU
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

matrix: $(VENV)/.dev  ## every combination of parameters that `make test` leaves out
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'matrix and not gpu and not slow'

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'slow and not gpu'

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

sanitize: $(VENV)/.dev  ## compute-sanitizer over the kernels' tests, on a GPU
	PYTHON=$(BIN)/python benchmarks/sanitize.sh

snapshots: $(VENV)/.dev  ## take today's plugin contract as the one that tests hold
	$(BIN)/python -m tests.snapshots.describe

check: $(VENV)/.dev  ## formatting, lint, types, who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

audit: $(VENV)/.dev  ## ask for advisories about the pinned packages; without an answer it says so and passes
	$(BIN)/python .ci/audit.py --pip-audit $(BIN)/pip-audit constraints.txt

fix: $(VENV)/.dev  ## format and mend what lint can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev  ## build the site into site/
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.dev
	$(BIN)/mkdocs serve

bench: $(VENV)/.dev  ## compare with transformers on this machine
	$(BIN)/python benchmarks/offline_cpu.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/pooling_cpu.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
