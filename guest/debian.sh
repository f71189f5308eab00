# Debian's own kernel, an initrd with its drivers, and a Debian root image. Read
# by guest/build, after small.sh.
# shellcheck shell=bash

DEBIAN_KERNEL=linux-image-cloud-amd64
# Drivers that the stock kernel has as modules; ext4 and the serial port are in.
# The last two are the power button's.
MODULES=(virtio_pci virtio_mmio virtio_blk virtio_net virtio_console virtio-rng virtio_balloon button evdev)
ROOT_SIZE=3G

build_debian() {
	need apt-cache=apt dpkg-deb=dpkg gcc=gcc python3=python3
	build_initrds
	build_debian_kernel
	build_debian_root
}

# --- Kernel and initrd -------------------------------------------------------

build_debian_kernel() {
	local image version made_from
	# The package is a name for the newest one: the kernel is what it depends on.
	version_of $DEBIAN_KERNEL >/dev/null
	image=$(apt-cache depends --important $DEBIAN_KERNEL |
		sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -n 1)
	[ -n "$image" ] || fail "apt does not say which kernel $DEBIAN_KERNEL stands for"
	version=$(version_of "$image")
	made_from=$(key "$(cat "$out/.made/initrds")" "$here/debian.sh" "$here/lib.sh" "$image" "$version")
	if fresh debian-kernel "$made_from" debian/vmlinuz debian/initrd.cpio.gz; then
		say "Debian's kernel is up to date ($version)"
		return
	fi
	need depmod=kmod modprobe=kmod gzip=gzip
	local work=$out/build/debian-kernel release package
	package=$(fetch "$image")
	rm -rf "$work"
	mkdir -p "$work/package" "$work/initrd"
	dpkg-deb -x "$package" "$work/package"
	release=${image#linux-image-}
	[ -f "$work/package/boot/vmlinuz-$release" ] || fail "$image holds no vmlinuz-$release"
	cp -a "$out/busybox-tree/." "$work/initrd/"
	add_modules "$work/package" "$release" "$work/initrd"
	put debian/vmlinuz <"$work/package/boot/vmlinuz-$release"
	# A reader of the first bytes does not unpack gzip: the mark is an archive of its own.
	mkdir "$work/mark"
	touch "$work/mark/weft-late-vcpus"
	{
		python3 "$here/mkcpio" "$work/mark"
		python3 "$here/mkcpio" "$work/initrd" | gzip -9n
	} | put debian/initrd.cpio.gz
	rm -rf "$work"
	made debian-kernel "$made_from"
	say "made debian/vmlinuz ($release) and debian/initrd.cpio.gz"
}

# add_modules PACKAGE RELEASE TREE: the modules, and /lib/modules/load, which
# names them so that each comes after those that it needs.
add_modules() {
	local package=$1 release=$2 tree=$3 module file
	PATH=$PATH:/usr/sbin:/sbin depmod -b "$package" "$release"
	mkdir -p "$tree/lib/modules"
	for module in "${MODULES[@]}"; do
		PATH=$PATH:/usr/sbin:/sbin modprobe -d "$package" -S "$release" --show-depends "$module" ||
			fail "Debian's kernel $release has no module $module"
	done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' |
		while read -r file; do
			cp "$file" "$tree/lib/modules/"
			basename "$file"
		done >"$tree/lib/modules/load"
}

# --- Root image --------------------------------------------------------------

build_debian_root() {
	local made_from
	build_debian_base
	made_from=$(key "$(cat "$out/.made/initrds" "$out/.made/debian-base")" \
		"$here/debian.sh" "$here/lib.sh")
	if fresh debian-root "$made_from" debian/root.ext4; then
		say "the Debian root image is up to date"
		return
	fi
	need_root
	need mke2fs=e2fsprogs zstd=zstd
	local tree=$out/build/debian-root
	rm -rf "$tree"
	mkdir -p "$tree"
	zstd -dc "$out/debian/base.tar.zst" | tar -x --numeric-owner -C "$tree"
	finish_root "$tree"
	# Neither a loop device nor a mount: mke2fs copies the folder.
	rm -f "$out/debian/root.ext4.new"
	PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -L weft-root -E root_owner=0:0 \
		-d "$tree" "$out/debian/root.ext4.new" $ROOT_SIZE >>"$out/root.log" 2>&1 ||
		fail "mke2fs failed: see $out/root.log"
	mv "$out/debian/root.ext4.new" "$out/debian/root.ext4"
	rm -rf "$tree"
	made debian-root "$made_from"
	say "made debian/root.ext4"
}

need_root() {
	[ "$(id -u)" -eq 0 ] || lack "the Debian root image has to be made by root (files of many owners)"
}

# The packages alone: they take most of the time, and change least.
build_debian_base() {
	local made_from
	made_from=$(key "$here/debian.sh" "$here/lib.sh" "$here/debian-packages")
	if fresh debian-base "$made_from" debian/base.tar.zst; then
		return
	fi
	need_root
	need mmdebstrap=mmdebstrap zstd=zstd
	local started=$SECONDS packages sources
	sources=$(debian_sources)
	[ -n "$sources" ] || lack "apt has no package source of Debian's (apt-get update?)"
	packages=$(sed 's/#.*//' "$here/debian-packages" | xargs | tr ' ' ',')
	say "fetching a Debian system (log: $out/root.log)"
	mkdir -p "$out/debian"
	if ! mmdebstrap --mode=root --variant=essential --include="$packages" \
		--aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' \
		--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
		--format=tar "${proxy_options[@]}" "" - - <<<"$sources" 2>"$out/root.log" |
		zstd -q -T0 -3 | put debian/base.tar.zst; then
		tail -n 20 "$out/root.log" >&2
		fail "mmdebstrap failed: see $out/root.log"
	fi
	made debian-base "$made_from"
	say "the Debian system took $((SECONDS - started)) s"
}

# The machine's own Debian sources, without what else apt is told to use here.
debian_sources() {
	apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' \
		'Created-By: Packages' 'Origin: Debian' 'Component: main' | sort -u
}

# What the machine's apt needs to reach them.
proxy_options=()
while IFS= read -r option; do
	proxy_options+=("--aptopt=$option")
done < <(apt-config dump 2>/dev/null | grep -i '^Acquire::https\?::proxy ')

# finish_root TREE: /sbin/init is the initrds' own, with a busybox beside it.
finish_root() {
	local tree=$1 program
	install -m 0755 "$out/busybox-tree/init" "$tree/sbin/init"
	install -m 0755 "$out/busybox-tree/bin/busybox" "$tree/bin/busybox"
	cp -a "$out/busybox-tree/etc/." "$tree/etc/"
	for program in "$here"/programs/*; do
		program=$(basename "$program" .c)
		[ -x "$out/busybox-tree/bin/$program" ] || continue
		install -m 0755 "$out/busybox-tree/bin/$program" "$tree/usr/local/bin/$program"
	done
	echo weft >"$tree/etc/hostname"
	printf '127.0.0.1 localhost weft\n' >"$tree/etc/hosts"
	: >"$tree/etc/resolv.conf"
}
