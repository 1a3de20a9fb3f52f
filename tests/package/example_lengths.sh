#!/bin/sh
# example_lengths.sh FOLDER: the programs in the folder are short enough to read at once.
set -eu
count=0
for file in "$1"/*/main.*; do
  count=$((count + 1))
  lines=$(wc -l < "$file")
  [ "$lines" -lt 80 ] || { echo "$file has $lines lines, expected fewer than 80" >&2; exit 1; }
done
[ "$count" -ge 5 ] || { echo "only $count examples in $1" >&2; exit 1; }
