#!/bin/sh
# library_contents.sh LIBRARY INCLUDE OBJECT...: checks the symbols of libfurious.so. INCLUDE: the public headers; OBJECT:
# the object files of the tools, which are linked into the binary only.
set -eu
library=$1 include=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# No function of the tools is in the library, not even as a local symbol.
nm --defined-only "$@" | awk '$2 == "T" { print $3 }' | sort -u > "$work/tools"
nm --defined-only "$library" | awk '{ print $3 }' | sort -u > "$work/library"
[ "$(wc -l < "$work/tools")" -gt 20 ] || { echo "no functions found in the objects of the tools" >&2; exit 1; }
[ "$(wc -l < "$work/library")" -gt 100 ] || { echo "$library has no symbol table" >&2; exit 1; }
if comm -12 "$work/tools" "$work/library" | c++filt | grep .; then
  echo "these functions of the tools are in $library" >&2
  exit 1
fi

# Every exported name of the namespaces furious and furious::ops, and every exported C function furious_*, is declared with
# FURIOUS_API in a public header.
grep -rhoE '(class|struct) FURIOUS_API [A-Za-z_]+|FURIOUS_API [^;(]*[ &*][A-Za-z_]+\(' "$include" |
  sed -E 's/\($//; s/.*[ &*]//' | sort -u > "$work/public"
nm -DC --defined-only "$library" | cut -d' ' -f3- | sed -nE 's/^(vtable for |typeinfo for |typeinfo name for )?furious::(ops::)?([A-Za-z_]+).*/\3/p; s/^(furious_[a-z_]+)$/\1/p' |
  sort -u > "$work/exported"
for name in train mixer_forward furious_version; do
  grep -qx $name "$work/exported" || { echo "$name is not exported by $library" >&2; exit 1; }
done
if comm -13 "$work/public" "$work/exported" | grep .; then
  echo "these names are exported by $library, but not marked by FURIOUS_API" >&2
  exit 1
fi
