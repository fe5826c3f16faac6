# `make up` runs the system, `make test` proves it, `make check` is what a change must pass.

SHELL := /bin/bash
# Everything at once, with the crash points of the failure tests compiled in. Building and testing take
# one set of features, so that the dependencies are compiled once.
ALL := --workspace --all-features --locked

.PHONY: up test test-all test-cluster soak check lint build sqlx fmt servers

up: servers
	@cargo build --workspace --bins --locked
	@E2E_LOG=$${E2E_LOG-orders-service,inventory-service} target/debug/stack

# On the broker that E2E_RABBITMQ names, the distribution's if none.
test: build
	cargo test $(ALL) --doc
	cargo test $(ALL) --lib --bins --no-fail-fast
	cargo test $(ALL) --test e2e --test matrix --test chaos --test model --no-fail-fast

# On both brokers, whatever E2E_RABBITMQ says.
test-all:
	$(MAKE) test E2E_RABBITMQ=
	$(MAKE) test E2E_RABBITMQ=4.3

# Three RabbitMQ nodes, killed, cut off, frozen and restarted. Apart from the rest, as it takes eight
# minutes more, of waiting mostly.
test-cluster: build
	cargo test $(ALL) --test cluster

# Random chaos: `make soak MINUTES=30 SEED=7`.
MINUTES := 10
soak: build
	target/debug/soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

check: lint test

lint: servers
	cargo fmt --all --check
	cargo clippy $(ALL) --all-targets -- -D warnings
	e2e/scripts/sqlx.sh check

build: servers
	cargo build $(ALL) --all-targets

sqlx: servers
	e2e/scripts/sqlx.sh

fmt:
	cargo fmt --all

servers:
	@e2e/scripts/servers.sh
