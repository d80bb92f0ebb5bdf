# `make demo` and `make test` are all a newcomer needs: each makes .venv on first use and then does its work.
# Needs only make and a Python of 3.11 or newer (choose one with `make PYTHON=/path/to/python3 ...`); no compiler.

SHELL := /bin/sh
BIN := .venv/bin
STAMP := .venv/.installed

# The environment of the shell must not leak into ours.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-full test lint clean bench-farmers bench-venv bench-grpo bench-tick bench-memory bench-sb3-venv bench-cartpole bench-stacked bench-kv bench-optimizers token-reversal bench-selfplay bench-selfplay-seeds bench-intake bench-swap

help: ## Show this list
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

venv: $(STAMP) ## Make .venv and install Sparring into it, with every version as constraints.txt pins it

# A Python that merely has a name on the PATH may not run (version managers leave such shims), so each is tried.
$(STAMP): pyproject.toml constraints.txt
	@set -eu; \
	runs() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }; \
	if ! { runs $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1; }; then \
	  if [ -n "$(PYTHON)" ]; then candidates="$(PYTHON)"; else candidates="python3.11 python3.12 python3.13 python3"; fi; \
	  found=; \
	  for candidate in $$candidates; do if runs "$$candidate"; then found="$$candidate"; break; fi; done; \
	  if [ -z "$$found" ]; then \
	    echo "error: no Python 3.11 or newer with the modules venv and ensurepip runs here (tried: $$candidates)." >&2; \
	    echo "       Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3 venv" >&2; \
	    exit 1; \
	  fi; \
	  echo "Making .venv with $$found ($$("$$found" -c 'import platform; print(platform.python_version())'))"; \
	  "$$found" -m venv --clear .venv; \
	fi; \
	echo "Installing Sparring and the pinned versions of what it needs (about a minute, or as long as the download takes)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"; \
	touch $(STAMP)

demo: $(STAMP) ## Run the main job on the embedded model (minutes, on a CPU)
	$(BIN)/sparring demo

demo-full: $(STAMP) ## Run the main job at full length
	$(BIN)/sparring demo --full

test: $(STAMP) ## Run the tests (without those marked slow)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 2

lint: $(STAMP) ## Check style, formatting, import contracts and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench-farmers: $(STAMP) ## Measure the honest bot against every way to farm the market
	$(BIN)/python benchmarks/farmers.py

bench-venv: .venv-bench/.installed ## Make .venv-bench with the tools that we measure against

.venv-bench/.installed: $(STAMP) benchmarks/rivals.txt
	$(BIN)/python -m venv --clear .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r benchmarks/rivals.txt
	touch .venv-bench/.installed

bench-grpo: $(STAMP) bench-venv ## Measure a GRPO step beside TRL's, at 300/48/8 and 1000/48/16 (an hour; needs smollm2)
	$(BIN)/python benchmarks/grpo_step.py --prompt 300 --new 48 --group 8
	$(BIN)/python benchmarks/grpo_step.py --prompt 1000 --new 48 --group 16

bench-tick: $(STAMP) ## Measure a tick of 30 agents beside rows (half an hour; needs smollm2)
	$(BIN)/python benchmarks/market_tick.py --gate 0.03
	$(BIN)/python benchmarks/market_tick.py --gate off

bench-memory: $(STAMP) bench-venv ## Measure the peak memory of both (needs smollm2)
	$(BIN)/python benchmarks/memory.py

bench-sb3-venv: .venv-sb3/.installed ## Make .venv-sb3 with stable-baselines3

.venv-sb3/.installed: $(STAMP)
	$(BIN)/python -m venv --clear .venv-sb3
	.venv-sb3/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt stable-baselines3==2.9.2 gymnasium
	touch .venv-sb3/.installed

bench-cartpole: $(STAMP) bench-sb3-venv ## Measure PPO on CartPole beside stable-baselines3, its defaults and the zoo's (half an hour)
	$(BIN)/python benchmarks/ppo_cartpole.py --setting defaults --steps 65536
	$(BIN)/python benchmarks/ppo_cartpole.py --setting zoo --steps 100000

bench-stacked: $(STAMP) ## Measure an update of 16 stacked policies beside that of one (a minute)
	$(BIN)/python benchmarks/ppo_stacked.py

bench-kv: $(STAMP) ## Measure coded keys and values beside full ones (a quarter of an hour; needs smollm2)
	$(BIN)/python benchmarks/kv_cache.py --docs

bench-optimizers: $(STAMP) ## Measure APOLLO beside AdamW (minutes)
	$(BIN)/python benchmarks/optimizers.py --docs

token-reversal: $(STAMP) ## Repeat the delightful gradient's experiment on a CPU (half an hour)
	$(BIN)/python recipes/token_reversal.py --json --docs

bench-selfplay: $(STAMP) bench-venv ## Measure a round of self-play beside alternating TRL phases (half an hour; needs smollm2)
	$(BIN)/python benchmarks/selfplay_round.py

bench-swap: $(STAMP) ## Measure 50 adapter swaps under 16 clients (a minute)
	$(BIN)/python benchmarks/swap.py

bench-selfplay-seeds: $(STAMP) ## Self-play with the embedded model on three seeds, judged on held-out graphs (an hour)
	$(BIN)/python benchmarks/selfplay_seeds.py

bench-intake: $(STAMP) ## Measure durable trajectories a second over HTTP, the wait of a batch and memory over a million (minutes)
	$(BIN)/python benchmarks/intake.py --count 1000000

clean: ## Remove caches and build products (keeps .venv and runs)
	rm -rf build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -path ./.venv -prune -o -path ./runs -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +
