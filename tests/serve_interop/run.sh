#!/usr/bin/env bash
# Clients that nobody here wrote against a server with a small model: the openai package, and Chromium with its driver.
#   run.sh BINARY BUILD_FOLDER [pytest arguments]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
binary=$(realpath "$1")
mkdir -p "$2"
build=$(realpath "$2")
shift 2

venv=$build/serve-venv
[ -x "$venv/bin/pytest" ] || python3 -m venv "$venv"
"$venv/bin/pip" install -q openai selenium pytest

# A model that writes letters: a minute of training on one sentence is enough.
model=$build/serve-model
if [ ! -d "$model/run" ]; then
  rm -rf "$model"
  mkdir -p "$model/text"
  for i in $(seq 200); do
    echo "The snake sat under a tall oak and told the fox about rivers, stones and the long road home. $i"
  done >"$model/text/corpus.txt"
  "$binary" tokenize --tokenizer byte "$model/text/corpus.txt" --out "$model/tokens" >/dev/null
  "$binary" train --data "$model/tokens" --out "$model/run" --steps 20 --batch 4 --length 128 --lr 0.003 --warmup 5 >/dev/null
fi

work=$(mktemp -d)
server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
port=$("$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$binary" serve "$model/run" --port "$port" --state-dir "$work/states" --chat-template chatml >"$work/log" 2>&1 &
server=$!
for _ in $(seq 300); do
  curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
  kill -0 "$server" 2>/dev/null || { cat "$work/log"; exit 1; }
  sleep 0.1
done
FURIOUS_URL=http://127.0.0.1:$port/ FURIOUS_BINARY=$binary FURIOUS_MODEL=$model/run "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@" "$here" || { tail -20 "$work/log"; exit 1; }
