# make demo | test | lint | check | bench | bench-published | venv | clean. Needs python3 (3.11+), pip and make; everything else goes into .venv,
# pinned by constraints.txt. The stamp makes the installation run again only when what is to be installed has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT := out
JOBS ?= 2

# One thread per process: the tests and the demo run up to four processes, and a sum must not depend on the thread count.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start many processes: what they import is compiled once, also where the environment says that nothing is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv demo test lint check bench bench-published clean
.DEFAULT_GOAL := test

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "meshwright needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned environment into $(VENV)"
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --quiet -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)
	@mkdir -p $(OUT)
	@$(BIN)/python examples/demo.py --out $(OUT)/demo.plan.json

# JOBS test processes side by side; each starts its own pool of ranks when it first needs one.
test: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Style and types.
lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# Style, types, the import order, and every test that starts no processes and is not marked slow.
check: lint
	@$(BIN)/python -m pytest -m "not slow and not distributed"

bench: $(STAMP)
	@$(BIN)/python benchmarks/planning.py
	@mkdir -p $(OUT)
	@$(BIN)/python benchmarks/planning.py --grid --log $(OUT)/grid.jsonl

# Published runs, predicted against measured: every row of benchmarks/data goes through the planner, about 5 s each.
bench-published: $(STAMP)
	@$(BIN)/python benchmarks/published.py

clean:
	@rm -rf $(VENV) $(OUT) build *.egg-info
