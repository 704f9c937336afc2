#!/usr/bin/env bash
# Capacity of a server, its tail at 70 % of it, and what it does at five times of it: how fast it refuses, what it loses, what memory does.
#
#   lab/serve/overload.sh CHECKPOINT [FOLDER]      FOLDER (a new temporary one) gets records, pages and a table of resident memory
#
# TILEWRIGHT names the binary (target/release/tilewright), OVERLOAD the seconds of the last part (60), REQUESTS the file of requests.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tilewright=${TILEWRIGHT:-"$here/../../target/release/tilewright"}
model=$1 out=${2:-$(mktemp -d)} requests=${REQUESTS:-"$here/requests-64.jsonl"} port=${PORT:-8210}
mkdir -p "$out"
"$tilewright" serve --model "$model" --port "$port" --log warn 2>"$out/server.log" &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT
for _ in $(seq 300); do curl -fsS -o /dev/null "http://127.0.0.1:$port/health" 2>/dev/null && break; sleep 0.1; done
url=http://127.0.0.1:$port/laya/v1/systemone

load() { # name, flags
    local name=$1
    shift
    "$tilewright" bench load "$url" --mix "$requests" --out "$out" --html "$out/$name.html" "$@" >"$out/$name.txt" 2>"$out/$name.err" || cat "$out/$name.err"
    cat "$out/$name.txt"
}
load sweep --sweep --rate "${RATE:-8}" --seconds "${STEP:-8}" --at 0.7
capacity=$(sed -n 's/.*most answers in any run: \([0-9.]*\).*/\1/p' "$out/sweep.txt")
five=$(awk "BEGIN { print 5 * $capacity }")
echo "capacity $capacity a second, now $five"
: >"$out/resident.txt"
(while kill -0 $server 2>/dev/null; do
    sed -n 's/^VmRSS:[[:space:]]*\([0-9]*\).*/\1/p' "/proc/$server/status" >>"$out/resident.txt" 2>/dev/null || true
    sleep 1
done) &
watcher=$!
# Longer than a request may take, so that nobody leaves before the server has spoken.
load overload --timeout 90 --rate "$five" --seconds "${OVERLOAD:-60}" --warm-up 2 --connections 256
kill $watcher 2>/dev/null || true
awk 'NR == 1 { first = $1 } { last = $1; if ($1 > most) most = $1 } END { printf "resident: %d MiB before, %d at most, %d after\n", first/1024, most/1024, last/1024 }' "$out/resident.txt"
curl -fsS "http://127.0.0.1:$port/health"
echo
