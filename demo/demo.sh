#!/usr/bin/env bash
# Shows Weft at work on this machine, on two local nodes:
#
#   1. GNU sort, unmodified, whose memory no node may hold alone, compared byte
#      for byte with a native run;
#   2. a search of a 512 MB array that is spread over both, with the execution
#      staying at home, and with it jumping to where the pages are;
#   3. one Linux whose two vCPUs and memory lie on both nodes: what it sees, and a
#      job on both vCPUs against the same on one core;
#   4. one Linux that writes to its memory and answers pings while it goes to another
#      host, is split over two, and comes together again (as root; moves.sh);
#   5. a cluster of three daemons that spreads a machine over two hosts and pulls it together
#      when there is room (cluster.sh);
#   6. an MPI program on machines that follow the hosts of a batch system (mpi.sh).
#
# Called by `make demo`. WEFT, BENCH and PROGRAMS say where the binaries are, GUEST
# where `make guest` left its kernel; WORK, where to write about 700 MB (a temporary
# folder, removed at the end, by default); PICTURE, where the picture of the pings goes; PAGE, how
# the pictures of the cluster's page begin, where Chromium makes some.
set -euo pipefail

WEFT=${WEFT:?names the weft binary}
PROGRAMS=${PROGRAMS:?names the folder of the built programs}
BENCH=${BENCH:?names the weft-bench binary}
PICTURE=${PICTURE:-pings.svg}
PAGE=${PAGE:-cluster-page}
TEXT_MIB=${TEXT_MIB:-200}
SORT_BUFFER_MIB=${SORT_BUFFER_MIB:-190}
SORT_MEMORY=${SORT_MEMORY:-96M,160M}
ARRAY_MIB=${ARRAY_MIB:-512}
ARRAY_MEMORY=${ARRAY_MEMORY:-320M,320M}
GUEST=${GUEST:?names the folder of the built kernel}
ROUNDS=3
# Of the guest's job: T takes about a second, S about five.
NPB_SIZE=${NPB_SIZE:-S}
export LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=demo/lib.sh
. "$here/lib.sh"

