#!/usr/bin/env bash
# Checks every `query!` against real databases with the migrations applied, and writes what it learns
# to `.sqlx/`, which ordinary builds read instead of a database.
#
#   e2e/scripts/sqlx.sh          regenerate .sqlx/
#   e2e/scripts/sqlx.sh check    regenerate elsewhere and fail if .sqlx/ differs
#
# It is a shell script and not part of the e2e crate, because that crate does not compile while
# `.sqlx/` is stale.
set -euo pipefail
cd "$(dirname "$0")/../.."

mode=${1:-write}
bin=${E2E_PG_BIN:-$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -1)}
[ -x "${bin:-}/initdb" ] || { echo "PostgreSQL's server programs are missing: apt-get install postgresql" >&2; exit 1; }

dir=$(mktemp -d)
port=$((20000 + RANDOM % 10000))
# PostgreSQL refuses to run as root.
as() { if [ "$(id -u)" = 0 ]; then setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; else "$@"; fi; }
[ "$(id -u)" != 0 ] || chown postgres: "$dir"
cleanup() { as "$bin/pg_ctl" -D "$dir/data" -m immediate stop >/dev/null 2>&1 || true; rm -rf "$dir"; }
trap cleanup EXIT

as "$bin/initdb" -D "$dir/data" -U postgres --auth=trust -N >/dev/null
as "$bin/pg_ctl" -D "$dir/data" -l "$dir/log" -w start \
    -o "-p $port -k $dir -c listen_addresses=127.0.0.1 -c fsync=off" >/dev/null
url=postgres://postgres@127.0.0.1:$port
for service in orders inventory; do
    "$bin/psql" -qX -v ON_ERROR_STOP=1 "$url/postgres" -c "CREATE DATABASE $service"
    for migration in migrations/$service/*.sql; do
        "$bin/psql" -qX -v ON_ERROR_STOP=1 "$url/$service" -f "$migration"
    done
done

out=$PWD/.sqlx
[ "$mode" != check ] || out=$dir/sqlx
rm -rf "$out"
mkdir -p "$out"
# The macros run only where cargo sees a change.
touch shared/src/lib.rs orders-service/src/main.rs inventory-service/src/main.rs
SQLX_OFFLINE=false SQLX_OFFLINE_DIR=$out \
    ORDERS_DATABASE_URL=$url/orders INVENTORY_DATABASE_URL=$url/inventory \
    cargo check --quiet -p shared -p orders-service -p inventory-service

if [ "$mode" = check ]; then
    diff -r .sqlx "$out" || { echo ".sqlx/ is stale: run make sqlx" >&2; exit 1; }
    echo ".sqlx/ is fresh: $(find .sqlx -name '*.json' | wc -l) statements checked against real databases"
fi
