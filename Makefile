# make demo | make test | make lint | make setup
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-shared lint

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/ninferc run examples/tiny-hybrid.ninfer --messages examples/question.json --no-thinking --greedy --max-new 48

test: setup
	$(BIN)/python -m pytest -n 2 -m 'not gpu and not gpu2 and not slow and not shared'

# needs the bf16 checkpoint in ../shared
test-shared: setup
	$(BIN)/python -m pytest -n 2 -m 'shared and not gpu and not gpu2 and not slow'

lint: setup
	$(BIN)/ruff check artifacts compiler templates runtime tests benchmarks
	$(BIN)/mypy
