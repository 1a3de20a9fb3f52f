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

# fill NAME TABLE: puts the table, without its first two lines, between the page's marks of that name.
fill() {
  awk -v name="$1" -v table="$2" '
    $0 == "<!-- table " name " -->" { print; while ((getline line < table) > 0) if (++n > 2) print line; skip = 1; next }
    $0 == "<!-- end -->" { skip = 0 }
    !skip { print }' "$made/findings.md" > "$made/next"
  mv "$made/next" "$made/findings.md"
}

cp docs/findings.md "$made/findings.md"
mkdir "$made/findings"
for results in docs/findings/*.json; do
  name=$(basename "$results" .json)
  if [[ $name == niah-seed*-* ]]; then
    # All of them are one table.
    "$furious" niah --from "$results" --svg "$made/findings/$name.svg" > "$made/log"
    seed=${name#niah-seed} steps=${name##*-}
    sed -n 's/^\(.*\): \([0-9]*\) of \([0-9]*\) found$/\1 \2/p' "$made/log" |
      awk -v steps="$steps" -v seed="${seed%-*}" '
        { names = names " " $1 " |"; found = found " " $2 " |"; rule = rule " ---: |" }
        END { print names > "/dev/stderr"; print rule > "/dev/stderr"; print steps, seed, "| " steps " | " seed " |" found }' \
        2> "$made/niah.head" >> "$made/niah.rows"
    continue
  fi
  "$furious" ablate --from "$results" --out "$made/$name" > "$made/log"
  cp "$made/$name/test-loss.svg" "$made/findings/$name.svg"
  fill "$name" "$made/$name/table.md"
done
{
  printf '\n\n| steps | seed |%s\n| ---: | ---: |%s\n' "$(sed -n 1p "$made/niah.head")" "$(sed -n 2p "$made/niah.head")"
  sort -n -k1,1 -k2,2 "$made/niah.rows" | cut -d' ' -f3-
} > "$made/niah.md"
fill niah "$made/niah.md"

# Figures that the page does not show.
for figure in "$made"/findings/*.svg; do
  grep -q "(findings/$(basename "$figure"))" docs/findings.md || rm "$figure"
done

if [ $check = 1 ]; then
  diff -u docs/findings.md "$made/findings.md"
  for figure in "$made"/findings/*.svg; do cmp "docs/findings/$(basename "$figure")" "$figure"; done
  exit
fi
cp "$made/findings.md" docs/findings.md
cp "$made"/findings/*.svg docs/findings/
