# `make demo` and `make test` are all that a newcomer needs; both start from python3 and g++ alone.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
DOCS_VENV ?= $(VENV)-docs
CLANG_FORMAT := $(PY) -c 'from clang_format import clang_format; clang_format()'
CPP_FILES := $(shell git ls-files 'include/*.h' 'include/*.cuh' 'csrc/*.h' 'csrc/*.cpp' 'docs/explorer/*.cpp' 'tests/bench/*.cu' 2>/dev/null)

.PHONY: help venv docs docs-check demo test test-fast test-engines fuzz soak sanitize bench lint lint-ruff lint-format \
  lint-cpp lint-types format aot release clean

help:
	@echo 'make demo    a small model decodes a batch through paged KV; its tokens are checked against torch'
	@echo 'make test    the test suite'
	@echo 'make test-fast  the part of it that answers within three minutes'
	@echo 'make test-engines  real engines of vLLM and SGLang on the CPU, which it downloads'
	@echo 'make fuzz    random batches against the reference, and plans (MINUTES=30 in all, SEED=1, ARGS for pytest)'
	@echo 'make soak    plans and runs without end (SIZE=1: 10^6 plans, DEVICE=cpu)'
	@echo 'make sanitize  the host library and the kernels of the CPU under ASan, UBSan and TSan (KINDS=address, thread)'
	@echo 'make bench   the benchmarks of tests/bench/ that this machine can run'
	@echo 'make lint    linter, format check and type check'
	@echo 'make format  format every file in place'
	@echo 'make docs    build the pages of docs/ into build/site; docs-check reads them in a headless browser'
	@echo 'make aot     build the kernels of the AOT list into flashpage/aot_kernels'
	@echo 'make release  sdist and wheels, each tried in an empty environment (ARGS=--draft before the changelog is ready)'
	@echo 'make clean   remove what make built (the kernel cache stays: `flashpage cache clear`)'

venv:
	@$(PYTHON) .ci/venv.py $(VENV) $(VENV_FLAGS)

demo: venv
	@$(PY) -m flashpage demo $(ARGS)

test: venv
	@$(PY) -m pytest -q tests --numprocesses=auto --dist=worksteal $(ARGS)

test-fast: venv
	@$(PY) -m pytest -q tests --fast --numprocesses=auto --dist=worksteal $(ARGS)

test-engines: venv
	@$(PY) tests/support/get_vllm.py && $(PY) tests/support/get_sglang.py && $(PY) tests/support/get_flashinfer.py
	@$(PY) -m pytest -q tests/engines/test_vllm_engine.py tests/engines/test_sglang_engine.py \
	  tests/engines/test_flashinfer.py --engines --rare $(ARGS)

fuzz: venv
	@FUZZ_MINUTES=$(or $(MINUTES),6) FUZZ_SEED=$(or $(SEED),$(shell date +%s)) \
	  $(PY) -m pytest -q -s tests/net/test_fuzz.py tests/planner/test_planner_properties.py $(ARGS)

soak: venv
	@PYTHONPATH=. $(PY) tests/support/soak.py --size $(or $(SIZE),1) --device $(or $(DEVICE),cpu)

sanitize: venv
	@.ci/sanitize $(PY) $(KINDS)

bench: venv
	@$(PY) -m flashpage bench $(ARGS)

# An environment of its own: nothing else needs these packages. Strict (which --quiet would turn off): a broken link fails,
# and so does a public name that has no docstring or stands in no page.
docs:
	@$(PYTHON) .ci/venv.py $(DOCS_VENV) --docs
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build
	@echo 'docs: build/site/index.html'

docs-check: docs
	@$(DOCS_VENV)/bin/python docs/check_pages.py build/site

aot: venv
	@$(PY) -m flashpage build $(ARGS)

# Heavy: it downloads what an empty environment needs, torch among it.
release: venv
	@$(PY) .ci/release.py $(ARGS)

# All four, also where one fails. .pre-commit-config.yaml runs the same targets one by one.
lint:
	@$(MAKE) --no-print-directory --keep-going lint-ruff lint-format lint-cpp lint-types

lint-ruff: venv
	@$(PY) -m ruff check .

lint-format: venv
	@$(PY) -m ruff format --check .

lint-cpp: venv
	@$(CLANG_FORMAT) --dry-run -Werror $(CPP_FILES)

lint-types: venv
	@$(PY) -m mypy
	@mkdir -p build && sed -n '/^```python/,/^```$$/p' README.md | sed '/^```/d' >build/readme.py && $(PY) -m mypy build/readme.py

format: venv
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CPP_FILES)

clean:
	rm -rf $(VENV) $(VENV).lock $(DOCS_VENV) $(DOCS_VENV).lock build flashpage/lib flashpage/native/structs.py *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
