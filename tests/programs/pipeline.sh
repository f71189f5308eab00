# bash running pipelines: children, substitutions, arrays, a trap, here
# documents, background jobs.
#
#     pipeline.sh TEXT
set -euo pipefail

text=$1
trap 'echo "left with $?"' EXIT

echo "lines: $(wc -l <"$text")"
cut -d' ' -f2 "$text" | sort | uniq -c | sort -k1,1nr -k2,2 | head -n 5 || [ $? -eq 141 ]

declare -A seen=()
lines=()
while read -r number first _; do
	lines+=("$number")
	key=${first:-none}
	seen[$key]=$((${seen[$key]:-0} + 1))
done < <(head -n 20000 "$text")
echo "${#lines[@]} read, ${#seen[@]} different"

sum=0
for number in "${lines[@]}"; do
	sum=$(((sum * 31 + number) % 1000000007))
done
echo "sum $sum"

tr a-z A-Z <"$text" | gzip -c | gzip -dc | sha256sum
(sleep 1; echo "from the background" >&1) &
background=$!
cat <<END | rev
here $((6 * 7))
END
wait "$background"
bash -c 'kill -TERM $$' || echo "child left with $?"
exit 5
