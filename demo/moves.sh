#!/usr/bin/env bash
# The fourth part of the demonstration: a machine that writes to its memory and answers
# pings goes to another host, is split over two more, and comes together again at home,
# while it runs.
#
#   moves.sh missing   why this cannot be shown here; fails when it can
#   moves.sh           shows it
#
# The hosts are daemons on this machine. Daemons, machine and tap device are in
# namespaces of their own (network and processes), which end with this script. That
# needs root. WEFT, GUEST and the work folder WORK are those of demo.sh; BENCH is
# weft-bench, which asks for the pings; PICTURE, where the picture of them goes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=demo/lib.sh
. "$here/lib.sh"
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin

tap=weft-demo
address=10.118.0.1
guest=10.118.0.2
memory_mib=256
# What the guest's program writes to, how often, and how long; it checks all of it at the
# end, and then begins again, until the guest reads a line.
megabytes=64
pages_per_second=2000
seconds=3

missing() {
	if [ "$(id -u)" -ne 0 ]; then
		echo "needs root, for a tap device and namespaces"
	elif ! command -v ip >/dev/null; then
		echo "needs ip (package iproute2)"
	elif [ ! -c /dev/net/tun ]; then
		echo "needs /dev/net/tun"
	elif ! unshare --net --pid --fork --kill-child --mount-proc ip tuntap add dev "$tap" mode tap 2>/dev/null; then
		echo "may not make namespaces and a tap device here"
	else
		return 1
	fi
}

if [ "${1:-}" = missing ]; then
	missing
	exit
fi
if [ -z "${IN_NAMESPACE:-}" ]; then
	IN_NAMESPACE=yes exec unshare --net --pid --fork --kill-child --mount-proc bash "$0"
fi

# The first process of a namespace gets no signal that it has no handler for. What it
# leaves behind ends with it.
trap 'exit 130' INT TERM

WEFT=${WEFT:?names the weft binary}
BENCH=${BENCH:?names the weft-bench binary}
GUEST=${GUEST:?names the folder of the built kernel}
PICTURE=${PICTURE:?names the file for the picture}
work=${WORK:?names a folder to write to}
export XDG_RUNTIME_DIR=$work/run
home=$work/home
mkdir -p "$XDG_RUNTIME_DIR"

as() { WEFT_CONFIG=$1 "$WEFT" "${@:2}"; }
key() { as "$1" node init 2>&1 | grep -o 'weft-key-[0-9a-f]*' | head -n 1; }

# Waits until a command succeeds: `await SECONDS COMMAND…`.
await() {
	local left=$(($1 * 20))
	shift
	until "$@"; do
		[ $((left--)) -gt 0 ] || fail "waited in vain: $*"
		sleep 0.05
	done
}

# Identities that know each other, and a daemon for each but the first.
start_hosts() {
	local host other names=(home alpha beta gamma)
	declare -A keys
	for host in "${names[@]}"; do
		keys[$host]=$(key "$work/$host")
		[ -n "${keys[$host]}" ] || fail "no key for $host"
	done
	for host in "${names[@]}"; do
		for other in "${names[@]}"; do
			[ "$host" = "$other" ] ||
				as "$work/$host" node trust --may both --address "127.0.0.1:${ports[$other]}" \
					"${keys[$other]}" "$other" >>"$work/log" 2>&1
		done
	done
	for host in alpha beta gamma; do
		as "$work/$host" node start --listen "127.0.0.1:${ports[$host]}" --memory 1G >"$work/$host.log" 2>&1 &
		await 10 listens "${ports[$host]}"
	done
}
listens() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# A number of the command's last report.
reported() {
	local value
	value=$(grep -o "\"$1\": *[0-9.]*" "$work/report" | head -n 1 | sed 's/.*: *//')
	echo "${value:-0}"
}

# One of the moves, with what it reports.
step() {
	local name=$1 took=''
	shift
	say
	show "weft vm $*"
	echo "step $name" >&9
	as "$home" vm "$@" --json >"$work/report" 2>"$work/said" || {
		cat "$work/said" "$work/machine.log" >&2
		fail "this failed: weft vm $*"
	}
	took=$(awk -v pause="$(reported pause_ns)" -v bytes="$(reported bytes)" \
		'BEGIN { printf "pause %.1f ms, %.0f MB", pause / 1e6, bytes / 1e6 }')
	echo "done $took" >&9
	printf '    %.2f s, %s\n' "$(reported total_s)" "$took"
	as "$home" vm list | sed 's/^/    /'
	sleep 1
}

declare -A ports=([home]=7201 [alpha]=7202 [beta]=7203 [gamma]=7204)
ip link set lo up
ip tuntap add dev "$tap" mode tap
ip address add "$address/24" dev "$tap"
ip link set "$tap" up
start_hosts

program="dirty $megabytes $pages_per_second $seconds"
script="(while [ ! -e /tmp/stop ]; do $program; done) & read word; touch /tmp/stop; wait"
say "alpha, beta and gamma are daemons that lend (weft node start). The guest's program writes"
say "to $megabytes MB, $pages_per_second pages a second, and checks every page, again and again."
say "Its kernel is pinged each 10 ms."
say
mkfifo "$work/keys" "$work/steps"
show "weft vm run --name demo --cpus 2 --memory ${memory_mib}M --net tap=$tap … weft.run=\"while …; do $program; done\""
as "$home" vm run --name demo --cpus 2 --memory "${memory_mib}M" --net "tap=$tap" --backend soft \
	--kernel "$GUEST/vmlinux" --initrd "$GUEST/busybox.cpio" \
	--cmdline "console=ttyS0 quiet weft.net=$guest/24 weft.run=\"$script\"" \
	<"$work/keys" >"$work/console" 2>"$work/machine.log" &
machine=$!
exec 8>"$work/keys"
await 30 grep -q 'dirty: at work' "$work/console"

"$BENCH" ping "$guest" --every-ms 10 --svg "$PICTURE" <"$work/steps" >"$work/pings" &
pinger=$!
exec 9>"$work/steps"
await 10 grep -q answers "$work/pings"
sleep 1

step "1 migrate" migrate demo alpha
step "2 split" migrate demo beta,gamma --spread
step "3 merge" consolidate demo
exec 9>&-
wait "$pinger" || fail "the pings failed: $(cat "$work/pings")"
say
sed '1d; s/^/    /' "$work/pings"
echo stop >&8
wait "$machine" || fail "the machine ended badly: $(cat "$work/machine.log")"
tr -d '\r' <"$work/console" >"$work/lines"
rounds=$(grep -c '^dirty: at work' "$work/lines")
right=$(grep -c '^dirty: right' "$work/lines" || true)
[ "$rounds" -eq "$right" ] || fail "a page is wrong, or was not checked: $(cat "$work/lines")"
writes=$(awk '/^dirty: right/ { writes += $3 } END { print writes }' "$work/lines")
say
say "    ${green}the guest wrote $writes times and checked every page $right times: all are right$plain"
say "    node 0 stayed in the machine all the time: it has the tap device, through which pings come"
say "    the picture of the pings: $PICTURE"
