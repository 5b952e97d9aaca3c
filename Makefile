# Two commands: `make demo` runs the main job on the embedded model, `make test` runs the whole check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e ".[dev]" # most modules are never imported
	touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/pipeline run jobs/summarize.yaml
	$(BIN)/python -m pipeline.demo.check out/summarize

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n $(WORKERS) -rfEs

clean:
	rm -rf out $(VENV)
