# The step `tools`: Debian's lscpu and numactl with their libraries, an archive that
# goes behind an initrd (`cat busybox.cpio tools.cpio`). Read by guest/build.
# shellcheck shell=bash

# Each package, and what is wanted of it.
TOOLS=(util-linux:lscpu numactl:numactl libsmartcols1:libsmartcols.so.1
	libnuma1:libnuma.so.1 libc6:libc.so.6 libc6:ld-linux-x86-64.so.2)

build_tools() {
	local made_from packages entry wanted file work=$out/build/tools
	need dpkg-deb=dpkg python3=python3
	packages=$(versions "${TOOLS[@]}")
	made_from=$(key "$here/tools.sh" "$here/mkcpio" "$packages")
	if fresh tools "$made_from" tools.cpio; then
		say "the tools are up to date"
		return
	fi
	rm -rf "$work"
	mkdir -p "$work/tree/bin" "$work/tree/lib/x86_64-linux-gnu" "$work/tree/lib64"
	for entry in "${TOOLS[@]}"; do
		wanted=${entry#*:}
		file=$(unpacked "$work" "$entry")
		case $wanted in
		ld-*) cp -L "$file" "$work/tree/lib64/$wanted" ;;
		*.so.*) cp -L "$file" "$work/tree/lib/x86_64-linux-gnu/$wanted" ;;
		*) install -m 0755 "$file" "$work/tree/bin/$wanted" ;;
		esac
	done
	chmod 0755 "$work/tree/lib64"/*
	python3 "$here/mkcpio" "$work/tree" | put tools.cpio
	rm -rf "$work"
	made tools "$made_from"
	say "made tools.cpio"
}

# versions PACKAGE:FILE...: the packages with their versions, for a key.
versions() {
	local entry version
	for entry in "$@"; do
		version=$(version_of "${entry%%:*}") || return
		echo "${entry%%:*}=$version"
	done
}

# unpacked FOLDER PACKAGE:FILE: unpacks the package below the folder, once, and
# prints the path of its program or library of that name.
unpacked() {
	local folder=$1/${2%%:*} file
	if [ ! -d "$folder" ]; then
		file=$(fetch "${2%%:*}") || return
		dpkg-deb -x "$file" "$folder" || return
	fi
	file=$(find "$folder" \( -type f -o -type l \) -name "${2#*:}" \( -path "*/bin/*" -o -path "*/lib*/*" \) | head -n 1)
	[ -n "$file" ] || fail "the package ${2%%:*} holds no ${2#*:}"
	echo "$file"
}
