# What the parts of the demonstration share; read by their shells.

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then
	bold=$'\e[1m' dim=$'\e[2m' green=$'\e[32m' red=$'\e[31m' cyan=$'\e[36m' plain=$'\e[0m'
else
	bold='' dim='' green='' red='' cyan='' plain=''
fi

heading() { printf '\n%s%s%s\n%s\n' "$bold$cyan" "$1" "$plain" "$dim${1//?/─}$plain"; }
say() { printf '%s\n' "$*"; }
show() { printf '%s$ %s%s\n' "$bold" "$*" "$plain"; }
fail() {
	printf '%s%s%s\n' "$red" "$*" "$plain" >&2
	exit 1
}
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'; }
