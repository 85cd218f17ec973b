# The two commands a new developer needs are `make demo` and `make test`; both prepare .venv when it is
# missing or out of date.
.DEFAULT_GOAL := help
.PHONY: help demo test test-ci test-all test-accelerator lint format types layers counts bench \
	bench-smoke check-gpu demo-smoke wheel docs check clean
MAKEFLAGS += --no-print-directory --no-builtin-rules

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# The demo needs few of these packages: where they are not there yet, the others are left out.
DEMO_READY := $(or $(wildcard $(READY)),$(VENV)/.ready-demo)
READY_DOCS := $(VENV)/.ready-docs
ARGS ?=

# The first interpreter that starts and is new enough; `make PYTHON=...` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

help: ## show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: $(DEMO_READY) ## train a small language model over two processes (ARGS="--help" for its options)
	@$(PY) -m examples.demo $(ARGS)

# Tables of cases (ranks x verbs x options) take most of the time: a ninth of each runs, the same
# one in every run, unless ARGS names tests.
SAMPLE := $(if $(ARGS),,--sample)
# Of these, tests that take long are left to `make test-ci`, unless ARGS names tests.
QUICK := $(if $(ARGS),,--part quick)
# Two processes take files of tests in turns, each with ranks of its own: where one waits for a
# rank to start, the other computes. In the order of names, which ends with many short files:
# pytest-xdist would end with files of few tests, some of which take half a minute.
PARALLEL := $(if $(ARGS),,-n 2 --dist loadfile --no-loadscope-reorder)

# Compiled files are kept also where the environment says otherwise: every rank of every test would
# compile the package again, and rewrite the assertions of the test.
demo test test-ci test-all test-accelerator: export PYTHONDONTWRITEBYTECODE :=

test: $(READY) ## run the tests that take seconds, on a ninth of large tables (ARGS="-k name": some)
	@$(PY) -m pytest $(SAMPLE) $(QUICK) $(PARALLEL) $(ARGS)

test-ci: $(READY) ## run the tests that `make test` leaves out because they take long
	@$(PY) -m pytest --sample --part slow $(PARALLEL)

test-all: $(READY) ## run every case of every test: before a change of the engine lands
	@$(PY) -m pytest $(PARALLEL)
	@$(MAKE) test-accelerator SAMPLE=

# What an accelerator may do otherwise than a host: streams, memory that is gone, waits of the host.
# Not what only the host does. tests/accelerator/README.md says which other tests have run there;
# ON_ACCELERATOR="tests/accelerator tests/optim ..." takes them.
ON_ACCELERATOR ?= tests/accelerator tests/engine tests/whole/memory/test_host_waits.py \
	tests/whole/lost_steps/test_recovery.py tests/whole/copies/test_removal.py \
	tests/whole/replicate/test_mixed_state.py tests/whole/hybrid/test_hybrid_state.py \
	tests/state/test_checkpoints.py tests/whole/precision/test_float16.py \
	tests/optim/test_clipping_limits.py tests/algorithms/test_outer_steps.py \
	tests/algorithms/test_averaging.py $(BY_CHOICES)

# Then all choices of an accelerator over tensors of the host, whose numbers are compared with one
# process's. Left out is what only a host's communicators do: tell of ranks that left, sum in the
# order of ranks, launch before the one before is over.
BY_CHOICES ?= tests/whole/parity/test_parity.py tests/whole/hybrid/test_hybrid.py \
	tests/whole/precision/test_precision.py tests/whole/accumulation/test_accumulation.py
NOT_BY_CHOICES := not launches_do_not_depend and not told_by_its_number and not bit_by_bit

# One after the other: which streams are delayed depends on the tasks before, and must not differ
# from run to run.
test-accelerator: $(READY) ## find missing waits of streams on a simulated accelerator; builds it first
	@$(PY) -m pytest --device sim $(ON_ACCELERATOR) $(SAMPLE) $(ARGS)
	@COMPOSABLE_TEST_CHOICES=accelerator $(PY) -m pytest $(BY_CHOICES) -k "$(NOT_BY_CHOICES)" \
		$(SAMPLE) $(ARGS)

# Schemas that check-jsonschema brings along: nothing is downloaded.
CONFORMS := $(VENV)/bin/check-jsonschema --builtin-schema

lint: $(READY) ## style, formatting, and the schemas of files for GitHub
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(CONFORMS) vendor.github-workflows .github/workflows/ci.yml
	@$(CONFORMS) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	@$(CONFORMS) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(CONFORMS) vendor.citation-file-format CITATION.cff

format: $(READY) ## apply the formatting
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

# Scripts of users are seldom annotated: what calls of the package get and return is checked in them.
SCRIPTS := --config-file= --check-untyped-defs --ignore-missing-imports --explicit-package-bases

types: $(READY) ## static types of the package; examples and pages as a user's checker sees them
	@$(PY) -m mypy --strict composable
	@$(PY) -m mypy $(SCRIPTS) examples
	@$(PY) -m docs.programs

layers: $(READY) ## imports go down only
	@$(VENV)/bin/lint-imports --no-cache

counts: $(READY) ## how large the engine is, and what one file changes of another's (ARGS="--write")
	@$(PY) -m docs.counts $(ARGS)

bench: $(READY) ## measure against FSDP2, FSDP1 and DDP; rewrites the tables in benchmarks/README.md
	@$(PY) benchmarks/run_all.py $(ARGS)

bench-smoke: $(READY) ## show that every benchmark runs; measures nothing
	@$(PY) benchmarks/run_all.py --smoke
	@$(PY) benchmarks/check_gpu.py --rehearse --only host-waits,sanitizer

check-gpu: $(READY) ## on a machine with a GPU: tests, sanitizer, memory and times there, on one page
	@$(PY) benchmarks/check_gpu.py $(ARGS)

demo-smoke: $(READY) ## a few steps of the demo, resumed once
	@rm -rf runs/smoke
	@$(PY) -m examples.demo --steps 6 --baseline-steps 3 --out runs/smoke --quiet
	@$(PY) -m examples.demo --steps 8 --no-baseline --out runs/smoke --resume --quiet

check: test test-ci test-accelerator lint types layers bench-smoke demo-smoke wheel docs ## everything

wheel: $(READY) ## build the wheel into dist/, and try it in a clean environment
	@VENV=$(VENV) .ci/wheel

docs: $(READY_DOCS) ## build the site of the documentation into build/site
	@PYTHONWARNINGS="ignore:Failed to initialize NumPy" $(PY) -m docs.site.build

clean: ## remove caches and what the demo wrote; keeps .venv
	@rm -rf runs build .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find composable tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@VENV=$(VENV) PYTHON="$(PYTHON)" .ci/install demo,test,dev
	@touch $@

$(VENV)/.ready-demo: pyproject.toml constraints.txt
	@VENV=$(VENV) PYTHON="$(PYTHON)" .ci/install demo
	@touch $@

$(READY_DOCS): pyproject.toml constraints.txt
	@VENV=$(VENV) PYTHON="$(PYTHON)" .ci/install docs
	@touch $@
