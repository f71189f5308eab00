# The steps `mpi` and `scalapack`: a small Debian system with Open MPI and an ssh
# server, as a read-only disk for all machines of a cluster and as an initrd; and
# ScaLAPACK's timers, as programs for such a cluster. Read by guest/build, after
# small.sh.
# shellcheck shell=bash

# What the image has programs, data or libraries of. A library that is needed and
# comes from none of these ends the build.
MPI_PACKAGES=(openmpi-bin libopenmpi3 openmpi-common libpmix2 libmunge2 libhwloc15
	libevent-core-2.1-7 libevent-pthreads-2.1-7 libudev1 zlib1g
	dropbear-bin libtomcrypt1 libtommath1 libgmp10 libcrypt1
	libc6 libgcc-s1 libstdc++6 libgfortran5 libquadmath0)
# What is not in the image at build time, but compiles for it.
MPI_HEADERS=(libopenmpi-dev)

# Components of Open MPI that no guest can use: other networks, other batch systems,
# OpenSHMEM, and those for tests and tools. Each would be loaded at every start.
MPI_WITHOUT=(mtl_\* spml_\* scoll_\* sshmem_\* memheap_\* atomic_\* \*_ofi \*_ucx \*_openib
	\*_monitoring \*_slurm \*_jsm \*_flux \*_gridengine \*_simulator
	reachable_netlink vprotocol_\* crs_\* pml_cm)

# Libraries that programs are linked with, beside what mpirun itself needs.
MPI_LIBRARIES=(libmpi.so.40 libmpi_cxx.so.40 libmpi_mpifh.so.40
	libmpi_usempif08.so.40 libmpi_usempi_ignore_tkr.so.40 libgfortran.so.5)

# Programs of the host: they make keys and log in.
MPI_HOST=(dropbear-bin:dropbearkey dropbear-bin:dbclient libtomcrypt1:libtomcrypt.so.1
	libtommath1:libtommath.so.1 libgmp10:libgmp.so.10 zlib1g:libz.so.1
	libcrypt1:libcrypt.so.1 libc6:libc.so.6 libc6:ld-linux-x86-64.so.2)

LIBRARIES=usr/lib/x86_64-linux-gnu

build_mpi() {
	local work=$out/build/mpi packages made_from started=$SECONDS
	need apt-cache=apt dpkg-deb=dpkg gcc=gcc python3=python3 readelf=binutils \
		ldconfig=libc-bin mke2fs=e2fsprogs
	build_kernels
	build_initrds
	packages=$(package_versions "${MPI_PACKAGES[@]}" "${MPI_HEADERS[@]}")
	made_from=$(key "$(cat "$out/.made/initrds")" "$here/mpi.sh" "$here/mpi" "$here/mkcpio" \
		"$here/lib.sh" "$here/../tests/programs/mpi" "$packages")
	if fresh mpi "$made_from" mpi/root.ext4 mpi/root.cpio mpi/ep mpi/talk "${MPI_HOST[@]/#*:/mpi/host/}"; then
		say "the image for MPI is up to date"
		return
	fi
	rm -rf "$work"
	mkdir -p "$work/packages" "$work/tree" "$work/host"
	unpack_all "$work/packages" "${MPI_PACKAGES[@]}"
	mpi_tree "$work/packages" "$work/tree"
	mpi_programs "$work"
	put_image "$work/tree"
	python3 "$here/mkcpio" "$work/tree" | put mpi/root.cpio
	rm -rf "$work"
	made mpi "$made_from"
	say "made mpi/root.ext4, mpi/root.cpio, mpi/ep and mpi/talk in $((SECONDS - started)) s"
}

