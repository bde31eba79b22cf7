# Every verb is one line: it makes .venv if need be and calls `kvstrata <verb>`. Options: make verify ARGS="--live".
.DEFAULT_GOAL := help
.PHONY: help up down status logs plan verify bench bench-store bench-engine engine store size report observe rollback build pull test \
	test-fast test-observability soak lint
ARGS ?=
KV := scripts/bootstrap kvstrata

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: ## Everything from nothing to a running, proven stack; safe to repeat
	@$(KV) up $(ARGS)

down: ## Stop and remove the containers; data, images and settings stay
	@$(KV) down $(ARGS)

status: ## What runs, how KV moves, how full the tiers are, the last proof
	@$(KV) status $(ARGS)

logs: ## The services' log lines (ARGS="vllm -f" follows one)
	@$(KV) logs $(ARGS)

plan: ## Flags, sizes and limits for this model on this machine, with reasons
	@$(KV) plan $(ARGS)

verify: ## The reuse proof on the running stack (ARGS=--live restarts nothing)
	@$(KV) verify $(ARGS)

bench: ## TTFT cold / L0 / L1 / L2 and plain vLLM at several prompt lengths
	@$(KV) bench $(ARGS)

bench-store: ## The block store against raw reads and LMCache's adapters (ARGS=--quick: seconds)
	@$(KV) bench store $(ARGS)

bench-engine: ## The KV engine beside Redis and epistemic-graph-server (ARGS=--quick: seconds)
	@scripts/bootstrap --dev kvstrata bench engine $(ARGS)

engine: ## The KV engine by itself: serve it, or check one (ARGS="check http://127.0.0.1:9130")
	@$(KV) engine $(ARGS)

store: ## Blocks on disk: list, check, make room, pin (ARGS=ls, namespaces, report, verify, ...)
	@$(KV) store $(ARGS)

size: ## Disk space of a model's KV cache (ARGS="--model DIR --tokens N", --common)
	@$(KV) size $(ARGS)

report: ## One HTML page with plots of the last hours (ARGS="--hours 24"); needs KV_OBSERVABILITY=1
	@$(KV) report $(ARGS)

observe: ## Every name and panel against the running Prometheus (ARGS=check, panel, scenario, silence, cost)
	@$(KV) observe $(ARGS)

rollback: ## Back to the plain vLLM; the cache on disk stays for the next `make up`
	@$(KV) rollback $(ARGS)

build: ## Build the images here, and use them from the next `make up` on
	@$(KV) build $(ARGS)

pull: ## Pull the images by the digests of versions.lock, and use them from then on
	@$(KV) pull $(ARGS)

test: ## All tests, the running stack included; from nothing
	@scripts/test $(ARGS)

test-fast: ## The tests that need no engine and no more than a minute
	@scripts/bootstrap --dev pytest -q -m "not slow and not docker and not stack" tests/unit tests/compose $(ARGS)

test-observability: ## A stack that is watched: targets, traces, failures of what watches
	@scripts/bootstrap --dev pytest -q tests/observability $(ARGS)

soak: ## 20 rounds of each failure, and make up on a bare machine; not part of the tests, takes an hour
	@KVSTRATA_ROUNDS=20 scripts/test -s tests/soak tests/stack/test_survival.py $(ARGS)

lint: ## ruff, mypy, shellcheck, hadolint, yamllint, every compose combination
	@scripts/bootstrap --dev python scripts/lint.py $(ARGS)
