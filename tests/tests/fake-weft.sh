#!/usr/bin/env bash
# Stands in for `weft`: runs the program natively and writes statistics, and is
# wrong in the one way that FAKE_WEFT names. The harness must notice each.
set -u

budget_pages=0 nodes=2 stats=/dev/null jump=auto
while [ $# -gt 0 ]; do
	case $1 in
	--nodes) nodes=$2; shift ;;
	--jump) jump=$2; shift ;;
	--memory) budget_pages=$((${2%%M*} * 256)); shift ;;
	--stats) stats=${2#json=}; shift ;;
	--) shift; break ;;
	esac
	shift
done

pages=$budget_pages pushes=50000 jumps=7
[ "$jump" = never ] && jumps=0
case ${FAKE_WEFT:-right} in
too-many-pages) pages=$((budget_pages * 107 / 100)) ;;
few-pushes) pushes=3 ;;
jumps-anyway) jumps=1 ;;
esac
node() {
	echo "{\"resident_pages_max\": $1, \"pulls\": 10, \"read_ahead\": 0, \"pushes\": $2," \
		"\"jumps_in\": $3, \"jumps_out\": $3, \"bytes_sent\": 1," \
		"\"pull_latency\": {\"p50_ns\": 1000}, \"jump_latency\": {\"p50_ns\": null}}"
}
if [ "${FAKE_WEFT:-right}" != no-stats ]; then
	{
		echo "{\"nodes\": [$(node "$pages" "$pushes" "$jumps")"
		for ((n = 1; n < nodes; n++)); do echo ",$(node 1 0 0)"; done
		echo "]}"
	} >"$stats"
fi

case ${FAKE_WEFT:-right} in
wrong-byte) "$@" | sed 's/rounds/rounbs/'; exit "${PIPESTATUS[0]}" ;;
short) "$@" | head -c 4; exit "${PIPESTATUS[0]}" ;;
wrong-exit) "$@"; exit 43 ;;
signal) "$@"; kill -TERM $$ ;;
hang) "$@"; sleep 600 ;;
orphan) "$@"; code=$?; env -i setsid sleep 60 & sleep 0.3; exit "$code" ;;
wrong-output) "$@"; code=$?; printf x | dd of=file bs=1 seek=12345 conv=notrunc status=none; exit "$code" ;;
*) exec "$@" ;;
esac
