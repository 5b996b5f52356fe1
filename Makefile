# Python 3.11 or newer with venv is all that is needed; on Windows use the pip lines of README.md.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EMULATOR := $(VENV)/.emulator
PACKAGES := artifacts compiler templates runtime
WORKERS ?= 2

.PHONY: setup lint test shared demo clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# The kernel emulator needs a C++20 compiler. Where there is none it gets the one of the ziglang package.
$(EMULATOR): $(INSTALLED)
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,emulator]'
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check $(PACKAGES) tests benchmarks
	$(BIN)/mypy --strict $(PACKAGES:%=-p %)

test: $(INSTALLED) $(EMULATOR)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

# Tests that read the published fixtures and the bf16 checkpoint in ../shared.
shared: $(INSTALLED) $(EMULATOR)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m 'shared and not gpu and not gpu2 and not slow'

demo: $(INSTALLED)
	@echo 'Question: What is the vault code of Marenth?  (text and question: examples/question.json)' >&2
	$(BIN)/ninferc run examples/tiny-hybrid.ninfer --messages examples/question.json --greedy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
