# `make demo` and `make test` set up everything they need in .venv; the second time they start at once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv/.peers

.PHONY: demo test test-all test-versions test-triton test-simulated-cuda test-cubin lint format types imports browser pictures wheel bench bench-all bench-quality bench-gpu docs clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

demo: $(READY)  ## train WideResNet-28-2 with and without memory saving, and compare
	$(BIN)/lightning-memsave demo

test: lint types imports  ## format, lint, types, import direction, doctests, tests
	$(BIN)/pytest -m 'not slow and not gpu' -n 2 --dist worksteal tests lightning_memsave
	$(BIN)/pytest README.md docs  # in one process: a page's examples follow from each other

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-all: test wheel  ## longer checks: everything slow, and the oldest supported Lightning
	$(BIN)/pytest -m slow
	$(BIN)/python tests/versions.py --subset lightning==2.5.0

VERSIONS ?= torch==2.10.0 torch==2.11.0 torch==2.12.0 torch==2.14.1 torch==2.15.0 lightning==2.5.0 lightning==2.5.6 \
	transformers==4.57.6 peft==0.18.0 torchmetrics==1.4.1

test-versions: $(READY)  ## every room on other versions of torch and Lightning: hours, and 2 to 6 GB for each
	$(BIN)/python tests/versions.py --record $(VERSIONS)
	$(BIN)/python -m benchmarks.tables.write

test-triton: $(READY)  ## the Triton kernels in interpreter mode, where no GPU is
	$(BIN)/pip install --quiet --no-deps --target .venv/triton triton==3.9.0
	PYTHONPATH=.venv/triton TRITON_INTERPRET=1 $(BIN)/pytest tests/numerics -k triton

browser:  ## Chromium from npm for the tests of the page, which are skipped without one
	npm install --silent --no-save --prefix .browser @sparticuz/chromium@153
	cd .browser && TMPDIR=$$PWD node --input-type=module \
		-e 'import c from "@sparticuz/chromium"; await c.executablePath()'

pictures: $(READY)  ## the pictures of docs/seeing.md, from what `make demo` left
	$(BIN)/lightning-memsave compare memsave-demo/wandb --out memsave-demo/compare.html
	$(BIN)/python docs/pictures.py memsave-demo/compare.html

test-simulated-cuda: $(READY)  ## the tests marked gpu on a simulated CUDA device, with the newest torch: 6 GB
	$(BIN)/python -m tests.simulated_cuda

test-cubin: $(READY)  ## the Triton kernels as machine code for sm_80, sm_90 and sm_100, without a GPU
	$(BIN)/pip install --quiet --no-deps --target .venv/triton triton==3.9.0
	PYTHONPATH=.venv/triton $(BIN)/pytest -rP tests/numerics/test_triton_cubin.py

wheel: $(READY)  ## build the wheel and import it from an empty environment, outside the checkout
	tests/wheel.sh

$(PEERS): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

bench: $(PEERS)  ## memory and time of each technique on the CPU, held against the committed rows; writes the tables
	$(BIN)/python -m benchmarks.run bench --jobs 2 --turns 2
	$(BIN)/python -m benchmarks.tables.write

bench-all: $(PEERS)  ## the same with every size, depth and paper, and more turns of each timing: hours
	$(BIN)/python -m benchmarks.run all --jobs 2
	$(BIN)/python -m benchmarks.tables.write

bench-quality: $(READY)  ## the next runs of each study of quality; again and again, for as long as one likes
	$(BIN)/python -m benchmarks.run quality
	$(BIN)/python -m benchmarks.tables.write

bench-gpu: $(PEERS)  ## what says something new on CUDA
	$(BIN)/python -m benchmarks.run gpu

docs: $(READY)  ## the site, in site/; fails on a link that leads nowhere
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .browser .mypy_cache .ruff_cache .pytest_cache dist build memsave-demo
