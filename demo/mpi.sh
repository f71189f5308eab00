#!/usr/bin/env bash
# The sixth part of the demo: an unmodified MPI program on four machines that begin on one host,
# spread over a second one that comes, and leave the first one when it goes. A list of hosts
# stands for a batch system, and its hosts are this one. WEFT, GUEST, WORK as in demo.sh.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=demo/lib.sh
. "$here/lib.sh"

# Of the program: about half a minute on two processors.
PAIRS=${MPI_PAIRS:-30}
mkdir -m 700 "$WORK/run-mpi"
export XDG_RUNTIME_DIR=$WORK/run-mpi XDG_STATE_HOME=$WORK/state-mpi

launcher=
end() {
	[ -z "$launcher" ] || kill "$launcher" 2>/dev/null || true
	wait
}
trap end EXIT
trap 'exit 130' INT TERM

status() { "$WEFT" mpi status demo 2>/dev/null | sed -n '/^host/,/^$/s/^/    /p'; }
# Waits until the status says it.
until_it_says() {
	local turns=600
	until "$WEFT" mpi status demo --json 2>/dev/null | tr -d ' \n' | grep -q "$1"; do
		kill -0 "$launcher" 2>/dev/null || fail "the cluster ended: $(cat "$WORK/mpi.err")"
		turns=$((turns - 1))
		[ "$turns" -gt 0 ] || fail "not within 60 s: $1"
		sleep 0.1
	done
}

say "EP of the NAS benchmarks, built for Open MPI, on four machines of one host:"
show "weft mpi run --hosts 1 --vms 4 --memory 128M -- ep $PAIRS"
"$WEFT" mpi run --name demo --image "$GUEST" --hosts 1 --vms 4 --memory 128M --time 30 \
	-- ep "$PAIRS" >"$WORK/mpi.out" 2>"$WORK/mpi.err" &
launcher=$!
until_it_says '"phase":"running"'
status
say "A second host comes while it runs:"
show "weft mpi hosts 2"
"$WEFT" mpi hosts 2 2>/dev/null
until_it_says '"moves":[2-9]'
status
say "And one of them goes:"
show "weft mpi shrink 1"
"$WEFT" mpi shrink 1 2>/dev/null
until_it_says '"moves":[4-9]'
status
code=0
wait "$launcher" || code=$?
launcher=
sed 's/^/    /' "$WORK/mpi.out"
[ "$code" -eq 0 ] || fail "$(cat "$WORK/mpi.err")"
grep -q ": right" "$WORK/mpi.out" || fail "the result of EP is wrong"
grep "after .* expected\|the program ended" "$WORK/mpi.err" | sed 's/^/    /'
