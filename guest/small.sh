# The initrds that need no disk. Read by guest/build.
# shellcheck shell=bash

build_small() {
	need apt-cache=apt dpkg-deb=dpkg gcc=gcc make=make python3=python3
	build_kernels
	build_initrds
}

# --- Initrds -----------------------------------------------------------------

build_initrds() {
	local version made_from work=$out/build/initrd
	version=$(version_of busybox-static)
	made_from=$(key "$here/init" "$here/programs" "$here/mkcpio" "$here/small.sh" \
		"$here/lib.sh" "$version" "$(compiler)")
	if fresh initrds "$made_from" tiny.cpio busybox.cpio busybox-tree/init; then
		say "the initrds are up to date"
		return
	fi
	rm -rf "$work" "$out/busybox-tree"
	mkdir -p "$work/tiny/dev" "$work/tiny/proc"
	# No library, no separate segments: a file of a page or two.
	gcc -Os -Wall -Wextra -static -nostdlib -ffreestanding -fno-stack-protector \
		-fno-asynchronous-unwind-tables -fno-pie -no-pie \
		-Wl,--build-id=none,-z,noseparate-code,-z,noexecstack -s \
		-o "$work/tiny/init" "$here/init/tiny.c"
	python3 "$here/mkcpio" "$work/tiny" | put tiny.cpio

	busybox_tree "$work/busybox"
	touch "$work/busybox/weft-late-vcpus"
	python3 "$here/mkcpio" "$work/busybox" | put busybox.cpio
	# The initrd for Debian's kernel and the root image begin with the same.
	mv "$work/busybox" "$out/busybox-tree"
	rm -rf "$work"
	made initrds "$made_from"
	say "made tiny.cpio and busybox.cpio"
}

# busybox_tree DIRECTORY: what busybox.cpio holds.
busybox_tree() {
	local tree=$1 package program folder
	for folder in bin dev etc proc root run sbin sys tmp; do
		mkdir -p "$tree/$folder"
	done
	package=$(fetch busybox-static)
	dpkg-deb --fsys-tarfile "$package" | tar -xO --wildcards '*/bin/busybox' >"$tree/bin/busybox"
	chmod 0755 "$tree/bin/busybox"
	# Its shell finds the applets by itself; these are for #! lines.
	for program in sh awk env; do
		ln -s busybox "$tree/bin/$program"
	done
	build_programs "$tree/bin"
	install -m 0755 "$here/init/init" "$tree/init"
	install -m 0755 "$here/init/udhcpc" "$tree/etc/udhcpc"
	# Where busybox's acpid looks for what the power button does.
	mkdir -p "$tree/etc/acpi/PWRF"
	install -m 0755 "$here/init/power-button" "$tree/etc/acpi/PWRF/00000080"
	# Says to /init that it is not on the disk yet.
	: >"$tree/weft-initrd"
}

# build_programs DIRECTORY: the programs of guest/programs, for any x86-64. A
# folder there is one program of several files.
build_programs() {
	local source name
	need /usr/include/pthread.h=libc6-dev
	for source in "$here"/programs/*; do
		name=$(basename "$source" .c)
		if [ -d "$source" ]; then
			build_program "$1/$name" "$source"/*.c
			continue
		fi
		case $source in
		*.c) build_program "$1/$name" "$source" ;;
		*.h) ;;
		*) install -m 0755 "$source" "$1/" ;;
		esac
	done
}

# build_program FILE SOURCE...
build_program() {
	local program=$1
	shift
	gcc -O2 -march=x86-64 -fno-math-errno -Wall -Wextra -static -s \
		-o "$program" "$@" -lm
}
