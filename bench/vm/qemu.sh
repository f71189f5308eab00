#!/usr/bin/env bash
# The mark for the software vCPU: the same kernel, initrd and programs under
# QEMU's own translator (TCG).
#
#   bench/vm/qemu.sh [OPTION...]
#     --images DIR      where `make guest` put its files (target/guest)
#     --kernel FILE     (vmlinux there)        --initrd FILE  (busybox.cpio there)
#     --disk FILE       as /dev/vda, mounted as root
#     --cpus N (1)      --memory SIZE (512M)
#     --boots N (5)     how often the boot is timed
#     --command TEXT    what is run for figures ("bench; workloads")
#     --machine NAME    QEMU's machine (q35 without what it can do without)
#
# Prints `boot SECONDS s`, from the start of QEMU to the guest's first line (the
# median), and what the command prints. docs/guest.md has the reasons.
set -euo pipefail

fail() {
	echo "qemu.sh: $*" >&2
	exit 1
}

images=$(dirname "$0")/../../target/guest
kernel='' initrd='' disk='' cpus=1 memory=512M boots=5 machine=q35,smm=off,vmport=off,sata=off
command='bench; workloads'
# Far beyond what either takes; a hang ends here.
boot_seconds_max=60 command_seconds_max=900

while [ $# -gt 0 ]; do
	[ $# -ge 2 ] || fail "$1 needs a value"
	case $1 in
	--images) images=$2 ;;
	--kernel) kernel=$2 ;;
	--initrd) initrd=$2 ;;
	--disk) disk=$2 ;;
	--cpus) cpus=$2 ;;
	--memory) memory=$2 ;;
	--boots) boots=$2 ;;
	--command) command=$2 ;;
	--machine) machine=$2 ;;
	*) fail "unknown option $1" ;;
	esac
	shift 2
done
kernel=${kernel:-$images/vmlinux}
initrd=${initrd:-$images/busybox.cpio}
command -v qemu-system-x86_64 >/dev/null ||
	fail "QEMU is missing: apt-get install --no-install-recommends qemu-system-x86"
for file in "$kernel" "$initrd" ${disk:+"$disk"}; do
	[ -r "$file" ] || fail "$file is missing: make guest"
done

# qemu SECONDS COMMAND_LINE: the machine, with its console on standard output.
qemu() {
	local devices=() bus=pci
	# microvm's devices sit on the memory bus: it has no PCI.
	[[ $machine != microvm* ]] || bus=device
	[ -z "$disk" ] || devices+=(
		-drive "if=none,id=disk,format=raw,snapshot=on,file=$disk"
		-device "virtio-blk-$bus,drive=disk"
	)
	# Without an ACPI restart register the triple fault (reboot=t) ends it.
	timeout "$1" qemu-system-x86_64 -accel tcg,thread=multi \
		-M "$machine" -smp "$cpus" -m "$memory" \
		-nodefaults -no-user-config -display none -serial stdio -no-reboot \
		"${devices[@]}" -kernel "$kernel" -initrd "$initrd" \
		-append "console=ttyS0 quiet reboot=t weft.reboot $2" </dev/null 2>&1
}

# Seconds until the guest's first line.
boot_seconds() {
	local start=$EPOCHREALTIME line seconds=''
	while IFS= read -r line; do
		if [ -z "$seconds" ] && [[ $line == *"weft-guest: hello"* ]]; then
			seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')
		fi
	done < <(qemu "$boot_seconds_max" weft.run=true)
	[ -n "$seconds" ] || fail "the guest did not reach user space"
	echo "$seconds"
}

if [ "$boots" -gt 0 ]; then
	for ((i = 0; i < boots; i++)); do
		boot_seconds
	done | sort -n | awk '{ v[NR] = $1 } END { printf "boot %.3f s\n", v[int((NR + 1) / 2)] }'
fi

root=''
[ -z "$disk" ] || root='root=/dev/vda'
# A double quote inside the quoted command is written %22 (guest/init/init).
qemu "$command_seconds_max" "$root weft.run=\"${command//\"/%22}\"" | {
	code=''
	while IFS= read -r line; do
		line=${line%$'\r'}
		case $line in
		"weft-guest: exit "*) code=${line##* } ;;
		"weft-guest: "* | "["*) ;;
		*) printf '%s\n' "$line" ;;
		esac
	done
	[ "$code" = 0 ] || fail "the command ended with ${code:-no exit code}"
}
