#!/usr/bin/env bash
# fuzz.sh NAME SECONDS: runs one fuzzer of `make fuzz` on its corpus. Prints the number of runs, or the whole report after a
# failure.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1 seconds=$2
found=build/fuzz/found/$name
mkdir -p "$found"
log=$found.log
if build/fuzz/tests/fuzz/fuzz_"$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -max_len=65536 \
    -artifact_prefix="$found.failed-" "$found" tests/fuzz/corpus/"$name" >"$log" 2>&1; then
  echo "fuzz: $name: $(grep -o 'Done [0-9]* runs.*' "$log" | tail -n 1)"
else
  cat "$log" >&2
  echo "fuzz: $name failed; fix it, and add the file named above to tests/fuzz/corpus/$name" >&2
  exit 1
fi
