#!/usr/bin/env bash
# Our server against the reference's on the same checkpoint and the same requests, in alternating blocks: who answers more of them.
#
#   lab/serve/throughput.sh CHECKPOINT [FOLDER]     a checkpoint of `tilewright decide demo DIR --shape mmbert-base`, say
#
# PYTHON names an interpreter with `laya[serve]`, TILEWRIGHT the binary (target/release/tilewright), PAIRS the pairs of blocks (60), REQUESTS the file of
# requests, which name their model `mm`. FOLDER (a new temporary one) gets the record and the page.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tilewright=${TILEWRIGHT:-"$here/../../target/release/tilewright"}
model=$1 out=${2:-$(mktemp -d)} requests=${REQUESTS:-"$here/requests-64-made.jsonl"}
ours=http://127.0.0.1:8301 theirs=http://127.0.0.1:8302
mkdir -p "$out"
"$tilewright" serve --model mm="$model" --port 8301 --threads 2 --log warn 2>"$out/tilewright.log" &
servers=$!
HF_HUB_OFFLINE=1 LAYA_HOST=127.0.0.1 LAYA_PORT=8302 LAYA_THREADS=2 LAYA_DEVICE=cpu LAYA_LOG_LEVEL=warning \
    LAYA_EXTRA_MODELS="{\"mm\": \"$model\"}" LAYA_MODELS=mm LAYA_DEFAULT_MODEL=mm \
    "${PYTHON:-python3}" -c 'from laya.serve import main; main()' >"$out/laya.log" 2>&1 &
servers="$servers $!"
# shellcheck disable=SC2064,SC2086  # these two, as they are now
trap "kill $servers 2>/dev/null || true; wait $servers 2>/dev/null || true" EXIT
for url in $ours $theirs; do
    for _ in $(seq 120); do curl -fsS -o /dev/null "$url/health" 2>/dev/null && break; sleep 1; done
done
# The same answers, or there is nothing to compare.
answer() { head -n 1 "$requests" | curl -fsS -H 'content-type: application/json' --data-binary @- "$1/v1/systemone" | grep -o '"probabilities":{[^}]*}'; }
[ "$(answer $ours/laya)" = "$(answer $theirs)" ] || { echo "the two servers answer differently" >&2; exit 1; }
"$tilewright" bench load "$ours/laya/v1/systemone" --compare "$theirs/v1/systemone" --names tilewright,laya --mix "$requests" --closed 16 \
    --pairs "${PAIRS:-60}" --seconds 4 --warm-up 1 --timeout 60 --out "$out" --html "$out/throughput.html"
