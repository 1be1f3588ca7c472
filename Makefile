# One line each. `make demo` and `make test` need nothing but Python 3.11 to 3.14 and this folder.
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := core server $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))
PROJECTS := $(addsuffix /pyproject.toml,$(PACKAGES))
MODEL ?=
FORMAT ?=
QUIET_CORES := OMP_WAIT_POLICY=passive
PYTEST := $(QUIET_CORES) $(BIN)/python -m pytest
# Two test files at a time, with a thread each. WORKERS= runs them one after the other.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
ONE_BY_ONE := tests/server/test_server_openapi_fuzz.py

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-slow test-long test-all previous-plugins test-container fuzz-formats test-kernels-full bench-packed check fix docs bench bench-kv bench-kv-quality bench-speculation bench-structured bench-quants check-peers bench-http bench-start bench-gpu clean

help: ## What there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

$(VENV)/installed: $(PROJECTS) constraints.txt tools/install.sh
	sh tools/install.sh $(VENV) $(PACKAGES)
	@touch $@

install: $(VENV)/installed ## Make .venv with everything in it

demo: install ## Serve a real small model (FORMAT=awq, gptq, exl2: a quant of it) and ask it
	$(BIN)/python tools/demo.py --format "$(FORMAT)"

serve: install ## Serve MODEL (the demo model when unset) on port 2242
	$(BIN)/ingle serve $(MODEL)

test: install ## The tests, under ten minutes
	OMP_NUM_THREADS=1 $(PYTEST) $(WORKERS) -m "not slow"

test-slow: install ## The slow ones: wheels into empty environments, the container file's steps
	$(PYTEST) $(WORKERS) -m "slow and not long" --ignore=$(ONE_BY_ONE)
	$(PYTEST) -m "slow and not long" $(ONE_BY_ONE)

test-long: install ## The longest: more cases of what shorter tests hold, before a release
	$(PYTEST) -m long

test-all: test test-slow ## Both

fuzz-formats: install ## Thousands of random AWQ, GPTQ and EXL2 files through ingle dequantize
	INGLE_FUZZ_ROUNDS=150 $(PYTEST) tests/formats/test_wild_files.py

previous-plugins: install ## The last release of each plugin with this core
	$(BIN)/python tools/previous_plugins.py

test-kernels-full: install ## Every format, dtype, row count and cache type in Triton's interpreter and compiler (most of an hour)
	$(PYTEST) tests/formats/test_affine_cpu.py tests/formats/test_exl2_cpu.py tests/formats/test_nibble_tiles.py
	INGLE_KERNELS_FULL=1 $(PYTEST) tests/kernels/test_gates.py

test-container: install ## Run the container file's steps in an empty Debian (root, debootstrap)
	$(BIN)/python tools/container.py --debootstrap

check: install ## Lint, format, types, who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: install ## Let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## Generate docs/cli.md and the pictures, build the site into site/, check its links
	$(BIN)/python -m ingle.cli.reference docs/cli.md
	$(BIN)/python tools/pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: install ## Speed of MODEL (the demo model when unset): decode, prefill, first token, start
	$(BIN)/ingle bench $(MODEL)

bench-packed: install ## 4-bit products on this CPU beside dense bf16 ones, in turns
	$(BIN)/python tests/benchmarks/bench_packed.py

bench-kv: install ## Decoding and prompts with every KV cache at 4,000 tokens, in turns
	$(BIN)/python tests/benchmarks/bench_kv.py

bench-kv-quality: install ## Perplexity and greedy agreement of every KV cache (minutes)
	$(QUIET_CORES) $(BIN)/python tests/benchmarks/bench_kv_quality.py

bench-structured: install ## Decoding under a JSON schema beside decoding without
	$(QUIET_CORES) $(BIN)/python tests/benchmarks/bench_structured.py

bench-speculation: install ## Decoding with prompt lookup beside decoding without
	$(QUIET_CORES) $(BIN)/python tests/benchmarks/bench_speculation.py

bench-http: install ## Tokens a second through HTTP streaming beside the engine alone
	$(BIN)/python tests/benchmarks/bench_http.py $(MODEL)

bench-start: install ## Seconds to the first token, and GB/s of a 4 GB checkpoint
	$(BIN)/python tests/benchmarks/bench_start.py

bench-quants: install ## Every quant of the demo model, made once, measured and compared; hours
	$(QUIET_CORES) $(BIN)/python tests/benchmarks/bench_quants.py --plot docs/quality.svg

.venv-peers/installed: constraints.txt
	python3.11 -m venv .venv-peers
	.venv-peers/bin/pip install --quiet torch==2.13.0 triton==3.7.1 gptqmodel==7.6.0 optimum
	@touch $@

check-peers: install .venv-peers/installed ## The quants of bench-quants in transformers and GPTQModel
	$(QUIET_CORES) $(BIN)/python tests/quantize/check_peers.py --peers .venv-peers/bin/python

bench-gpu: install ## Kernels on the card in this machine
	$(BIN)/python tests/benchmarks/bench_gpu.py

clean: ## Remove .venv and caches
	rm -rf $(VENV) .venv-peers dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
