# Every target makes .venv and installs what it needs. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# lmms-eval names fifty packages, a torchvision for CUDA among them; it runs with these
LMMS   := .venv-lmms
LMMS_NEEDS := accelerate datasets evaluate jsonlines loguru pytablewriter python-dotenv pytz sacrebleu scikit-learn tenacity
LOWEST := .venv-lowest
# what needs a GPU, a browser or an environment of its own has a target of its own
HERE   := not gpu and not lmms and not browser

IMAGE    ?= src/arr_coc/assets/examples/shapes.png
QUESTION ?= what does the purple text say?

.PHONY: help ask demo look screenshots test test-fast test-lowest test-browser test-gpu test-lmms test-model golden lint \
	format bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

ask: $(VENV)/core.stamp  ## answer a question about a picture from a quarter of its tokens (IMAGE=, QUESTION=)
	$(BIN)/arr-coc ask "$(IMAGE)" "$(QUESTION)" --overlay seen.png

demo: $(VENV)/demo.stamp  ## a page in the browser that shows where and why it looks (ARGS="--port 8000")
	$(BIN)/arr-coc demo $(ARGS)

look: $(VENV)/core.stamp  ## draw where a question makes the system look, and why (IMAGE=, QUESTION=)
	$(BIN)/arr-coc look "$(IMAGE)" "$(QUESTION)" --out sheet.png

test: lint  ## ruff, mypy --strict, import contracts, every test (under 9 minutes on two cores)
	$(BIN)/python -m pytest -q -n 2 -m "$(HERE)"

test-fast: $(VENV)/dev.stamp  ## the tests to run while editing (under 90 seconds)
	$(BIN)/python -m pytest -q -n 2 -m "$(HERE) and not slow"

test-lowest: $(LOWEST)/stamp  ## the invariants at the lowest versions that pyproject.toml promises
	$(LOWEST)/bin/python -m pytest -q -n 2 -m "$(HERE) and not slow" tests/idea tests/selectors tests/prompting tests/models tests/apps

golden: $(VENV)/dev.stamp  ## make the golden record again and compare (ARGS=--write: write it)
	$(BIN)/python tests/golden/record.py $(ARGS)

test-gpu: $(VENV)/dev.stamp  ## what needs a CUDA device
	$(BIN)/python -m pytest -q -m gpu

test-lmms: $(LMMS)/stamp  ## lmms-eval, in an environment of its own, against our own evaluation
	$(LMMS)/bin/python -m pytest -q -m lmms tests/evaluation/lmms

test-browser: $(VENV)/browser.stamp  ## the page in a real browser; screenshots go to out/browser
	$(BIN)/python -m pytest -q -m browser tests/apps/test_browser.py

screenshots: $(VENV)/browser.stamp  ## draw the page for README and docs again
	$(BIN)/python docs/images/shoot.py

test-model: $(VENV)/core.stamp  ## measure the embedded model, 500 samples a kind (PHOTOS=dir, ARGS="--n 100")
	$(BIN)/python recipes/embedded/check.py $(if $(PHOTOS),--photos "$(PHOTOS)") $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: $(VENV)/dev.stamp  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/core.stamp  ## times of the layer against one encoder pass (ARGS="--device cuda")
	$(BIN)/python benchmarks/layer.py $(ARGS)

$(VENV)/core.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/core.stamp
	$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/demo.stamp: $(VENV)/core.stamp
	$(PIP) -e ".[demo]"
	@touch $@

# Debian's browser: playwright's own would have to be fetched from elsewhere
$(VENV)/browser.stamp: $(VENV)/dev.stamp
	$(PIP) -e ".[browser]"
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -qq -y chromium) || \
		echo "no chromium could be installed; the tests that need it will say so"
	@touch $@

$(LMMS)/stamp: pyproject.toml constraints.txt
	test -x $(LMMS)/bin/python || $(PYTHON) -m venv $(LMMS)
	$(PIP:$(BIN)/%=$(LMMS)/bin/%) torch
	$(PIP:$(BIN)/%=$(LMMS)/bin/%) -e . pytest $(LMMS_NEEDS)
	$(PIP:$(BIN)/%=$(LMMS)/bin/%) --no-deps lmms-eval
	@touch $@

$(LOWEST)/stamp: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt \
		-e ".[train,demo,eval]" pytest pytest-xdist hypothesis
	@touch $@

clean:  ## remove the environment and the caches
	rm -rf $(VENV) $(LMMS) $(LOWEST) .mypy_cache .pytest_cache .ruff_cache .hypothesis
