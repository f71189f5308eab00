# The step `clients`: programs that ask a guest's servers from the host, with all
# that they load and a loader of their own. So they run whatever the host has, and
# nothing is installed for them. Read by guest/build, after tools.sh.
# shellcheck shell=bash

# Each package, and what is wanted of it. apache2-utils has ApacheBench.
CLIENTS=(apache2-utils:ab libapr1:libapr-1.so.0 libaprutil1:libaprutil-1.so.0
	libcrypt1:libcrypt.so.1 libexpat1:libexpat.so.1 libssl3:libssl.so.3
	libssl3:libcrypto.so.3 libuuid1:libuuid.so.1 libc6:libc.so.6
	libc6:ld-linux-x86-64.so.2)

build_clients() {
	local made_from packages wanted file
	need dpkg-deb=dpkg
	packages=$(versions "${CLIENTS[@]}")
	made_from=$(key "$here/clients.sh" "$packages")
	if fresh clients "$made_from" "${CLIENTS[@]/#*:/clients/}"; then
		say "the clients are up to date"
		return
	fi
	local work=$out/build/clients
	rm -rf "$work"
	mkdir -p "$work"
	for wanted in "${CLIENTS[@]}"; do
		file=$(unpacked "$work" "$wanted")
		put "clients/${wanted#*:}" <"$file"
		chmod 0755 "$out/clients/${wanted#*:}"
	done
	rm -rf "$work"
	made clients "$made_from"
	say "made clients/ab"
}
