# Quire: `make serve` serves the demo model, `make test` tests everything; both do all the set-up that is missing.

PYTHON ?= python3
VENV ?= .venv
# Where pip finds torch, if not in its usual index: the address of PyTorch's CPU wheels, or of another CUDA version's.
TORCH_INDEX ?=
# More flags for `make serve`: make serve ARGS="--port 0 --model DIR"
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
PROTOS := $(shell find proto -name "*.proto")

.PHONY: help setup setup-dev serve test test-fast lint proto check-proto demo demo-model format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.quire ## Make .venv and install Quire into it
setup-dev: $(VENV)/.quire-dev ## The same with the test tools

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Quire needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another with PYTHON=...")'
	@$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version > /dev/null || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment with pip; on Debian and Ubuntu install python3-venv"; exit 1; }

$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "installing torch (the largest part) ..."
	$(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(VENV)/.quire: pyproject.toml $(VENV)/.torch
	@echo "installing Quire and what it needs ..."
	$(PIP) -e .
	@touch $@

$(VENV)/.quire-dev: pyproject.toml $(VENV)/.torch
	@echo "installing Quire, what it needs and the test tools ..."
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.quire $@

serve: setup ## Serve the demo model on 127.0.0.1:50051 (flags: ARGS="...")
	$(BIN)/quire serve $(ARGS)

test: setup-dev lint check-proto ## Lint, types, all tests (about 15 minutes on 2 cores, once installed)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-fast: setup-dev ## Tests without the slow ones
	$(BIN)/pytest -m "not slow"

lint: setup-dev ## ruff, mypy, import contracts, buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint

proto: setup-dev ## Generate the protobuf code anew
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=rpc/pb --pyi_out=rpc/pb --grpc_python_out=rpc/pb $(PROTOS)

check-proto: setup-dev # The committed protobuf code is what the .proto files give
	@rm -rf build/pb && mkdir -p build/pb
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=build/pb --pyi_out=build/pb --grpc_python_out=build/pb $(PROTOS)
	@diff -r -x __pycache__ -x __init__.py build/pb/quire rpc/pb/quire || { echo "generated code is stale: run make proto"; exit 1; }

demo: setup ## Replay real traffic through a server, `make serve`'s or its own (flags: ARGS="--ray")
	$(BIN)/python -m bench.replay $(ARGS)

demo-model: setup ## Train the demo model again (20 minutes)
	$(BIN)/python -m model.demo.train

format: setup-dev ## Let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv and build products
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