work=$(mktemp -d "${WORK:-${TMPDIR:-/tmp}}/weft-demo.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# Runs a command with a bound; what it writes to standard error is kept and
# shown. The seconds it took are left in `took`.
timed() {
	local log=$1 start
	shift
	start=$(now)
	if ! timeout 900 "$@" 2>"$log"; then
		cat "$log" >&2
		fail "this failed: $*"
	fi
	took=$(since "$start")
}
summary() { sed 's/^/    /' "$1"; }

# Two bars, the longer one forty columns wide.
bars() {
	awk -v a="$2" -v b="$4" -v an="$1" -v bn="$3" -v on="$cyan" -v off="$plain" '
		function bar(name, value, most,   n, text) {
			n = most > 0 ? int(value / most * 40 + 0.5) : 0
			if (n < 1) n = 1
			text = ""
			while (n-- > 0) text = text "█"
			printf "    %-24s %9.3f s  %s%s%s\n", name, value, on, text, off
		}
		BEGIN { most = a > b ? a : b; bar(an, a, most); bar(bn, b, most) }'
}

# The first processor that this shell may use.
first_core() { taskset -pc $$ | sed 's/.*: *//; s/[,-].*//'; }

# The seconds of the guest's `npb … : SECONDS s, verified`.
job_seconds() {
	local seconds
	seconds=$(sed -n 's/^npb .*: \([0-9.]*\) s, verified.*/\1/p' "$1" | tail -n 1)
	[ -n "$seconds" ] || fail "the guest's job did not end well"
	echo "$seconds"
}

# What the nodes had to tell each other.
pages_summary() {
	awk -F'[:,]' '
		/memory.(read|write|upgrade)-faults"/ { faults += $2 }
		/memory.pages-sent"/ { pages += $2 }
		/to-other-slices"/ { interrupts += $2 }
		/"slice[0-9]+.sent-bytes"/ { bytes += $2 }
		END {
			printf "    between the nodes: %d faults, %d pages, %d interrupts, %.1f MB\n",
				faults, pages, interrupts, bytes / 1e6
		}' "$1"
}

[ -x "$WEFT" ] || fail "$WEFT is missing: make build"
[ -x "$BENCH" ] || fail "$BENCH is missing: make build"
[ -x "$PROGRAMS/text" ] || fail "$PROGRAMS/text is missing: make programs"
[ -f "$GUEST/tools.cpio" ] || fail "$GUEST/tools.cpio is missing: make guest"
[ -f "$GUEST/vmlinux" ] || fail "$GUEST/vmlinux is missing: make guest"
free_kib=$(df -Pk "$work" | awk 'NR == 2 { print $4 }')
[ "$free_kib" -gt $((TEXT_MIB * 4 * 1024)) ] || fail "$work has less than $((TEXT_MIB * 4)) MiB free: set WORK"

heading "Weft: one program, the memory of two nodes"
say "Two nodes on this machine. Only the fourth part needs root; nothing needs a kernel module"
say "or another program."

heading "1. GNU sort, $TEXT_MIB MiB of text, a buffer of $SORT_BUFFER_MIB MiB"
say "The nodes may hold ${SORT_MEMORY/,/ and } of it: neither is enough alone."
"$PROGRAMS/text" "$TEXT_MIB" >"$work/text"
sort_command=(sort -S "${SORT_BUFFER_MIB}M" --parallel=1 -T "$work" "$work/text")
say
show "${sort_command[*]//$work\//} -o native"
timed "$work/log" "${sort_command[@]}" -o "$work/native"
native_s=$took
say "    $native_s s"
say
show "weft run --nodes 2 --memory $SORT_MEMORY --stats text -- ${sort_command[*]//$work\//} -o stretched"
timed "$work/log" "$WEFT" run --nodes 2 --memory "$SORT_MEMORY" --stats text -- \
	"${sort_command[@]}" -o "$work/stretched"
weft_s=$took
summary "$work/log"
say
show "cmp native stretched"
cmp "$work/native" "$work/stretched" || fail "the results differ"
say "    ${green}the same, byte for byte: $(stat -c %s "$work/native") bytes$plain"
bars "native, one machine" "$native_s" "weft, two small nodes" "$weft_s"
rm -f "$work/text" "$work/native" "$work/stretched"

heading "2. Searching $ARRAY_MIB MiB, $ROUNDS times, with and without jumps"
say "The nodes may hold ${ARRAY_MEMORY/,/ and } of it. Pull-only brings pages to the program;"
say "a jump brings the program to the pages."
native=$("$PROGRAMS/search_rounds" "$ARRAY_MIB" 1 "$ROUNDS" 2>/dev/null)
for jump in never auto; do
	say
	show "weft run --nodes 2 --memory $ARRAY_MEMORY --jump $jump --stats text -- search_rounds $ARRAY_MIB 1 $ROUNDS"
	timed "$work/log" "$WEFT" run --nodes 2 --memory "$ARRAY_MEMORY" --jump "$jump" --stats text -- \
		"$PROGRAMS/search_rounds" "$ARRAY_MIB" 1 "$ROUNDS" >"$work/found"
	[ "$(cat "$work/found")" = "$native" ] || fail "--jump $jump found something else than the native run"
	summary "$work/log"
	measured=$(sed -n 's/.*measured \([0-9.]*\) s.*/\1/p' "$work/log" | tail -n 1)
	[ -n "$measured" ] || fail "the search did not say how long it took"
	printf -v "search_${jump}_s" '%s' "$measured"
done
say
bars "pages come to it" "$search_never_s" "it goes to the pages" "$search_auto_s"
awk -v a="$search_never_s" -v b="$search_auto_s" -v on="$bold$green" -v off="$plain" \
	'BEGIN { if (b > 0) printf "    %s%.1f times as fast%s\n", on, a / b, off }'

heading "3. One Linux over two nodes"
say "Two vCPUs and 512 MiB, half of each on either node. The guest takes it for one"
say "computer with two NUMA nodes; its processes run on both."
cat "$GUEST/busybox.cpio" "$GUEST/tools.cpio" >"$work/initrd"
report='lscpu | grep -E "^(CPU\(s\)|On-line|NUMA)"; numactl -H'
job="npb -p 2 ep $NPB_SIZE"
machine=(--memory 512M --cpus 2 --kernel "$GUEST/vmlinux" --initrd "$work/initrd" --ready "weft-guest: hello")
say
show "weft vm run --nodes 2 --cpus 2 --memory 512M --kernel vmlinux --initrd initrd --stats json=FILE --cmdline 'console=ttyS0 quiet weft.run=\"$report; $job\"'"
timed "$work/log" "$WEFT" vm run --nodes 2 "${machine[@]}" --backend soft --stats "json=$work/stats" \
	--cmdline "console=ttyS0 quiet weft.run=\"${report//\"/%22}; $job\"" </dev/null >"$work/console"
sed 's/\r$//; s/^/    /' "$work/console"
two_s=$(job_seconds "$work/console")
say
summary "$work/log"
pages_summary "$work/stats"
say
say "The same job with both vCPUs on one processor, as on a host with one core to spare:"
show "taskset -c 0 weft vm run --cpus 2 --memory 512M … weft.run=\"$job\""
timed "$work/log" taskset -c "$(first_core)" "$WEFT" vm run "${machine[@]}" --backend soft \
	--cmdline "console=ttyS0 quiet weft.run=\"$job\"" </dev/null >"$work/console"
one_s=$(job_seconds "$work/console")
say
bars "one core" "$one_s" "two nodes, a core each" "$two_s"
awk -v a="$one_s" -v b="$two_s" -v on="$bold$green" -v off="$plain" \
	'BEGIN { if (b > 0) printf "    %s%.2f times as fast%s\n", on, a / b, off }'

heading "4. One Linux moves while it works and answers pings"
if why=$(WORK=$work bash "$here/moves.sh" missing); then
	say "skipped: $why"
else
	mkdir "$work/moves"
	WORK=$work/moves WEFT=$WEFT BENCH=$BENCH GUEST=$GUEST PICTURE=$PICTURE \
		timeout --foreground -k 5 120 bash "$here/moves.sh"
fi

heading "5. A cluster finds the room"
mkdir "$work/cluster"
WORK=$work/cluster WEFT=$WEFT GUEST=$GUEST PAGE=$PAGE \
	timeout --foreground -k 10 180 bash "$here/cluster.sh"

heading "6. An MPI program follows its hosts"
mkdir "$work/mpi"
WORK=$work/mpi WEFT=$WEFT GUEST=$GUEST timeout --foreground -k 20 300 bash "$here/mpi.sh"

say
say "${dim}Watch one live with --watch; make bench measures all of it; weft doctor looks at this host.$plain"
