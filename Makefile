PYTHON ?= python3
VENV ?= .venv
HOURS ?= 1
export PYTHON VENV

# PYTHONPATH: a venv over the system's packages (a GPU machine) installs nothing of smkern.
RUN = PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(VENV)/bin/python
PYTEST = $(RUN) -m pytest
READY = $(VENV)/.ready
CHILDREN = autotune bench examples
SOURCES = smkern $(CHILDREN) tests setup.py

.PHONY: demo test test-quick test-gpu test-cute fuzz bench lint types format readme clean help
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY) ## see it: a trace under every policy, partitions, a GEMM inside them; without a GPU simulated
	$(RUN) -m smkern demo

test: $(READY) ## all tests that this machine can run; says first how long they take
	.ci/test

test-quick: $(READY) ## without those that compile, generate tokens or take a second: a minute and a half
	.ci/test quick

test-gpu: $(READY) ## the tests that need a GPU, and nothing else
	$(PYTEST) tests/gpu

test-cute: $(READY) ## what CUTLASS's DSL compiles, without a GPU; fetches the extra (320 MB) into build/cutlass
	.ci/test-cute

fuzz: $(READY) ## the fuzzers of tests/fuzz with new seeds, HOURS=1 of them
	SMKERN_FUZZ_HOURS=$(HOURS) $(PYTEST) tests/fuzz

bench: $(READY) ## measure again what bench/results/ holds (needs a GPU, takes hours)
	$(RUN) -m smkern bench ceilings
	$(RUN) -m smkern bench power
	$(RUN) -m smkern bench partitions
	$(RUN) -m smkern bench gemm
	$(RUN) -m smkern bench untuned
	$(RUN) -m smkern bench attention
	$(RUN) -m smkern bench layouts
	$(RUN) -m smkern bench ops
	$(RUN) -m smkern bench model
	$(RUN) -m smkern bench runtime
	$(RUN) -m smkern bench cliffs
	$(RUN) -m smkern bench batch-invariant
	$(RUN) -m smkern bench host
	$(RUN) -m smkern bench server
	$(RUN) -m smkern bench plot

lint: $(READY) types ## ruff and mypy
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m ruff format --check $(SOURCES)

types: $(READY) ## mypy
	rm -rf build/types && mkdir -p build/types && ln -s ../.. build/types/smkern
	$(RUN) -m mypy $(addprefix -p , smkern $(addprefix smkern., $(CHILDREN)))

format: $(READY) ## ruff's formatter and its safe fixes
	$(RUN) -m ruff check --fix $(SOURCES)
	$(RUN) -m ruff format $(SOURCES)

readme: $(READY) ## fill the tables of the pages that show results
	$(RUN) -m smkern.bench.readme

clean: ## drop the venv and the caches
	rm -rf $(VENV) build dist demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt setup.py .ci/venv
	rm -f $(READY)
	.ci/venv
