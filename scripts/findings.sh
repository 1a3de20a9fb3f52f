#!/bin/bash
# Makes the tables and figures of docs/findings.md again from the results in docs/findings/.
#   scripts/findings.sh [--check] [FURIOUS]
# --check: changes nothing, and fails where the page is not what the results say.
set -euo pipefail
check=0
if [ "${1:-}" = --check ]; then check=1; shift; fi
furious=$(realpath "${1:-build/release/furious}")
cd "$(dirname "$0")/.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

cp docs/findings.md "$made/findings.md"
mkdir "$made/findings"
for results in docs/findings/*.json; do
  name=$(basename "$results" .json)
  if [[ $name == niah* ]]; then
    "$furious" niah --from "$results" --svg "$made/findings/$name.svg" > "$made/log"
    continue
  fi
  "$furious" ablate --from "$results" --out "$made/$name" > "$made/log"
  cp "$made/$name/test-loss.svg" "$made/findings/$name.svg"
  # Between the marks of a table stands what table.md has below its title.
  awk -v name="$name" -v table="$made/$name/table.md" '
    $0 == "<!-- table " name " -->" { print; while ((getline line < table) > 0) if (++n > 2) print line; skip = 1; next }
    $0 == "<!-- end -->" { skip = 0 }
    !skip { print }' "$made/findings.md" > "$made/next"
  mv "$made/next" "$made/findings.md"
done

if [ $check = 1 ]; then
  diff -u docs/findings.md "$made/findings.md"
  for figure in "$made"/findings/*.svg; do cmp "docs/findings/$(basename "$figure")" "$figure"; done
  exit
fi
cp "$made/findings.md" docs/findings.md
cp "$made"/findings/*.svg docs/findings/
