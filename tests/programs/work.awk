# awk: associative arrays over a whole text, in an order of its own making.
{
	for (i = 2; i <= NF; i++) {
		count[$i]++
		last[$i] = NR
	}
	sum += $1
	length_of[NR] = length($0)
	line[NR] = $0
}
END {
	for (word in count) {
		words++
		total += count[word]
		checksum = (checksum + count[word] * (last[word] % 1009)) % 1000003
	}
	for (n = NR; n > 0; n--)
		reversed = (reversed * 7 + length(line[n])) % 1000003
	printf "%d lines, %d words, %d in all, sum %.0f, %d %d\n", NR, words, total, sum, checksum, reversed
}
