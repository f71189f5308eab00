# Perl: hashes, regular expressions, sorting, a pipe from a child.
#
#     work.pl TEXT
use strict;
use warnings;

my $path = shift @ARGV or die "usage: work.pl TEXT\n";
open(my $text, '<', $path) or die "$path: $!\n";

my (%count, %lines_of, @lines);
while (my $line = <$text>) {
    chomp $line;
    push @lines, $line;
    while ($line =~ /\b([a-z]+)\b/g) {
        $count{$1}++;
        push @{ $lines_of{$1} }, $. if length($1) > 8;
    }
}
close $text;

my @top = (sort { $count{$b} <=> $count{$a} || $a cmp $b } keys %count)[0 .. 9];
printf "%s %d\n", $_, $count{$_} for @top;
printf "%d words, %d lines, %d long\n", scalar(keys %count), scalar(@lines), scalar(keys %lines_of);

my @sorted = sort { substr($a, -12) cmp substr($b, -12) || $a cmp $b } @lines;
my $checksum = 0;
for my $line (@sorted) {
    $checksum = ($checksum * 31 + unpack('%32C*', $line)) % 4294967291;
}
print "$checksum\n";

(my $joined = join ',', @sorted[0 .. 99]) =~ s/(\d+)/<$1>/g;
print length($joined), "\n";

open(my $child, '-|', 'sort', '-n', $path) or die "sort: $!\n";
my $first = <$child>;
1 while <$child>;
close $child;
print $first, "child left with ", $? >> 8, "\n";
exit 3;
