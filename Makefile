# Everything starts here: `make quickstart` trains an agent, `make test` runs the tests. Both set up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUN_ARGS ?=

.PHONY: docs quickstart quickstart-image quickstart-ray quickstart-vllm setup setup-vllm test test-matrix test-vllm test-mooncake test-ray test-faults test-trackers test-fuzz test-harbor test-hostile test-wheel test-browser test-recurrence test-models test-gpu gpu-kit test-harnesses test-clients lint types bubblewrap clean help
.PHONY: quickstart-hybrid quickstart-moe test-lora

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

quickstart: setup  ## Train a small agent on this machine in minutes; RUN_ARGS="--set runtime.seed=1" changes keys.
	$(BIN)/qwengyre train recipes/quickstart.toml $(RUN_ARGS)

quickstart-moe: setup  ## The quickstart with a small mixture of experts (Qwen3-MoE) as the policy.
	$(BIN)/qwengyre train recipes/quickstart-moe.toml $(RUN_ARGS)

quickstart-hybrid: setup  ## The quickstart with a small hybrid (Qwen3.5: gated delta nets and attention) as the policy.
	$(BIN)/qwengyre train recipes/quickstart-hybrid.toml $(RUN_ARGS)

quickstart-ray: setup  ## The quickstart with Ray placing the cells, on a cluster of this machine.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/qwengyre train recipes/quickstart.toml --set runtime.launcher=ray --set ray.cell.cpus=0.5 $(RUN_ARGS)

quickstart-image: setup  ## The quickstart on an image that podman builds from programs of this machine.
	image=$$($(BIN)/python recipes/quickstart-image/base.py .cache/quickstart-image | tail -1) && \
	$(BIN)/qwengyre train recipes/quickstart-image.toml --set sandbox.image="$$image" $(RUN_ARGS)

setup: $(INSTALLED) bubblewrap  ## Make the virtual environment and install everything in it.

test: setup  ## Run the tests.
	$(BIN)/python -m pytest

test-wheel: setup  ## Builds the wheel, installs it in an empty environment, and trains from an empty folder. Some minutes.
	$(BIN)/python -m pytest checks/test_wheel.py

docs: setup  ## Installs mkdocs-material; the documentation as a site, in site/, with a reference made of the code; every link is checked.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,docs]'
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --quiet

test-hostile: setup  ## Slow: a small quickstart whose agent attacks all that it can reach before it works.
	$(BIN)/python -m pytest checks/test_hostile.py

test-faults: setup  ## Slow, as root: strike processes, links and a disk in every phase; nothing that had finished may be lost.
	$(BIN)/python -m pytest checks/test_faults.py

test-matrix: setup  ## Slow: the tests for other processors, as another user, twice at once, under load, in random order; MATRIX="user -- tests/unit" picks.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pytest-randomly
	$(BIN)/python -m checks.matrix $(MATRIX)

test-ray: setup  ## Installs Ray; the Ray launcher: its contract, three simulated nodes of which one is killed, a whole run.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,ray]'
	$(BIN)/python -m pytest checks/test_ray.py

test-mooncake: setup  ## Installs Mooncake (needs the system library libibverbs1); every test of transports over it too.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,mooncake]'
	$(BIN)/python -m pytest checks/test_mooncake.py tests/contract/test_transfer.py

test-browser: setup  ## Installs Playwright and, as root, Chromium; the dashboard in a real browser, and the pictures of docs/dashboard.md.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,browser]'
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { apt-get update -qq && apt-get install -qq -y chromium >/dev/null; }
	QWENGYRE_SCREENSHOTS=$${QWENGYRE_SCREENSHOTS:-.screenshots} $(BIN)/python -m pytest checks/test_browser.py

TRACKERS := .trackers
test-trackers: setup $(TRACKERS)/.installed  ## Installs wandb, MLflow and trackio beside the environment; each held to the contract of trackers, offline.
	PYTHONPATH=$(TRACKERS) $(BIN)/python -m pytest checks/test_trackers.py

