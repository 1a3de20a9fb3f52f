#!/bin/bash
# Rebuilds the tables and figures of docs/findings.md from the results in docs/findings/.
#   scripts/findings.sh [--check] [FURIOUS]
# --check: changes nothing, and fails if the page or a figure differs from the results.
set -euo pipefail
check=0
if [ "${1:-}" = --check ]; then check=1; shift; fi
furious=$(realpath "${1:-build/release/furious}")
cd "$(dirname "$0")/.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
page=$made/findings.md
stop() { echo "findings: $*" >&2; exit 1; }

# fill NAME TABLE: replaces the table between the page's markers of that name.
fill() {
  awk -v name="$1" -v table="$2" '
    $0 == "<!-- table " name " -->" { print; while ((getline line < table) > 0) print line; skip = found = 1; next }
    $0 == "<!-- end -->" { skip = 0 }
    !skip { print }
    END { exit !found }' "$page" > "$made/next" || stop "the page has no table $1"
  mv "$made/next" "$page"
  echo "$1" >> "$made/filled"
}

cp docs/findings.md "$page"
mkdir "$made/findings"
for results in docs/findings/*.json; do
  name=$(basename "$results" .json)
  if [[ $name == niah-seed*-* ]]; then  # all of them are one table
    "$furious" niah --from "$results" --svg "$made/findings/$name.svg" > "$made/log"
    seed=${name#niah-seed} seed=${seed%-*} steps=${name##*-}
    head="| steps | seed |" rule="| ---: | ---: |" row="| $steps | $seed |"
    while read -r model right; do
      head+=" $model |" rule+=" ---: |" row+=" $right |"
    done < <(sed -n 's/^\(.*\): \([0-9]*\) of [0-9]* found$/\1 \2/p' "$made/log")
    printf '%s\n%s\n' "$head" "$rule" > "$made/head"
    [ -f "$made/niah" ] || cp "$made/head" "$made/niah"
    cmp -s "$made/head" "$made/niah" || stop "$results has other models than the previous files"
    echo "$steps $seed $row" >> "$made/rows"
  else
    "$furious" ablate --from "$results" --out "$made/$name" > "$made/log"
    cp "$made/$name/test-loss.svg" "$made/findings/$name.svg"
    tail -n +3 "$made/$name/table.md" > "$made/table"  # without its title
    fill "$name" "$made/table"
  fi
done
sort -n -k1,1 -k2,2 "$made/rows" | cut -d' ' -f3- >> "$made/niah"
fill niah "$made/niah"

# Every table and figure of the page has results; figures that it does not show are not kept.
for table in $(sed -n 's/^<!-- table \(.*\) -->$/\1/p' "$page"); do
  grep -qx "$table" "$made/filled" || stop "no results for the table $table"
done
figures=$(sed -n 's/.*(findings\/\(.*\.svg\)).*/\1/p' "$page" | sort)
for figure in $figures; do [ -f "$made/findings/$figure" ] || stop "no results for the figure $figure"; done

if [ $check = 1 ]; then
  diff -u docs/findings.md "$page"
  diff <(cd docs/findings && ls -- *.svg) <(printf '%s\n' $figures)
  for figure in $figures; do cmp "docs/findings/$figure" "$made/findings/$figure"; done
  exit
fi
cp "$page" docs/findings.md
rm -f docs/findings/*.svg
for figure in $figures; do cp "$made/findings/$figure" docs/findings/; done
