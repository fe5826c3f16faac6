#!/usr/bin/env bash
# Makes sure that the programs are there of which `make up` and the tests run private servers, and a
# C compiler for the crates that need one. Installs Debian's packages if it may.
#
# Debian starts a server that it installs. Nothing here needs those, and they keep their own ports and
# data, so they are left alone; but their start is suppressed where this script installs them.
set -euo pipefail

missing=()
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || [ -n "${E2E_PG_BIN:-}" ] || missing+=(postgresql)
[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || [ -n "${E2E_RABBITMQ_BIN:-}" ] || missing+=(rabbitmq-server)
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v setpriv >/dev/null || missing+=(util-linux)

if ! command -v cargo >/dev/null; then
    echo "Rust is missing: install it from https://rustup.rs (1.95 or newer)" >&2
    exit 1
fi
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: ${missing[*]}. On Debian or Ubuntu: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
apt-get update -q
apt-get install -qy --no-install-recommends "${missing[@]}"
