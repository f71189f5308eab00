# What the recipes share: messages, what the machine has to have, packages from
# apt, and the cache. Read by guest/build, which sets $here and $out.
# shellcheck shell=bash

say() { echo "guest: $*" >&2; }

fail() {
	say "error: $*"
	exit 1
}

# lack TEXT: the host has not what a build takes, which is no fault of the build:
# an exit code of its own, so that tests can go on without the images.
lack() {
	say "error: $*"
	exit 77
}

# need COMMAND=PACKAGE... (or FILE=PACKAGE): all that is missing in one message.
need() {
	local pair missing=()
	for pair in "$@"; do
		case $pair in
		/*) [ -e "${pair%%=*}" ] || missing+=("${pair#*=}") ;;
		*)
			PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%=*}" >/dev/null ||
				missing+=("${pair#*=}")
			;;
		esac
	done
	[ ${#missing[@]} -eq 0 ] ||
		lack "these packages are missing: apt-get install --no-install-recommends ${missing[*]}"
}

# The version of a package that apt would install here.
candidate() {
	local version
	version=$(apt-cache policy "$1" | sed -n 's/^ *Candidate: *//p')
	if [ -z "$version" ] || [ "$version" = "(none)" ]; then
		return 1
	fi
	echo "$version"
}

# version_of PACKAGE: the same, and renews the package lists when they lack it.
version_of() {
	candidate "$1" && return
	if [ "$(id -u)" -eq 0 ] && [ ! -e "$out/.updated" ]; then
		say "apt knows no $1: renewing its package lists"
		apt-get -q update >&2 || true
		: >"$out/.updated"
		candidate "$1" && return
	fi
	lack "apt knows no package $1: it takes the package sources of Debian 12, and apt-get update"
}

# fetch PACKAGE: downloads it, and prints the file's path. apt has checked it
# against the signed package lists. Nothing is installed.
fetch() {
	local package=$1 version file
	version=$(version_of "$package")
	mkdir -p "$out/packages"
	# apt writes the colon of an epoch as %3a.
	file=$(printf '%s/packages/%s_%s_' "$out" "$package" "${version/:/%3a}")
	if ! compgen -G "$file*.deb" >/dev/null; then
		rm -f "$out/packages/${package}_"*.deb
		say "fetching $package $version"
		(cd "$out/packages" && apt-get -q -o APT::Sandbox::User=root download "$package=$version" >&2) ||
			fail "apt-get could not download $package $version"
	fi
	compgen -G "$file*.deb"
}

# --- Cache -------------------------------------------------------------------

# key TEXT... : SHA-256 of the recipes' texts (files) and of other words
# (versions). A folder stands for all files in it.
key() {
	local input
	for input in "$@"; do
		if [ -d "$input" ]; then
			(cd "$input" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum)
		elif [ -f "$input" ]; then
			sha256sum <"$input"
		else
			echo "$input"
		fi
	done | sha256sum | cut -d' ' -f1
}

# fresh NAME KEY FILE... : whether all files are there and made from KEY.
fresh() {
	local name=$1 wanted=$2 file
	shift 2
	for file in "$@"; do
		[ -s "$out/$file" ] || return 1
	done
	[ "$(cat "$out/.made/$name" 2>/dev/null)" = "$wanted" ]
}

made() {
	mkdir -p "$out/.made"
	echo "$2" | put ".made/$1"
}

# put FILE: standard input becomes a file of the output, whole or not at all:
# who has the old one open keeps it.
put() {
	mkdir -p "$(dirname "$out/$1")"
	cat >"$out/$1.new"
	mv "$out/$1.new" "$out/$1"
}

compiler() { gcc -dumpfullversion; }
