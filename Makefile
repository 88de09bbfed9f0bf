# Every verb of this project. Needs make, bash and Python 3.11, 3.12 or 3.13; the rest goes into .venv.

SHELL := /bin/bash
# The tests start hundreds of processes: without files of compiled code each compiles its own.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Parameters: `make up RANKS=2 MODEL=mlx-community/Qwen3-4B-4bit PORT=8080 HOST=127.0.0.1 CONFIG=my.toml`
RANKS ?=
MODEL ?=
PORT ?=
HOST ?=
CONFIG ?=
UP_FLAGS := $(if $(CONFIG),--config '$(CONFIG)') $(if $(MODEL),--model '$(MODEL)') \
  $(if $(RANKS),--ranks '$(RANKS)') $(if $(PORT),--port '$(PORT)') $(if $(HOST),--host '$(HOST)')

# Test groups: each is one pytest run with the given number of workers on two cores. More workers serve
# tests that mostly wait for clocks and sockets, fewer serve tests that compute.
JOBS ?= 2
JOBS_WITH_PROCESSES ?= 3
JOBS_THAT_WAIT ?= 4
TEST_GROUPS := $(JOBS_THAT_WAIT):unit,gateway,cache_store,hosts \
  $(JOBS_WITH_PROCESSES):multirank,end_to_end,clients
# These suites compute and hardly wait: they run at idle priority beside the groups. A worker that has
# finished takes tests from the other one, because single files are long.
BESIDE := simulation mlx demo_model
# Suites with tests marked `alone`. They measure time, so nothing runs beside them.
ALONE := gateway multirank end_to_end clients chaos

# `make simulate SEEDS=10000`, `make simulate SEED=7` (that one again, event by event)
SEEDS ?= 10000
SEED ?=
# `make explore ROUNDS=100`
ROUNDS ?= 10
# `make memory REQUESTS=10000`
REQUESTS ?= 10000
# `make page SECONDS_OPEN=3600`
SECONDS_OPEN ?= 60
# `make chaos FAULTS=rank-kill-decode,scheduler-kill COUNT=10 CHAOS_RANKS=2`
FAULTS ?=
COUNT ?=
CHAOS_RANKS ?=

define FIND_PYTHON
find_python() { \
  for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
    if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
      2>/dev/null; then echo "$$candidate"; return; fi; \
  done; \
  echo "Lockstep needs Python 3.11, 3.12 or 3.13, and there is none on the PATH: install one" \
    "(macOS: brew install python@3.13; Debian, Ubuntu: apt install python3 python3-venv)" \
    "or name it: make install PYTHON=/path/to/python3" >&2; \
  return 1; \
}
endef

.PHONY: help
help:
	@echo "make install   prepare .venv (PYTHON=... chooses the interpreter)"
	@echo "make up        start Lockstep (RANKS=2 MODEL=... PORT=8080 HOST=... CONFIG=...)"
	@echo "make test      format, lint, types, walls, tests (JOBS=2 JOBS_WITH_PROCESSES=3 JOBS_THAT_WAIT=4)"
	@echo "make proofs    long tests: thousands of simulated clusters, kill loops, chaos"
	@echo "make check     format, lint, walls, types"
	@echo "make simulate  simulate the whole system, 10,000 seeds (SEEDS=... or SEED=... alone)"
	@echo "make explore   the tests of properties, with examples that no run has taken (ROUNDS=10)"
	@echo "make chaos     kill, stop and cut real processes (FAULTS=... COUNT=... CHAOS_RANKS=...)"
	@echo "make clients   install real coding agents; run each against every family of models on two ranks"
	@echo "make page      look at the page of a running cluster in a browser (SECONDS_OPEN=3600)"
	@echo "make memory    watch the memory of all processes under many requests (REQUESTS=10000)"
	@echo "make format    rewrite the files as the formatter wants them"
	@echo "make bench     lockstep bench overhead on the demo model"
	@echo "make generated write the example configuration and docs/reference"
	@echo "make freeze    write .venv's versions to constraints.txt"
	@echo "make clean     remove .venv and every cache"

# pip would compile every file, one after the other. These are many, and hardly one of them is imported;
# some packages hold templates that are no Python.
NEVER_IMPORTED := '/site-packages/(transformers/models|(.*/)?tests?)/'

.PHONY: install
install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(FIND_PYTHON); set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  python="$$(find_python)"; \
	  echo "== Making $(VENV) with $$("$$python" --version)"; \
	  rm -rf $(VENV); \
	  "$$python" -m venv $(VENV) || { \
	    echo "This Python cannot make a virtual environment (Debian, Ubuntu:" \
	      "apt install python3-venv), or the disk is full." >&2; rm -rf $(VENV); exit 1; }; \
	fi; \
	echo "== Installing Lockstep and its pinned dependencies into $(VENV) (once, a few minutes)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
	  --editable '.[dev]' --constraint constraints.txt; \
	packages="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	$(BIN)/python -m compileall -q -j 0 -x $(NEVER_IMPORTED) "$$packages" >/dev/null 2>&1 || true; \
	touch $(INSTALLED)

.PHONY: up
up: install
	@exec $(BIN)/lockstep up $(UP_FLAGS)

# Code for Linux is unreachable on macOS, so types are checked for both.
TYPES := $(BIN)/mypy
TYPES_ON_MACOS := $(BIN)/mypy --platform darwin --no-warn-unreachable \
  --cache-dir .mypy_cache/darwin services shared
