# Every target does its own set-up, in virtual environments inside this folder (see .ci/environment.py).
# make test ARGS="-k switch"   passes arguments on;   make demo PYTHON=/path/to/python3.12   picks an interpreter;
# make test-all SLOW_ARGS="--minutes 20"   starts no further slow test after 20 minutes.

BOOTSTRAP := $(or $(shell command -v python3),$(shell command -v python),python3)
ENVIRONMENT := @$(BOOTSTRAP) .ci/environment.py
MAKEFLAGS += --no-print-directory

.PHONY: help setup demo test test-slow test-te test-all compatibility clean

help:
	@echo "make demo       train a tiny model under several strategies and compare with static ones"
	@echo "make test       run the core tests under each supported Python that is installed"
	@echo "make test-slow  run the slow tests"
	@echo "make test-all   run both"
	@echo "make test-te    build TransformerEngine (20 minutes the first time) and test models of its layers"
	@echo "make compatibility  write the table of tested versions from what these runs recorded"
	@echo "make setup      only set up the environment"
	@echo "make clean      remove environments and caches (run folders stay)"

setup:
	$(ENVIRONMENT) setup

demo:
	$(ENVIRONMENT) run hotspa demo $(ARGS)

test:
	$(ENVIRONMENT) test $(ARGS)

test-slow:
	$(ENVIRONMENT) test-slow $(ARGS) $(SLOW_ARGS)

test-te:
	@$(BOOTSTRAP) .ci/transformer_engine.py $(ARGS)

test-all: test test-slow

compatibility:
	@$(BOOTSTRAP) .ci/compatibility.py

clean:
	rm -rf .venv-* build dist *.egg-info .pytest_cache .hypothesis
	find hotspa_plugin tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +
