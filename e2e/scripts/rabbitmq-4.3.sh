#!/usr/bin/env bash
# Sets up RabbitMQ 4.3 for the tests, next to whatever the machine has: Debian's packages of it, of
# its Erlang and of every library below them, unpacked but not installed. It needs apt, and neither
# root nor Docker; 70 MB to fetch, 160 MB in the cache (`$XDG_CACHE_HOME` or `~/.cache`), and less than a
# minute, once for all clones.
#
# Debian 12's C library is too old for these programs. So each of Erlang's executables is told to use
# the loader and the libraries that came with it; those paths are absolute, and the directory cannot
# be moved.
#
# Two at once: the second waits for the first. The file `ready` comes last, and without it the
# directory counts for nothing: what a killed run left, downloads included, is removed by the next.
set -euo pipefail

version=4.3
# Debian's testing. When it has moved on, and Debian has a stable release with this version, that one.
suite=forky

fail() { echo "cannot set up RabbitMQ $version: $*" >&2; exit 1; }

# e2e/src/rabbitmq/programs.rs looks in the same place.
cache=${XDG_CACHE_HOME:-${HOME:+$HOME/.cache}}
dir=$cache/e2e-rabbitmq-$version
case $cache in
    # Erlang's and RabbitMQ's own scripts do not quote it.
    *[!A-Za-z0-9/._+-]*) fail "$cache has characters in it that its scripts do not bear: set XDG_CACHE_HOME to a plain path" ;;
    /*) ;;
    *) fail "no place for it: set HOME or XDG_CACHE_HOME to an absolute path" ;;
esac
# Erlang starts by either of these; the second is the one that a running node finds, which starts
# another to look for the rest of its cluster. Once more on what an earlier version of this script left.
relocate() {
    sed -i "s,ROOTDIR=/usr/lib/erlang\$,ROOTDIR=$dir/usr/lib/erlang," "$dir"/usr/lib/erlang/{,erts-*/}bin/erl
}
ready() {
    [ -e "$dir/ready" ] || return 1
    relocate
    echo "RabbitMQ $(cat "$dir/ready") is in $dir"
}
! ready || exit 0

command -v apt-get >/dev/null || fail "apt-get is missing: this takes Debian or a relative"
for keyring in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg} ''; do
    [ ! -r "$keyring" ] || break
done
[ -n "$keyring" ] || fail "Debian's keys are missing: apt-get install debian-archive-keyring"
mkdir -p "$cache" && : >>"$dir.lock" || fail "set XDG_CACHE_HOME to a directory that can be written"
exec 9>>"$dir.lock"
flock 9
! ready || exit 0

echo "setting up RabbitMQ $version in $dir"
rm -rf "$dir"
trap 'rm -rf "$dir"' EXIT
work=$dir/work
log=$work/log
run() { "$@" >"$log" 2>&1 || { cat "$log" >&2; return 1; }; }

# An apt that knows of nothing but this suite, with an empty machine to install on. The machine's
# proxies and the like stay in force; what it does after an update is for the machine's own lists.
mkdir -p "$work"/{state/lists/partial,cache/archives/partial}
touch "$work/state/status"
cat >"$work/apt.conf" <<CONF
Dir::State "$work/state";
Dir::State::status "$work/state/status";
Dir::Cache "$work/cache";
Dir::Etc::sourcelist "$work/debian.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
APT::Install-Recommends "false";
APT::Get::Assume-Yes "true";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Update::Error-Mode "any";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
CONF
update() {
    cat >"$work/debian.sources" <<SOURCES
Types: deb
URIs: $1
Suites: $suite
Components: main
Architectures: $(dpkg --print-architecture)
Signed-By: $keyring
SOURCES
    run apt-get -c "$work/apt.conf" update
}

# The mirrors that this machine uses for Debian, then Debian's own. What another distributor keeps
# under such a name is not signed with Debian's keys.
mirrors=$(apt-get update --print-uris | sed -n "s,^'\(.*/debian\)/dists/.*InRelease' .*,\1,p" | sort -u)
for mirror in $mirrors http://deb.debian.org/debian ''; do
    [ -n "$mirror" ] || fail "no mirror has a Debian $suite that apt trusts, see above"
    ! update "$mirror" || break
done
run apt-get -c "$work/apt.conf" install --download-only "rabbitmq-server=$version.*" patchelf ||
    fail "Debian $suite does not have it any more, or not all that it needs"

for package in "$work"/cache/archives/*.deb; do
    dpkg-deb --extract "$package" "$dir"
done
find "$dir" -perm /6000 -exec chmod ug-s {} + # nobody keeps these up to date
libraries=$(dirname "$dir"/usr/lib/*/libc.so.6)
loader=$(echo "$libraries"/ld-linux*.so.*)
patchelf() { "$loader" --library-path "$libraries" "$dir/usr/bin/patchelf" "$@"; }
find "$dir/usr/lib/erlang" -type f -perm -u+x | while read -r program; do
    if patchelf --print-interpreter "$program" >/dev/null 2>&1; then # else a script
        patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$program"
    fi
done
relocate

# It runs, with its own Erlang, which finds its own libraries.
HOME=$work run "$dir/usr/lib/erlang/bin/erl" -noshell -eval '{ok, _} = application:ensure_all_started(crypto), halt().'
server=$(echo "$dir"/usr/lib/rabbitmq/lib/rabbitmq_server-*)
echo "${server##*-}" >"$work/ready"
mv "$work/ready" "$dir/ready"
trap - EXIT
rm -rf "$work"
ready