$(TRACKERS)/.installed: constraints.txt
	rm -rf $(TRACKERS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --target $(TRACKERS) \
	  wandb mlflow-skinny sqlalchemy alembic trackio pandas
	@touch $@

test-fuzz: setup  ## Slow: 10,000 answers a renderer in random pieces, 20,000 requests a dialect; QWENGYRE_FUZZ_ANSWERS=500, QWENGYRE_FUZZ_REQUESTS=500 for fewer.
	$(BIN)/python -m pytest checks/test_fuzz_answers.py checks/test_fuzz_requests.py

test-recurrence: setup  ## Gated delta nets over trees against another implementation, which is installed for it.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps tree-recurrence==0.1.1 trl==1.16.0
	$(BIN)/python -m pytest checks/test_tree_recurrence.py

test-models: setup  ## Every causal language model of transformers, tiny: exact over trees, or refused with a reason. Some minutes.
	$(BIN)/python -m pytest checks/test_models.py

DEVICE ?= cuda
test-gpu: setup  ## One CUDA device: contracts, exactness, cells, runs, figures; DEVICE=cpu is the half that needs none.
	$(BIN)/python -m checks.gpu.run --here --device $(DEVICE)

gpu-kit: setup  ## The checkout and the missing wheels for a box with torch, transformers and no network: docs/gpu.md.
	$(BIN)/python -m checks.gpu.kit qwengyre-gpu-kit.tar.gz

test-lora: setup  ## Slow: adapters in a run that is killed and goes on, and its checkpoints in the real PEFT, which is installed for it.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peft]'
	$(BIN)/python -m pytest checks/test_lora.py

HARNESSES := .harnesses
test-harnesses: setup $(patsubst %,$(HARNESSES)/%/.installed,node gemini mini-swe-agent aider-chat)  ## Slow: harnesses of others, installed and run unchanged.
	$(BIN)/python -m pytest checks/test_harnesses.py checks/test_live_harnesses.py checks/test_init.py

$(HARNESSES)/mini-swe-agent/.installed: VERSION := 2.4.6
$(HARNESSES)/aider-chat/.installed: VERSION := 0.86.2
$(HARNESSES)/%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $*==$(VERSION)
	@touch $@

$(HARNESSES)/gemini/.installed:
	npm install --no-audit --no-fund --silent --prefix $(@D) @google/gemini-cli@0.61.0
	@touch $@

$(HARNESSES)/node/.installed:
	npm install --no-audit --no-fund --silent --prefix $(@D) @anthropic-ai/claude-code@2.1.220 @openai/codex@0.171.0 \
	  @qwen-code/qwen-code@0.24.4 opencode-ai@1.18.33 node@22
	@touch $@

HARBOR := .harbor
PYTHON312 ?= python3.12
test-harbor: setup $(HARBOR)/.installed  ## Slow: installs Harbor (needs Python 3.12) and, as root, podman; Harbor's agents on podman, images from no registry.
	@command -v podman >/dev/null || apt-get install -qq -y podman runc >/dev/null
	$(BIN)/python -m pytest checks/test_harbor.py

$(HARBOR)/.installed:
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check harbor==0.26.0 podman-compose==1.6.0
	@touch $@

CLIENTS := .clients
test-clients: setup $(patsubst %,$(CLIENTS)/%/.installed,python old google node)  ## Slow: client libraries of others, unchanged: a tool loop each, in every dialect.
	$(BIN)/python -m pytest checks/test_clients.py

$(CLIENTS)/python/.installed: PACKAGES := openai==3.57.0 anthropic==2.14.0 litellm==1.110.2 openai-agents==0.24.0 langchain-openai==1.7.4 \
  langchain-anthropic==1.7.10 'pydantic-ai-slim[openai,anthropic,google]==2.68.0' 'smolagents[openai,litellm]==1.26.0'
$(CLIENTS)/old/.installed: PACKAGES := litellm==1.75.0
$(CLIENTS)/google/.installed: PACKAGES := google-genai==3.6.1
$(CLIENTS)/%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(PACKAGES)
	@touch $@

$(CLIENTS)/node/.installed:
	npm install --no-audit --no-fund --silent --prefix $(@D) ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/anthropic@4.0.105 \
	  @ai-sdk/google@4.0.121 zod@4.6.7
	@touch $@

VENV_VLLM := .venv-vllm
setup-vllm: $(VENV_VLLM)/.installed bubblewrap  ## vLLM for a CPU (x86-64, Python 3.11) in an environment of its own, 3 GB: .venv-vllm.

quickstart-vllm: setup-vllm  ## The quickstart with vLLM in every cell.
	$(VENV_VLLM)/bin/qwengyre train recipes/quickstart-vllm.toml $(RUN_ARGS)

test-vllm: setup-vllm  ## Slow: vLLM held to the contract of every engine, on this CPU.
	$(VENV_VLLM)/bin/python -m pytest checks/test_vllm.py checks/test_vllm_families.py

$(VENV_VLLM)/.installed: constraints-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

types: setup  ## Check types: mypy, strict.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mypy
	$(BIN)/mypy

lint: types  ## Check style and types.
	$(BIN)/python -m pip install --quiet -c constraints.txt ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --line-length 130 .

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "QwenGyre needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

bubblewrap:
	@command -v bwrap >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing bubblewrap, which isolates harnesses"; \
	  apt-get install -qq -y bubblewrap >/dev/null || { apt-get update -qq && apt-get install -qq -y bubblewrap >/dev/null; }; \
	else \
	  echo "bubblewrap is missing: it isolates harnesses. Install the package 'bubblewrap' (Debian: sudo apt-get install bubblewrap)," >&2; \
	  echo "or set isolation = \"none\" in the run file to run harnesses without isolation." >&2; exit 1; \
	fi

clean:  ## Remove the virtual environment and caches; runs stay.
	rm -rf $(VENV) $(VENV_VLLM) $(HARNESSES) $(HARBOR) $(CLIENTS) $(TRACKERS) .pytest_cache .hypothesis .ruff_cache .mypy_cache
