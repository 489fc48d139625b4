# Needs a Python that pyproject.toml allows, with pip. `make PYTHON=python3.12 test` takes another one.
PYTHON ?= python3
VENV ?= .venv
# What `make run` runs, and what is handed to pytest and to pip.
RUN ?= $(VENV)/bin/recguide quickstart
PYTEST_ARGS ?=
PIP_ARGS ?=

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt

.PHONY: help run test lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make run     install, then show the strategy at work on the embedded model"
	@echo "make test    install with the development tools, then run the tests"
	@echo "make lint    ruff, mypy and the import contracts"
	@echo "make format  let ruff format and mend what it can"
	@echo "make clean   remove the environment, builds and caches"

# Each stamp is touched last, so that whatever was interrupted is done again.
$(VENV)/.stamp-venv:
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	$(INSTALL) --editable .
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev]'
	touch $(VENV)/.stamp-run $@

run: $(VENV)/.stamp-run
	OMP_WAIT_POLICY=PASSIVE $(RUN)

test: $(VENV)/.stamp-dev
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