# package_versions PACKAGE...: for a key. One question to apt for all, which takes as
# long as for one.
package_versions() {
	local known
	known=$(apt-cache policy "$@" | sed -n 's/^\([^ ]*\):$/\1/p; s/^ *Candidate: */=/p' | paste -sd ' ')
	if [ "$(wc -w <<<"$known")" -ne $(($# * 2)) ] || [[ $known == *'(none)'* ]]; then
		# The one that is missing is named, or there after new lists.
		local package
		for package in "$@"; do
			version_of "$package" >/dev/null || return
		done
		known=$(apt-cache policy "$@" | sed -n 's/^ *Candidate: *//p' | paste -sd ' ')
	fi
	echo "$known"
}

# unpack_all FOLDER PACKAGE...: all into one tree.
unpack_all() {
	local folder=$1 package file
	shift
	for package in "$@"; do
		file=$(fetch "$package")
		dpkg-deb --fsys-tarfile "$file" | tar -x --keep-directory-symlink -C "$folder"
	done
}

# mpi_tree PACKAGES TREE: the files of the image.
mpi_tree() {
	local packages=$1 tree=$2 folder name pattern
	for folder in usr/bin usr/lib usr/lib64 usr/share etc dev proc sys run tmp cluster $LIBRARIES/openmpi/lib; do
		mkdir -p "$tree/$folder"
	done
	for folder in bin lib lib64; do
		ln -s usr/$folder "$tree/$folder"
	done
	ln -s usr/bin "$tree/sbin"
	ln -s bin "$tree/usr/sbin"
	ln -s run/home "$tree/home"
	ln -s run/home/root "$tree/root"
	cp -a "$packages/usr/bin/orterun" "$packages/usr/bin/orted" "$packages/usr/bin/dbclient" \
		"$packages/usr/sbin/dropbear" "$tree/usr/bin/"
	ln -s orterun "$tree/usr/bin/mpirun"
	ln -s orterun "$tree/usr/bin/mpiexec"
	ln -s dbclient "$tree/usr/bin/ssh"
	cp "$out/busybox-tree/bin/busybox" "$tree/usr/bin/"
	# The shell finds its applets by itself; these are for #! lines and for mpirun.
	for name in sh env awk cat cp echo grep hostname ls mkdir rm sed sleep test true false; do
		ln -s busybox "$tree/usr/bin/$name"
	done
	mpi_components "$packages" "$tree"
	for name in "${MPI_LIBRARIES[@]}"; do
		copy_library "$packages" "$tree" "$name"
	done
	copy_needed "$packages" "$tree"
	install -m 0755 "$packages/lib64/ld-linux-x86-64.so.2" "$tree/usr/lib64/"
	mpi_settings "$tree"
}

# mpi_components PACKAGES TREE: Open MPI's parts and its messages.
mpi_components() {
	local packages=$1 tree=$2 pattern folder=$LIBRARIES/openmpi/lib/openmpi3
	cp -a "$packages/$folder" "$tree/$folder"
	rm -f "$tree/$folder"/*ompi_*
	for pattern in "${MPI_WITHOUT[@]}"; do
		compgen -G "$tree/$folder/mca_$pattern.so" >/dev/null ||
			fail "Open MPI has no component $pattern any more: see MPI_WITHOUT"
		# shellcheck disable=SC2086 # a pattern
		rm -f "$tree/$folder"/mca_$pattern.so
	done
	mkdir -p "$tree/usr/share/openmpi"
	cp "$packages"/usr/share/openmpi/help-*.txt "$tree/usr/share/openmpi/"
	mkdir -p "$tree/$LIBRARIES/pmix2/lib/pmix"
	cp "$packages/$LIBRARIES/pmix2/lib/pmix"/pmix_mca_{pcompress_zlib,prm_default}.so \
		"$tree/$LIBRARIES/pmix2/lib/pmix/"
	cp -a "$packages/$LIBRARIES/pmix2/share" "$tree/$LIBRARIES/pmix2/"
}

# copy_library PACKAGES TREE SONAME
copy_library() {
	local packages=$1 tree=$2 name=$3 folder
	for folder in $LIBRARIES lib/x86_64-linux-gnu; do
		if [ -e "$packages/$folder/$name" ]; then
			install -m 0644 "$packages/$folder/$name" "$tree/$LIBRARIES/$name"
			return
		fi
	done
	fail "no package of the image holds $name"
}

# copy_needed PACKAGES TREE: all libraries that the tree's files name as needed.
copy_needed() {
	local packages=$1 tree=$2 name more=1
	while [ $more = 1 ]; do
		more=0
		while read -r name; do
			if [ ! -e "$tree/$LIBRARIES/$name" ] && [ "$name" != ld-linux-x86-64.so.2 ]; then
				copy_library "$packages" "$tree" "$name"
				more=1
			fi
		done < <(needed_by "$tree")
	done
}

# needed_by TREE
needed_by() {
	find "$1/usr/bin" "$1/$LIBRARIES" "$1/cluster" -type f -print0 2>/dev/null |
		xargs -0 readelf -d 2>/dev/null |
		sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u
}

# mpi_settings TREE: /etc, and the first process.
mpi_settings() {
	local tree=$1 name
	install -m 0755 "$out/busybox-tree/init" "$tree/usr/bin/init"
	ln -s usr/bin/init "$tree/init"
	cp -a "$out/busybox-tree/etc/." "$tree/etc/"
	cp -a "$here/mpi/etc/." "$tree/etc/"
	# mpirun has to know the shell by its name.
	install -D -m 0755 "$here/mpi/login" "$tree/usr/lib/weft/sh"
	# What differs from machine to machine is made at the start, in memory.
	for name in hostname hosts machine-id resolv.conf; do
		ln -s "../run/$name" "$tree/etc/$name"
	done
	ln -s ../../run/hostfile "$tree/etc/openmpi/openmpi-default-hostfile"
	PATH=$PATH:/usr/sbin:/sbin ldconfig -r "$tree" -X
	rm -rf "$tree/var"
}

# put_image TREE: one file system without a journal, which nothing ever writes to.
put_image() {
	local tree=$1 kilobytes user=()
	# Without root the files still belong to root in the image, by a user namespace.
	[ "$(id -u)" -eq 0 ] || user=(unshare -r)
	kilobytes=$(du -sk --apparent-size "$tree" | cut -f1)
	mkdir -p "$out/mpi"
	rm -f "$out/mpi/root.ext4.new"
	PATH=$PATH:/usr/sbin:/sbin "${user[@]}" mke2fs -q -t ext4 -L weft-mpi -m 0 \
		-O '^has_journal,^resize_inode,^metadata_csum' -E root_owner=0:0 -N 1024 \
		-d "$tree" "$out/mpi/root.ext4.new" "$((kilobytes * 11 / 10 + 3072))k" >"$out/root.log" 2>&1 || {
		tail -n 5 "$out/root.log" >&2
		fail "mke2fs failed: see $out/root.log"
	}
	mv "$out/mpi/root.ext4.new" "$out/mpi/root.ext4"
}

# mpi_programs WORK: the test program, compiled as mpicc would, and the host's tools.
mpi_programs() {
	local work=$1 name entry file
	need /usr/include/stdio.h=libc6-dev
	unpack_all "$work/packages" "${MPI_HEADERS[@]}"
	for name in ep talk; do
		gcc -O2 -march=x86-64 -Wall -Wextra -Wno-cast-function-type -s \
			-I "$work/packages/$LIBRARIES/openmpi/include" \
			-o "$work/$name" "$here/../tests/programs/mpi/$name.c" \
			"$work/tree/$LIBRARIES/libmpi.so.40" -Wl,--allow-shlib-undefined -lm
		put "mpi/$name" <"$work/$name"
		chmod 0755 "$out/mpi/$name"
	done
	for entry in "${MPI_HOST[@]}"; do
		file=$(unpacked "$work/host" "$entry")
		put "mpi/host/${entry#*:}" <"$file"
		chmod 0755 "$out/mpi/host/${entry#*:}"
	done
}

# --- ScaLAPACK ---------------------------------------------------------------

SCALAPACK_PACKAGES=(scalapack-mpi-test libscalapack-openmpi2.2 libblas3 liblapack3)
SCALAPACK_TIMERS=$LIBRARIES/scalapack/openmpi-tests/PBLAS/TIMING

# Programs with their libraries and input, as a folder for guest/mpi-cluster.
build_scalapack() {
	local work=$out/build/scalapack packages made_from name
	need apt-cache=apt dpkg-deb=dpkg
	packages=$(package_versions "${SCALAPACK_PACKAGES[@]}")
	made_from=$(key "$here/mpi.sh" "$here/mpi/pblas3-input" "$here/lib.sh" "$packages")
	if fresh scalapack "$made_from" mpi/scalapack/bin/dpb3tim mpi/scalapack/bin/spb3tim; then
		say "the ScaLAPACK timers are up to date"
		return
	fi
	rm -rf "$work" "$out/mpi/scalapack"
	mkdir -p "$work" "$out/mpi/scalapack"/{bin,lib}
	unpack_all "$work" "${SCALAPACK_PACKAGES[@]}"
	for name in dpb3tim spb3tim; do
		install -m 0755 "$work/$SCALAPACK_TIMERS/$name" "$out/mpi/scalapack/bin/"
	done
	for name in libscalapack-openmpi.so.2.2 blas/libblas.so.3 lapack/liblapack.so.3; do
		install -m 0644 "$work/$LIBRARIES/$name" "$out/mpi/scalapack/lib/"
	done
	install -m 0755 "$here/mpi/pblas3-input" "$out/mpi/scalapack/bin/"
	rm -rf "$work"
	made scalapack "$made_from"
	say "made mpi/scalapack"
}
