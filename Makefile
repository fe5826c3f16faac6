# `make up` runs the system, `make test` proves it, `make check` is what a change must pass.

SHELL := /bin/bash
# Everything at once, with the crash points of the failure tests compiled in. Building and testing take
# one set of features, so that the dependencies are compiled once.
ALL := --workspace --all-features --locked

.PHONY: up test check build sqlx fmt servers

up: servers
	@cargo build --workspace --bins --locked
	@E2E_LOG=$${E2E_LOG-orders-service,inventory-service} target/debug/stack

test: servers build
	cargo test $(ALL) --doc
	cargo test $(ALL) --all-targets --no-fail-fast

check: servers
	cargo fmt --all --check
	cargo clippy $(ALL) --all-targets -- -D warnings
	e2e/scripts/sqlx.sh check
	$(MAKE) test

build:
	cargo build $(ALL) --all-targets

sqlx: servers
	e2e/scripts/sqlx.sh

fmt:
	cargo fmt --all

servers:
	@e2e/scripts/servers.sh
