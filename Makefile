# make demo         print a kernel
# make test         the CPU tests on the newest Triton, then the fast ones that reach Triton on the oldest, whatever became of the former
# make test-newest  the former alone
# make test-oldest  the latter alone
# make lint         ruff and mypy
# make clean        remove what the others made

PYTHON ?= python3
# More workers than this gain nothing: each imports torch first. Each begins with a part of its own, so that what the tests of a file share is made
# once and not by each worker (of six files 86 s of processors in place of 96, xdist 3.8, 2026-11-26), and in the end takes from the others.
PYTEST := -m pytest -n auto --maxprocesses 8 --dist worksteal
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The tests start hundreds of processes. Where Python is told to keep no module compiled, each compiles those of the checkout, and pytest each test, anew:
# a tenth of all their time (2026-11-27). Empty is as not given.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
OLDEST_VENV := .venv-oldest
OLDEST_TRITON := triton==3.6.0
# Triton 3.6's interpreter breaks with numpy 2.4 and later
OLDEST_NUMPY := numpy==2.3.5

.PHONY: demo test test-newest test-oldest lint clean

demo: $(VENV)/.installed
	$(VENV)/bin/epigen compile "relu(mm+bias)" --schedule tiled

# one after the other, also under make -j; it fails if either fails
test:
	$(MAKE) --keep-going --jobs=1 test-newest test-oldest

test-newest: $(VENV)/.installed-test
	$(VENV)/bin/python $(PYTEST) -m "not gpu"

test-oldest: $(OLDEST_VENV)/.installed-test
	$(OLDEST_VENV)/bin/python $(PYTEST) -m "triton and not slow and not gpu"

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# The stamps below are as new as the last installation that went through. An editable installation follows the sources by itself, so
# it is redone only when what decides the versions has changed.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'epigen needs Python 3.11 or newer: make PYTHON=...')"
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); torch and Triton are large"
	$(VENV)/bin/python $(INSTALL) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(VENV)/bin/python $(INSTALL) -e ".[test,bench]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(VENV)/bin/python $(INSTALL) -e ".[dev]"
	touch $@

# Triton comes first, so that no newer one is fetched where torch leaves it free, and once more at the end, because a CUDA build of
# torch replaces it with the version that it was built for.
$(OLDEST_VENV)/.installed-test: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(OLDEST_VENV)
	@echo "installing into $(OLDEST_VENV); torch and Triton are large"
	$(OLDEST_VENV)/bin/python $(INSTALL) --no-deps "$(OLDEST_TRITON)"
	$(OLDEST_VENV)/bin/python $(INSTALL) "$(OLDEST_NUMPY)" -e ".[test]"
	$(OLDEST_VENV)/bin/python $(INSTALL) --no-deps "$(OLDEST_TRITON)"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find epigen tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
