# make demo   a tiny model is trained, a rank killed, and all of it shown on one page (2 processes, no GPU)
# make test   the suite (about ten minutes on 2 cores)
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
FOR_DEMO = $(VENV)/.installed-for-demo
PYTEST_ARGS ?=
WORKERS ?= 2
DEMO_ARGS ?=

.PHONY: help lock demo test lint size format test-slow test-faults compositions test-accelerator test-gpu test-floor test-latest docs clean
help:
	@grep -E '^# make' Makefile | cut -c3-

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fsdp-sft needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

# With the versions of constraints.txt, on the platform of requirements.lock, every file's hash is compared.
$(INSTALLED): pyproject.toml $(CONSTRAINTS) requirements.lock | $(BIN)/python
	@if [ $(CONSTRAINTS) = constraints.txt ] && $(BIN)/python -c 'import platform, sys; sys.exit((sys.implementation.name, *sys.version_info[:2], sys.platform, platform.machine()) != ("cpython", 3, 11, "linux", "x86_64"))'; then \
	    echo 'installing requirements.lock: about two minutes'; \
	    $(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock && \
	    $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .; \
	else \
	    echo 'installing $(CONSTRAINTS), without hashes: about two minutes'; \
	    $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'; \
	fi
	touch $(INSTALLED) $(FOR_DEMO)

# make lock   requirements.lock anew, from pyproject.toml and constraints.txt
lock: | $(BIN)/python
	$(BIN)/python .ci/lock.py

# The library, torch, transformers and matplotlib, and none of the tools of development.
$(FOR_DEMO): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo 'installing torch, transformers and matplotlib into $(VENV): about two minutes'
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[plot]'
	touch $(FOR_DEMO)

# One process per GPU, at most two; without a GPU two processes on the CPU.
demo: $(FOR_DEMO)
	@rm -rf demo-output; HF_HUB_OFFLINE=1 $(BIN)/python examples/demo.py --output demo-output $(DEMO_ARGS)

# Many tests wait for ranks, signals or time-outs, so two at a time take little more than half as long.
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# make test-slow   the tests that take minutes; PYTEST_ARGS=--last-failed repeats those that failed
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# make test-faults   kills, signals and damage in number (an hour)
test-faults: $(INSTALLED)
	FAULTS=40 $(BIN)/python -m pytest -m 'slow or not slow' --timeout 7200 tests/faults $(PYTEST_ARGS)

# make compositions   features drawn together, N of them from SEED, each beside plain training (500 take an hour)
N ?= 500
SEED ?= 0
compositions: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.compositions --number $(N) --seed $(SEED) --workers $(WORKERS)

# make test-accelerator   the tests of several ranks, each with a simulated device (see tests/simulated)
ON_DEVICES = $(addprefix tests/,attention check compositions dcp_io export loss ranks/test_agree.py ranks/test_distributed.py \
	ranks/test_launch.py jobs model/test_adapters.py model/test_model.py model/test_inputs.py::test_one_rank_with_an_id_too_many \
	process/test_random_state.py quantised sac sampling shard/test_packed.py shard/test_shard.py step \
	tensors/test_sharding.py test_default_path.py test_example.py test_parity.py weights)
test-accelerator: $(INSTALLED)
	FSDP_SFT_TEST_DEVICE=sim $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ON_DEVICES) $(PYTEST_ARGS)

# make test-gpu   the tests that need a CUDA device
test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# make size   statements and files of each room, beside their ceilings and goals; LOWER=1 lowers the ceilings
size:
	$(PYTHON) -m tests.harness.size $(if $(LOWER),lower)

# make lint   ruff, mypy, codespell, and whether the planted mistakes can still be made
lint: $(INSTALLED)
	@failed=; for check in "ruff check ." "ruff format --check ." mypy codespell \
	    "python -m tests.mistakes --check"; do \
	    echo "$(BIN)/$$check"; $(BIN)/$$check || failed="$$failed; $$check"; done; \
	test -z "$$failed" || { echo "failed: $${failed#; }"; exit 1; }

# make docs   the site, in site/; any warning is an error
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# make test-floor   the suite on the lowest versions that pyproject.toml admits, in an environment of its own
test-floor:
	$(MAKE) test VENV=.venv-floor CONSTRAINTS=constraints-floor.txt

# make test-latest   the suite on the newest versions that pyproject.toml admits
test-latest:
	$(MAKE) test VENV=.venv-latest CONSTRAINTS=constraints-latest.txt

clean:
	rm -rf .venv .venv-floor .venv-latest build dist site demo-output long-output .mypy_cache .ruff_cache .pytest_cache
