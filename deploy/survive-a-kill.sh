#!/usr/bin/env bash
# Two servers behind a balancer, one killed without warning in the middle of a load and started again: what do callers see?
#
#   deploy/survive-a-kill.sh [CHECKPOINT]        a random small checkpoint is made where none is given
#
# RATE (20) requests a second for LENGTH (24) seconds; the kill comes after a third, the restart after two. Needs haproxy. Fails unless every request was
# answered or refused in words, and both servers answer again at the end.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tilewright=${TILEWRIGHT:-"$here/../target/release/tilewright"}
rate=${RATE:-20} seconds=${LENGTH:-24} base=${PORT:-8100}
command -v haproxy >/dev/null || { echo "no haproxy here (Debian: apt-get install haproxy)" >&2; exit 1; }
[ -x "$tilewright" ] || { echo "no $tilewright; build it, or set TILEWRIGHT" >&2; exit 1; }

work=$(mktemp -d)
declare -A pids=()
finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

model=${1:-}
if [ -z "$model" ]; then
    model=$work/demo
    "$tilewright" decide demo "$model" >/dev/null
fi
start() { # name, port
    TILEWRIGHT_THREADS=1 "$tilewright" serve --model "$model" --port "$2" >>"$work/$1.log" 2>&1 &
    pids[$1]=$!
}
ready() { # port
    for _ in $(seq 200); do
        curl -fsS -o /dev/null "http://127.0.0.1:$1/health" 2>/dev/null && return 0
        sleep 0.1
    done
    echo "nothing is ready at port $1" >&2
    cat "$work"/*.log >&2
    return 1
}

start one $((base + 1))
start two $((base + 2))
ready $((base + 1))
ready $((base + 2))
TILEWRIGHT_FRONT=127.0.0.1:$base TILEWRIGHT_ONE=127.0.0.1:$((base + 1)) TILEWRIGHT_TWO=127.0.0.1:$((base + 2)) \
    haproxy -db -f "$here/haproxy.cfg" >"$work/haproxy.log" 2>&1 &
pids[balancer]=$!
ready "$base"

cat >"$work/mix.jsonl" <<'MIX'
{"state":"I was charged twice, please send the second payment back.","questions":{"refund":{"type":"noul","instructions":"Is a refund requested?"}}}
{"state":{"message":"The app does not start since the update."},"questions":{"kind":{"type":"choice","instructions":"What is it about?","criteria":["billing","fault","other"]},"anger":{"type":"score","instructions":"How angry?","criteria":["calm","annoyed","furious"]}}}
MIX
"$tilewright" bench load "http://127.0.0.1:$base/v1/systemone" --mix "$work/mix.jsonl" --rate "$rate" --seconds "$seconds" --warm-up 0 \
    --out "$work/records" --html "${HTML:-$work/page.html}" >"$work/load.txt" 2>"$work/load.err" &
load=$!
third=$(awk "BEGIN { print $seconds / 3 }")
sleep "$third"
kill -9 "${pids[one]}"
echo "killed one"
sleep "$third"
start one $((base + 1))
echo "started it again"
status=0
wait "$load" || status=$?
cat "$work/load.txt"
[ "$status" = 0 ] || { cat "$work/load.err"; exit 1; }
ready $((base + 1))
lost=$(grep -oE '[0-9]+ x [a-z0-9]+' "$work/load.txt" | grep -vE ' x (200|503)$' || true)
[ -z "$lost" ] || { echo "lost: $lost"; exit 1; }
echo "nothing was lost, and both servers answer"
