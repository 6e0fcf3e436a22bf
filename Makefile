# Quire: `make serve` serves the demo model, `make test` tests all but what is slow; both do all the set-up that is missing.

PYTHON ?= python3
VENV ?= .venv
# Where pip finds torch, if not in its usual index: the address of PyTorch's CPU wheels, or of another CUDA version's.
TORCH_INDEX ?=
# What else `make setup` and `make serve` install: bench, plots, tracing, or several as bench,plots.
EXTRAS ?=
# More flags for `make serve`: make serve ARGS="--port 0 --model DIR"
ARGS ?=

# Processes that the tests of `make test` run in, each with its own servers: make test WORKERS=4
WORKERS ?= 2

# Without bytecode each process of the tests would compile all that it imports, and pytest rewrite all assertions.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# The oldest Triton that pyproject.toml allows, which is that of torch 2.11: tests compile kernels with it too.
OLDEST_TRITON := 3.6.0
# Quire's calls of FlashInfer are compared with this one's code.
FLASHINFER := 0.7.4
# Runs what follows without the lines that say what is there already; its exit status stays that of what follows.
NEWS_OF := bash -o pipefail -c '"$$0" "$$@" | grep --line-buffered -v "^Requirement already satisfied"'
QUIRE := $(VENV)/.quire$(addprefix -with-,$(EXTRAS))
PROTOS := $(shell find proto/quire -name "*.proto")
DESCRIBE = mkdir -p build && $(BIN)/python -m grpc_tools.protoc -Iproto --include_source_info --include_imports \
	--descriptor_set_out=build/api.binpb $(wildcard proto/quire/v1/*.proto)
INFERENCE := rpc/services/inference/pb

.PHONY: help setup setup-dev serve test test-slow test-clients lint proto check-proto api-docs reference release-api charts dashboards demo demo-model \
	format clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(QUIRE) ## Make .venv and install Quire into it (EXTRAS=tracing: and what that needs)
setup-dev: $(VENV)/.quire-dev ## The same with the test tools

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Quire needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another with PYTHON=...")'
	@$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version > /dev/null || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a virtual environment with pip; on Debian and Ubuntu install python3-venv"; exit 1; }

$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "installing torch (the largest part) ..."
	@$(PIP) torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(QUIRE): pyproject.toml $(VENV)/.torch
	@echo "installing Quire and what it needs ..."
	@$(NEWS_OF) $(PIP) -e '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@

$(VENV)/.quire-dev: pyproject.toml $(VENV)/.torch
	@echo "installing Quire, what it needs and the test tools ..."
	@$(NEWS_OF) $(PIP) -e '.[dev]'
	@touch $(VENV)/.quire $@

serve: setup ## Serve the demo model on 127.0.0.1:50051 (flags: ARGS="...")
	$(BIN)/quire serve $(ARGS)

test: setup-dev lint check-proto ## Lint, types, tests (up to 20 minutes on 2 cores, once installed)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow"

# Where it cannot be had, its tests are skipped.
build/triton-$(OLDEST_TRITON)/.installed: | setup-dev
	@echo "installing Triton $(OLDEST_TRITON) for its tests ..."
	@$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --target $(@D) triton==$(OLDEST_TRITON) && touch $@ || { \
		rm -rf $(@D); echo "Triton $(OLDEST_TRITON) cannot be had: its tests are skipped"; }

build/flashinfer-$(FLASHINFER)/.fetched: | setup-dev
	@echo "fetching FlashInfer $(FLASHINFER) for its test ..."
	@$(BIN)/python -m pip download --disable-pip-version-check -q --no-deps --dest $(@D) flashinfer-python==$(FLASHINFER) \
		&& touch $@ || { rm -rf $(@D); echo "FlashInfer $(FLASHINFER) cannot be had: its test is skipped"; }

test-slow: setup-dev build/triton-$(OLDEST_TRITON)/.installed build/flashinfer-$(FLASHINFER)/.fetched ## The tests that `make test` leaves out, all examples of the laws (35 to 80 minutes; TEST_PART=0/3)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "hypothesis and not slow" --hypothesis-profile thorough

test-clients: setup-dev ## Run real clients against a server and a gateway; from the network (ARGS="--only openai")
	$(BIN)/python -m tests.clients.run $(ARGS)

lint: setup-dev ## ruff, mypy, import contracts, buf, and that reference pages are those of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf breaking --against ../docs/api.binpb
	@rm -rf build/reference && $(BIN)/python -m docs.pages_of_code build/reference && for page in build/reference/*.md; do \
		diff $$page docs/reference/ || { echo "docs/reference is stale: run make reference"; exit 1; }; done

# Writes $(1)/quire/v1 and $(1)/quire/engine, and $(2).binpb and $(2).pyi: rpc/services/inference/pb.py says why those are no module.
define protoc
$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)
$(BIN)/python -m grpc_tools.protoc -Iproto --descriptor_set_out=$(2).binpb --pyi_out=build inference/grpc_service.proto
mv build/inference/grpc_service_pb2.pyi $(2).pyi
endef

proto: setup-dev ## Generate the protobuf code anew
	@mkdir -p build
	$(call protoc,.,$(INFERENCE))

api-docs: setup-dev ## Write docs/reference/api.md anew from the comments in proto/
	@$(DESCRIBE)
	$(BIN)/python docs/make_api.py build/api.binpb > docs/reference/api.md

reference: setup-dev ## Write the pages of docs/reference that come from the code: command line, configuration, errors, metrics, parameters
	$(BIN)/python -m docs.pages_of_code docs/reference

release-api: setup-dev ## Take the API as it is for the one that clients have: `make lint` refuses what breaks them
	cd proto && ../$(BIN)/buf build --path quire/v1 --exclude-source-info -o ../docs/api.binpb

check-proto: setup-dev # The committed protobuf code and API reference are what the .proto files give
	@rm -rf build/pb && mkdir -p build/pb
	@$(call protoc,build/pb,build/pb/inference)
	@diff -rq -x __pycache__ -x __init__.py build/pb/quire/v1 quire/v1 && diff -rq -x __pycache__ -x __init__.py build/pb/quire/engine quire/engine \
		&& cmp build/pb/inference.binpb $(INFERENCE).binpb && cmp build/pb/inference.pyi $(INFERENCE).pyi || { echo "generated code is stale: run make proto"; exit 1; }
	@$(DESCRIBE) && $(BIN)/python docs/make_api.py build/api.binpb | diff - docs/reference/api.md || { echo "docs/reference/api.md is stale: run make api-docs"; exit 1; }

demo: setup ## Replay real traffic through a server, `make serve`'s or its own (flags: ARGS="--ray")
	$(BIN)/python -m bench.replay $(ARGS)

charts: setup-dev ## Draw the charts of the docs anew from bench/results
	$(BIN)/python -m bench.charts

dashboards: setup-dev ## Write deploy/grafana/dashboards anew
	$(BIN)/python -m deploy.grafana.build

demo-model: setup ## Train the demo model again (20 minutes)
	$(BIN)/python -m model.demo.train

format: setup-dev ## Let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv and build products
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
