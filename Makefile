# Every target sets up what it needs: a virtual environment with pinned releases, made once and renewed when
# pyproject.toml or constraints.txt change.
#   PYTHON  the interpreter to build the environment from (3.10 or newer)
#   VENV    where the environment lies
#   ARGS    extra words for the command of demo, test and bench: make test ARGS="-k layout"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# All accelerators of this machine, or two processes on its CPU cores.
RANKS = $(shell $(BIN)/python -c "import torch; print(torch.accelerator.device_count() or 2)")

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs bench peers clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## Train a small language model, sharded over two processes or all GPUs (under 3 minutes)
	$(BIN)/shardwise run --nproc $(RANKS) examples/train_gpt.py --config examples/zero3.json $(ARGS)

test: $(VENV)/.installed-dev ## Run all tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev ## Check style, types and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## Bring the code into its style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev ## Check the documentation: links hold, code blocks run
	$(BIN)/python -m pytest tests/unit/test_docs.py -v

bench: $(VENV)/.installed ## Time a step beside PyTorch, DDP, FSDP2 and, if it is there, DeepSpeed (5 to 12 minutes)
	$(BIN)/python -m bench.compare --case comm --world 2 --rounds 3 $(ARGS)

peers: $(VENV)/.installed ## Install DeepSpeed, for bench
	$(PIP_INSTALL) setuptools
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation -e ".[bench]"

clean: ## Remove caches and build products
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environment too
	rm -rf $(VENV)

# The build tools are installed first and the package is built with them, so that they are pinned like everything else.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Python 3.10 or newer is needed; name one: make PYTHON=python3.12')"
	@echo "Setting up $(VENV): once, then kept. PyTorch is the large part."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) hatchling editables
	$(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@
