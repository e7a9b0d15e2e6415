# Every target makes the virtual environment .venv and installs what it needs, so each works first on
# a fresh clone. `make` alone lists them.

PYTHON ?= python3
JOBS   ?= 2

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help demo hello test test-llamacpp lint bench clean

help:
	@echo "make demo            install; train, extend by each rule, adapt, measure, report (6 min)"
	@echo "make hello           install, fetch SmolLM2 (93 MB, once) and let it answer"
	@echo "make test            the whole suite, but for what needs llama.cpp"
	@echo "make test-llamacpp   build llama.cpp's Python package (minutes, once) and compare with it"
	@echo "make lint            ruff and mypy"
	@echo "make bench           speed, memory and learning beside transformers, LitGPT and llama.cpp"
	@echo "make clean           remove the virtual environment, caches and demo/"
	@echo
	@echo "PYTHON=python3.12 chooses another Python (3.11 to 3.13); JOBS=4 runs more tests at once."

demo: $(VENV)/.installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo/run.sh

hello: $(VENV)/.installed
	$(BIN)/armillary pull smollm2-135m
	$(BIN)/armillary generate smollm2-135m "The capital of France is" --max-tokens 8 --temperature 0
	$(BIN)/armillary generate smollm2-135m --chat "What is gravity?" --max-tokens 60 --temperature 0

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not llamacpp"

test-llamacpp: $(VENV)/.llamacpp
	$(BIN)/python -m pytest -m llamacpp

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.llamacpp
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/sample.py
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/finetune.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/time_to_loss.py
	$(BIN)/python benchmarks/evaluate.py
	$(BIN)/python benchmarks/long_text.py
	$(BIN)/python benchmarks/short_tasks.py
	$(BIN)/python benchmarks/extension.py

clean:
	rm -rf $(VENV) demo .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Stamps: each is made again when what is to be installed has changed.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "armillary needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d; say make PYTHON=python3.12" % v[:2])'
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml | $(VENV)/.made
	@echo "installing armillary and what it needs (torch is the large part)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.made
	@echo "installing armillary with what its tests need (torch is the large part)"
	@$(PIP) --editable ".[dev,peers]"
	@touch $@ $(VENV)/.installed

# GCC 12 leaves out what ggml writes before it loads the settings of AMX, and the first prompt in
# 4 or 8 bits ends the process (ldtilecfg reads eight of the 64 bytes, its intrinsic says).
WITHOUT_AMX := $(if $(filter x86_64,$(shell uname -m)),-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)

$(VENV)/.llamacpp: $(VENV)/.dev
	@echo "building llama-cpp-python from its source, for this machine's processor (some minutes)"
	@CMAKE_ARGS="-DGGML_NATIVE=ON" CFLAGS="$(WITHOUT_AMX)" CXXFLAGS="$(WITHOUT_AMX)" \
		CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --editable ".[llamacpp]"
	@touch $@
