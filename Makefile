# Every target creates and reuses .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= runs/demo

# One thread a process: the graphs of the tests are small, and pytest runs a process a core.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 MPLBACKEND=Agg

.PHONY: demo test lint format benchmark-graph benchmark-engine study-graphs clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/bayesian-attention compare cora --attention softmax,weibull,lognormal --seeds 3 --out $(OUT)

test: $(READY)
	$(TEST_ENV) $(BIN)/pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An epoch of each method against an epoch of softmax attention.
benchmark-graph: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/graph.py

# Time and memory of attention itself on two threads, against plain attention: about half an hour.
benchmark-engine: $(READY)
	$(BIN)/python benchmarks/engine.py

# The runs and tables of studies/graphs: about an hour and a half on two cores. Citeseer needs BAYESIAN_ATTENTION_DATA.
STUDY := softmax,weibull,weibull+contextual,lognormal,lognormal+contextual
study-graphs: $(READY)
	for task in cora citeseer; do \
	    $(BIN)/bayesian-attention compare $$task --attention $(STUDY) --seeds 10 --out runs/study-$$task && \
	    $(BIN)/bayesian-attention compare $$task --attention $(STUDY) --seeds 5 --recipe dropout=0.4 \
	        --out runs/study-$$task-dropout && \
	    $(BIN)/python studies/graphs/tables.py runs/study-$$task --json studies/graphs/$$task.json && \
	    $(BIN)/python studies/graphs/tables.py runs/study-$$task-dropout --json studies/graphs/$$task-dropout.json \
	        || exit 1; \
	done

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
