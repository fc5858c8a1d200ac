# make sweep | test | test-all | check | bench | bench-gpu | proof: each sets up .venv first. With PYTHON=… that interpreter is used as it is.
PIP_ARGS ?=
ifdef PYTHON
VENV_READY :=
else
PYTHON := .venv/bin/python
VENV_READY := .venv/.ready
endif
export PYTHONPATH := src:.:$(PYTHONPATH)
export PYTHONSAFEPATH := 1

.PHONY: install sweep test test-all check bench bench-gpu proof clean
install: $(VENV_READY)

# torch comes first and alone: asked for together with the rest, pip may pick the CUDA build of several gigabytes
.venv/.ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	.venv/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	.venv/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[test,check,bench]'
	touch $@

sweep: $(VENV_READY)
	$(PYTHON) -m train -m reduction=zero2o,zero2 micro_batch=4,8,12

test: $(VENV_READY)
	$(PYTHON) -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu" --durations=10

test-all: $(VENV_READY)
	$(PYTHON) -m pytest -q -n 2 --dist worksteal -m "slow or gpu" --durations=20

check: $(VENV_READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: $(VENV_READY)
	$(PYTHON) benchmarks/analysis_load.py
	$(PYTHON) benchmarks/overlap.py
	$(PYTHON) benchmarks/sweep_overhead.py

bench-gpu: $(VENV_READY)
	$(PYTHON) -m benchmarks.gpu_step

proof: $(VENV_READY)
	$(PYTHON) benchmarks/proof.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
