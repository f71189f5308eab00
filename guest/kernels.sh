# The small kernel and the aggregate one: the same source and configuration, with
# guest/patches on top. Read by guest/build.
# shellcheck shell=bash

LINUX_SOURCE=linux-source-6.1

# Builds those of the two that are not up to date, in one tree: the second one only
# compiles what the patches changed.
build_kernels() {
	local version small aggregate stale=() tree=$out/build/linux started=$SECONDS
	version=$(version_of $LINUX_SOURCE)
	small=$(key "$here/small.config" "$here/kernels.sh" "$here/lib.sh" "$version" "$(compiler)")
	aggregate=$(key "$small" "$here/patches")
	fresh small-kernel "$small" vmlinux bzImage System.map || stale+=(small)
	fresh aggregate-kernel "$aggregate" aggregate/vmlinux aggregate/System.map ||
		stale+=(aggregate)
	if [ ${#stale[@]} -eq 0 ]; then
		say "the kernels are up to date ($version)"
		return
	fi
	need bc=bc bison=bison flex=flex xz=xz-utils perl=perl ld=binutils patch=patch \
		/usr/include/libelf.h=libelf-dev
	say "building from $LINUX_SOURCE $version: ${stale[*]} (log: $out/kernel.log)"
	unpack_kernel "$tree"
	configure_kernel "$tree"
	if [ "${stale[0]}" = small ]; then
		make_kernel "$tree" vmlinux bzImage
		put vmlinux <"$tree/vmlinux"
		put System.map <"$tree/System.map"
		put bzImage <"$tree/arch/x86/boot/bzImage"
		made small-kernel "$small"
	fi
	if [ "${stale[-1]}" = aggregate ]; then
		patch_kernel "$tree" "$version"
		make_kernel "$tree" LOCALVERSION=-aggregate vmlinux
		put aggregate/vmlinux <"$tree/vmlinux"
		put aggregate/System.map <"$tree/System.map"
		made aggregate-kernel "$aggregate"
	fi
	rm -rf "$tree"
	say "the kernels (${stale[*]}) took $((SECONDS - started)) s"
}

# unpack_kernel TREE: the source, as Debian has it.
unpack_kernel() {
	local tree=$1 package
	package=$(fetch $LINUX_SOURCE)
	rm -rf "$tree"
	mkdir -p "$tree"
	dpkg-deb --fsys-tarfile "$package" |
		tar -xO "./usr/src/$LINUX_SOURCE.tar.xz" |
		tar -xJ -C "$tree" --strip-components=1
}

# make_kernel TREE ARGUMENT...: what `make` is asked for.
make_kernel() {
	local tree=$1
	shift
	# A name and a time of its own would make every build a different file.
	if ! make -C "$tree" -j"$(nproc)" \
		KBUILD_BUILD_USER=weft KBUILD_BUILD_HOST=weft KBUILD_BUILD_VERSION=1 \
		KBUILD_BUILD_TIMESTAMP="Thu Jan  1 00:00:00 UTC 1970" \
		"$@" >"$out/kernel.log" 2>&1; then
		tail -n 20 "$out/kernel.log" >&2
		fail "the kernel's build failed: see $out/kernel.log"
	fi
}

# patch_kernel TREE VERSION: all patches, in the order of their names. One that fits only after a guess
# could end up in the wrong place: it has to be looked at.
patch_kernel() {
	local tree=$1 file report
	for file in "$here"/patches/*.patch; do
		report=$(patch --directory="$tree" --strip=1 --fuzz=0 --forward --batch \
			--no-backup-if-mismatch <"$file" 2>&1) || {
			echo "$report" >&2
			fail "guest/patches/$(basename "$file") does not fit $LINUX_SOURCE $2"
		}
	done
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