.PHONY: check
check: style
	@echo "== Walls between rooms (import-linter)" && $(BIN)/lint-imports --no-logo
	@echo "== Types (mypy --strict)" && $(TYPES) && $(TYPES_ON_MACOS)

.PHONY: style
style: install
	@echo "== Format (ruff format)" && $(BIN)/ruff format --check --quiet .
	@echo "== Lint (ruff check)" && $(BIN)/ruff check --quiet .

PYTEST := $(BIN)/python -m pytest --quiet --dist loadfile --no-loadscope-reorder

# Runs all groups with the pytest marks $(1), and the suites of BESIDE at idle priority beside them. Output
# of the latter goes to a file, which is shown at the end.
define RUN_GROUPS
set -e; \
output="$$(mktemp -d)"; \
trap 'for one in $${types:+-$$types} $${beside:+-$$beside}; do \
    kill -- "$$one" 2>/dev/null || kill "$${one#-}" 2>/dev/null || true; done; \
  rm -rf "$$output"' EXIT; \
ended() { \
  echo "== $$3"; \
  if wait "$$1"; then tail -n 2 "$$output/$$2"; else cat "$$output/$$2"; return 1; fi; \
}; \
types=; set -m; \
{ $(2); } >"$$output/types" 2>&1 & types=$$!; \
$(BIN)/python -m tests.support.idle --quiet --dist worksteal -m $(1) \
  --numprocesses $(JOBS) --timeout 1800 $(addprefix tests/,$(BESIDE)) >"$$output/beside" 2>&1 & \
beside=$$!; set +m; \
for group in $(TEST_GROUPS); do \
  jobs="$${group%%:*}" suites="$${group#*:}"; \
  echo "== Tests: $${suites//,/, }"; \
  $(PYTEST) -m $(1) --numprocesses "$$jobs" $$(printf 'tests/%s ' $${suites//,/ }) \
    || [ $$? -eq 5 ]; \
done; \
ended "$$types" types "Types (mypy --strict)"; types=; \
ended "$$beside" beside "Tests: $(BESIDE)"; beside=
endef

.PHONY: test
test: style
	@$(call RUN_GROUPS,'not proof and not alone',$(TYPES)); \
	echo "== All checks and tests passed"

# Long proofs: every case of the tests that `make test` samples, faults in real processes, and tests that
# measure time.
.PHONY: proofs
proofs: export LOCKSTEP_PROOFS := 1
proofs: install
	@echo "== Clients (npm, PyPI; what cannot be installed is not run)"
	@$(BIN)/python -m tests.clients.agents.installation
	@echo "== Browser for the tests of the page (apt, npm; without it they are not run)"
	@$(BIN)/python -m tests.clients.page.installation
	@$(call RUN_GROUPS,'(proof or deep or hypothesis) and not alone',$(TYPES_ON_MACOS)); \
	echo "== Tests that measure time or need the machine for themselves: $(ALONE)"; \
	$(BIN)/python -m pytest --quiet -m alone $(addprefix tests/,$(ALONE)); \
	echo "== All proofs passed"

.PHONY: simulate
simulate: install
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED) --verbose,--seeds $(SEEDS))

# A failure is kept in .hypothesis and comes first in the next round, until it is mended.
.PHONY: explore
explore: install
	@set -e; for round in $$(seq $(ROUNDS)); do \
	  $(BIN)/python -m pytest --quiet -m hypothesis --hypothesis-profile explore --timeout 3600 \
	    --numprocesses $(JOBS) --dist loadfile tests; \
	done

.PHONY: chaos
chaos: install
	@$(BIN)/python -m tests.chaos $(if $(FAULTS),--faults $(FAULTS)) \
	  $(if $(COUNT),--count $(COUNT)) $(if $(CHAOS_RANKS),--ranks $(CHAOS_RANKS))

# Every client is needed: a missing one is an error, which names it. Transcripts of what clients and
# server say are in build/clients/transcripts.
.PHONY: clients
clients: export LOCKSTEP_CLIENTS := all
clients: install
	@echo "== Clients (npm, PyPI; all of them are needed)"
	@$(BIN)/python -m tests.clients.agents.installation --all
	@$(BIN)/python -m pytest --quiet --numprocesses $(JOBS) --dist loadfile tests/clients

# The page in a real browser. LOCKSTEP_PICTURES=1 writes the pictures of docs/images anew.
.PHONY: page
page: export LOCKSTEP_PAGE_SECONDS := $(SECONDS_OPEN)
page: install
	@$(BIN)/python -m tests.clients.page.installation --all
	@$(BIN)/python -m pytest --quiet tests/clients/page

.PHONY: memory
memory: export LOCKSTEP_TEST_REQUESTS := $(REQUESTS)
memory: install
	@$(BIN)/python -m pytest --quiet --capture=no --timeout 7200 tests/clients/test_memory.py

.PHONY: format
format: install
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

.PHONY: bench
bench: install
	@$(BIN)/lockstep bench overhead

.PHONY: generated
generated: install
	@$(BIN)/python -m tools.write_example_config
	@$(BIN)/python -m tools.write_protocol_tables
	@$(BIN)/python -m tools.write_reference

.PHONY: freeze
freeze: install
	@{ sed -n '/^#/p;/^mlx-metal==/p' constraints.txt; \
	  $(BIN)/python -m pip freeze --exclude-editable | grep -v '^lockstep'; } > constraints.new
	@mv constraints.new constraints.txt

.PHONY: clean
clean:
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find services shared tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
