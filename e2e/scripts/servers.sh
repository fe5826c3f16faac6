#!/usr/bin/env bash
# Makes sure that the programs are there of which `make up` and the tests run private servers, and a
# C compiler for the crates that need one. Installs Debian's packages if it may.
#
# Debian starts a server that it installs. Nothing here needs those, and they keep their own ports and
# data, so they are left alone; but their start is suppressed where this script installs them.
set -euo pipefail

missing=()
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || [ -n "${E2E_PG_BIN:-}" ] || missing+=(postgresql)
case ${E2E_RABBITMQ:-} in
    '') [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || missing+=(rabbitmq-server) ;;
    4.3) ;; # set up at the end
    *)
        echo "E2E_RABBITMQ=$E2E_RABBITMQ is no broker that the tests know: 4.3, or nothing for the distribution's" >&2
        exit 1
        ;;
esac
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v setpriv >/dev/null || missing+=(util-linux)

if ! command -v cargo >/dev/null; then
    echo "Rust is missing: install it from https://rustup.rs (1.95 or newer)" >&2
    exit 1
fi

install() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "missing: $*. On Debian or Ubuntu: sudo apt-get install $*" >&2
        exit 1
    fi
    echo "installing $*"
    export DEBIAN_FRONTEND=noninteractive
    policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        trap 'rm -f $policy' EXIT
    fi
    apt-get update -q
    apt-get install -qy --no-install-recommends "$@"
}
[ ${#missing[@]} = 0 ] || install "${missing[@]}"
[ -z "${E2E_RABBITMQ:-}" ] || "${BASH_SOURCE%/*}/rabbitmq-$E2E_RABBITMQ.sh"
