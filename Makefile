# kvrepro: everything from a fresh clone. Needs Python 3.11, make and a package index.
#
#   make reproduce                  the main job: run, notebooks, figures, table
#   make reproduce PROFILE=smoke MODEL=smollm2-135m DEVICE=cpu RETAIN=0.25

PROFILE ?= quick
MODEL ?= smollm2-135m
DEVICE ?= cpu
# share of the cache to keep; empty: what the profile says
RETAIN ?=
# any Python 3.11
PYTHON ?= python3.11

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# threads that wait spin shortly, then sleep: far faster on a machine that is not idle, and no slower on one that is
export GOMP_SPINCOUNT ?= 10000

BIN := .venv/bin
STAMP := .venv/.installed
# the extra that is not in the lock, as tested; nothing of the lock changes for it
RAY := ray==2.60.0 msgpack==1.2.4 protobuf==7.36.2
# where runs go, as `kvrepro run` names it
OUT := results/$(PROFILE)$(if $(filter-out smollm2-135m,$(MODEL)),-$(notdir $(MODEL)))$(if $(filter-out cpu,$(DEVICE)),-cuda)
STUDIES := methods slimmer released positions selectors sweep sweep-chunked
RUN = $(BIN)/kvrepro run --profile $(PROFILE) --model $(MODEL) $(if $(RETAIN),--retain $(RETAIN))
NOTEBOOKS = $(BIN)/kvrepro notebooks --profile $(PROFILE) --model $(MODEL) $(if $(RETAIN),--retain $(RETAIN))

.PHONY: help venv reproduce studies notebooks figures demo test test-ray gpu gpu-bench lint clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/:/' | awk -F: '{printf "make %-10s%s\n", $$1, $$2}'
	@echo
	@echo "Parameters: PROFILE=$(PROFILE) (smoke, quick, full) MODEL=$(MODEL) DEVICE=$(DEVICE) RETAIN=$(RETAIN) PYTHON=$(PYTHON)"

reproduce: $(STAMP)  ## run the experiments, execute the notebooks, draw the figures, print the main table
	$(RUN) --device $(DEVICE) --out $(OUT)
	$(NOTEBOOKS) --device $(DEVICE) --out $(OUT)/notebooks
	$(BIN)/kvrepro figures $(OUT)
	$(BIN)/kvrepro table $(OUT)

studies: $(STAMP)  ## the larger grids, one for each question (an hour or two on two cores)
	for study in $(STUDIES); do $(RUN) --device $(DEVICE) --study $$study; done
	for model in smollm2-135m-mha gemma3-270m; do $(BIN)/kvrepro run --profile $(PROFILE) --model $$model --device $(DEVICE) --study methods $(if $(RETAIN),--retain $(RETAIN)); done

notebooks: $(STAMP)  ## execute the notebooks into results/PROFILE/notebooks
	$(NOTEBOOKS) --device $(DEVICE) --out $(OUT)/notebooks

figures: $(STAMP)  ## redraw the figures from stored results, no model needed
	$(BIN)/kvrepro figures $(if $(wildcard $(OUT)/records.jsonl),$(OUT),data/$(OUT))

demo: $(STAMP)  ## two minutes - one prompt, three methods, one figure
	$(BIN)/kvrepro demo

test: $(STAMP)  ## all tests, then every notebook in profile smoke
	$(BIN)/python -m pytest tests kvrepro --doctest-modules
	KVREPRO_PROFILE=smoke $(BIN)/python -m pytest --nbval-lax --nbval-current-env notebooks

test-ray: $(STAMP)  ## tests of many workers, on a local Ray, which this installs (79 MB)
	$(BIN)/pip install --disable-pip-version-check --quiet --progress-bar off -c requirements.lock $(RAY)
	$(BIN)/python -m pytest tests/test_scale.py

gpu: $(STAMP)  ## tests and experiments on CUDA
	$(BIN)/python -m pytest tests kvrepro --doctest-modules
	$(MAKE) reproduce DEVICE=cuda

# Estimated, not measured: on an H100 or H200 about 40 s for the kernels (30 of microseconds, flex compiled twice),
# 170 s of decoding (8 contexts and batches · 7 arms · 3 turns · 0.9 s), 90 s of prefill and 200 s of compression (3 and 8
# processes that make the weights anew, 20 s each).  What does not fit the device is skipped, and says what it needs.
SHAPE ?= llama-3.1-8b
BENCH = $(BIN)/kvrepro bench
gpu-bench: $(STAMP)  ## speed and memory on CUDA, random weights, into results/gpu-bench (under ten minutes)
	mkdir -p results/gpu-bench
	$(BENCH) kernels --shape $(SHAPE) --device cuda --context 1024 32768 131072 --batch 1 4 --json results/gpu-bench/kernels.json
	$(BENCH) decode --shape $(SHAPE) --device cuda --context 1024 8192 32768 131072 --batch 1 4 --retain 0.25 \
	    --json results/gpu-bench/decode.json
	$(BENCH) prefill --shape $(SHAPE) --device cuda --context 8192 --methods selkv,snapkv --repeats 3 --memory-repeats 1 \
	    --json results/gpu-bench/prefill.json
	$(BENCH) slimmer --shape $(SHAPE) --device cuda --repeats 2 --json results/gpu-bench/slimmer.json

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove the environment, the caches and the results (not the model cache in the home folder)
	rm -rf .venv results build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

venv: $(STAMP)  ## create .venv with the locked dependencies

# rebuilt whenever the lock or the package's description changes
$(STAMP): requirements.lock pyproject.toml
	@is_311='import sys; sys.exit(sys.version_info[:2] != (3, 11))'; \
	for python in "$(PYTHON)" python3.11 python3 python; do \
	    if "$$python" -c "$$is_311" >/dev/null 2>&1; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "kvrepro needs Python 3.11 and finds none; install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; \
	fi; \
	if ! $(BIN)/python -c "$$is_311" >/dev/null 2>&1; then \
	    echo "creating .venv with $$($$python --version)"; "$$python" -m venv --clear .venv; \
	fi
	@echo "installing $$(grep -c == requirements.lock) pinned packages into .venv (minutes the first time)"
	@$(BIN)/pip install --disable-pip-version-check --progress-bar off -r requirements.lock 2>&1 | tee .venv/install.log \
	    | awk '/^(Collecting|Processing|Requirement already)/ && ++n % 25 == 0 {print "  " n " found"; fflush()} \
	           /^Installing collected/ {print "  all found, unpacking"; fflush()}' \
	    || { tail -n 15 .venv/install.log >&2; exit 1; }
	@$(BIN)/pip install --disable-pip-version-check --quiet --no-deps -e . 2>&1 | tee -a .venv/install.log >/dev/null \
	    || { tail -n 15 .venv/install.log >&2; exit 1; }
	@touch $@
