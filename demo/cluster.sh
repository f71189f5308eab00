#!/usr/bin/env bash
# The fifth part of the demo: three daemons on this machine form a cluster without an etcd. A
# machine finds no host that holds it and is spread over two; when a program ends it is pulled
# together, while its guest runs. WEFT, GUEST, WORK as in demo.sh; PAGE is a prefix for pictures
# of the page, made where Chromium is installed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=demo/lib.sh
. "$here/lib.sh"

pids=()
end() {
	as home vm stop --timeout 0 web >"$WORK/stop" 2>&1 || true
	for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
	wait "${pids[@]}" 2>/dev/null || true
}
trap end EXIT
trap 'exit 130' INT TERM

# weft, as one of the hosts.
as() {
	local host=$1
	shift
	WEFT_CONFIG=$WORK/$host XDG_RUNTIME_DIR=$WORK/run-$host "$WEFT" "$@"
}

free_port() {
	local port
	while :; do
		port=$((20000 + RANDOM % 12000))
		(exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
	done
	echo "$port"
}

# Waits until a command succeeds.
until_it() {
	local turns=300
	until "$@" >/dev/null 2>&1; do
		turns=$((turns - 1))
		[ "$turns" -gt 0 ] || fail "not within 60 s: $*"
		sleep 0.2
	done
}
plan_has() { as home plan | grep -q "$1"; }
plan() { as home plan | sed 's/^/    /'; }

store=127.0.0.1:$(free_port)
"$WEFT" cluster store "$WORK/state" --listen "$store" 2>"$WORK/store.log" &
pids+=($!)
for host in home alpha beta; do
	mkdir -m 700 "$WORK/run-$host"
	as "$host" node init >/dev/null 2>&1
	port=$(free_port)
	printf 'listen = "127.0.0.1:%d"\nmemory = "1500M"\n' "$port" >"$WORK/$host/node.toml"
	at=(--store "etcd://$store" --name "$host" --address "127.0.0.1:$port")
	if [ "$host" = home ]; then
		until_it as home cluster init demo "${at[@]}"
	else
		token=$(as home cluster invite 2>/dev/null | grep -o 'weft-join-[0-9a-f]*')
		as "$host" cluster join "$token" "${at[@]}" 2>/dev/null
	fi
	WEFT_CONFIG=$WORK/$host XDG_RUNTIME_DIR=$WORK/run-$host "$WEFT" node start 2>"$WORK/$host.log" &
	pids+=($!)
done
until_it plan_has "decides"
for host in home alpha beta; do until_it plan_has "^$host *lends"; done

say "Three hosts that lend 1500M each. A program takes most of home's room:"
show "weft run --cluster --memory 500M -- sleep 600"
WEFT_CONFIG=$WORK/home XDG_RUNTIME_DIR=$WORK/run-home "$WEFT" run --cluster --memory 500M -- \
	sleep 600 2>"$WORK/program.log" &
program=$!
pids+=("$program")
until_it plan_has "program"
say
say "Then no host has room for a machine of 500 MiB at home; two together have:"
show "weft vm start --cluster --name web --cpus 2 --memory 500M --kernel vmlinux --initrd busybox.cpio"
as home vm start --cluster --name web --backend soft --cpus 2 --memory 500M --kernel "$GUEST/vmlinux" \
	--initrd "$GUEST/busybox.cpio" --cmdline 'console=ttyS0 quiet' >"$WORK/start" 2>&1 ||
	fail "the machine did not start: $(cat "$WORK/start")"
say
show "weft plan"
plan

picture() {
	if [ -z "${PAGE:-}" ] || ! command -v chromium >/dev/null || ! command -v python3 >/dev/null; then
		return 0
	fi
	local link
	WEFT_CONFIG=$WORK/home XDG_RUNTIME_DIR=$WORK/run-home "$WEFT" cluster serve \
		--listen "127.0.0.1:$(free_port)" >"$WORK/link-$1" 2>/dev/null &
	local server=$!
	until_it grep -q http "$WORK/link-$1"
	link=$(head -n 1 "$WORK/link-$1")
	if python3 "$here/../tests/page/browse.py" "$link" --run web --picture "$PAGE-$1.png" >/dev/null; then
		say "    the page: $PAGE-$1.png"
	fi
	kill "$server" 2>/dev/null || true
	wait "$server" 2>/dev/null || true
}
picture before

say
say "The program ends. The cluster pulls the machine together, while its guest runs:"
kill "$program"
is_whole() { as home plan | grep -Eq '^web .* home 2/[0-9.]+ MiB$'; }
until_it is_whole
plan
picture after
say
show "weft cluster log"
as home cluster log | tail -n 6 | sed 's/^/    /'
