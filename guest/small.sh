# The small kernel and the initrds that need no disk. Read by guest/build.
# shellcheck shell=bash

LINUX_SOURCE=linux-source-6.1

build_small() {
	need apt-cache=apt dpkg-deb=dpkg gcc=gcc make=make python3=python3
	build_small_kernel
	build_initrds
}

# --- Kernel ------------------------------------------------------------------

build_small_kernel() {
	local version made_from
	version=$(version_of $LINUX_SOURCE)
	made_from=$(key "$here/small.config" "$here/small.sh" "$here/lib.sh" "$version" "$(compiler)")
	if fresh small-kernel "$made_from" vmlinux bzImage System.map; then
		say "the small kernel is up to date ($version)"
		return
	fi
	need bc=bc bison=bison flex=flex xz=xz-utils perl=perl ld=binutils \
		/usr/include/libelf.h=libelf-dev
	say "building the small kernel from $LINUX_SOURCE $version (log: $out/kernel.log)"
	local tree=$out/build/linux started=$SECONDS package
	package=$(fetch $LINUX_SOURCE)
	rm -rf "$tree"
	mkdir -p "$tree"
	dpkg-deb --fsys-tarfile "$package" |
		tar -xO "./usr/src/$LINUX_SOURCE.tar.xz" |
		tar -xJ -C "$tree" --strip-components=1
	configure_kernel "$tree"
	# A name and a time of its own would make every build a different file.
	if ! make -C "$tree" -j"$(nproc)" \
		KBUILD_BUILD_USER=weft KBUILD_BUILD_HOST=weft KBUILD_BUILD_VERSION=1 \
		KBUILD_BUILD_TIMESTAMP="Thu Jan  1 00:00:00 UTC 1970" \
		vmlinux bzImage >"$out/kernel.log" 2>&1; then
		tail -n 20 "$out/kernel.log" >&2
		fail "the kernel's build failed: see $out/kernel.log"
	fi
	put vmlinux <"$tree/vmlinux"
	put System.map <"$tree/System.map"
	put bzImage <"$tree/arch/x86/boot/bzImage"
	rm -rf "$tree"
	made small-kernel "$made_from"
	say "the small kernel took $((SECONDS - started)) s"
}

# tinyconfig with the fragment on top. Fails when the kernel's own rules changed
# what the fragment says.
configure_kernel() {
	local tree=$1 option lost=()
	{
		make -C "$tree" -s tinyconfig
		(cd "$tree" && scripts/kconfig/merge_config.sh -m .config "$here/small.config")
		make -C "$tree" -s olddefconfig
	} >"$out/kernel.log" 2>&1 || {
		tail -n 20 "$out/kernel.log" >&2
		fail "the kernel could not be configured"
	}
	while read -r option; do
		case $option in
		CONFIG_*) grep -qxF "$option" "$tree/.config" || lost+=("$option") ;;
		"# CONFIG_"*" is not set")
			option=${option#\# } option=${option%% *}
			! grep -q "^$option=" "$tree/.config" || lost+=("$option (off)")
			;;
		esac
	done <"$here/small.config"
	[ ${#lost[@]} -eq 0 ] || fail "the kernel did not take these options: ${lost[*]}"
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
