#!/usr/bin/env bash
# Builds what cuda.sh carries to a machine with a GPU that builds nothing: pack.sh FOLDER [PEERS], in the repository's root. PEERS is a folder with the scripts of
# the peers. Run it where the tests' data will lie on the other machine. Ends with the folder's size.
set -euo pipefail
folder=$1
mkdir -p "$folder"

# Everything in the profile of the tests, so that the ops are built once.
built() {
    local name=$1 target=$2
    shift 2
    local path
    path=$(cargo "$@" --message-format=json-render-diagnostics | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line) if line.startswith("{") else {}
    if message.get("executable") and message["target"]["name"] == sys.argv[1]:
        print(message["executable"])' "$target" | tail -n 1)
    cp "$path" "$folder/$name"
    strip "$folder/$name"
}
built ops-tests tilewright_ops test --no-run -p tilewright-ops --features cuda --lib
built laya-tests laya test --no-run -p tilewright-models --features tilewright-ops/cuda --test laya
built golden golden test --no-run -p tilewright-train --features tilewright-ops/cuda --test golden
built train-tests cuda test --no-run -p tilewright-train --features tilewright-ops/cuda --test cuda
built tilewright tilewright build --profile test -p tilewright --features cuda
built cuda-probe cuda-probe build --profile test -p lab --features cuda --bin cuda-probe
built laya-speed laya-speed build --profile test -p lab --features cuda --bin laya-speed

rm -rf "$folder/candidates"
python3 "$(dirname "$0")/candidates.py" "$folder/candidates"
if [ $# -gt 1 ]; then
    mkdir -p "$folder/peers"
    cp "$2"/{_bench,gpt2_train,linear_ce,encoder}.py "$folder/peers/"
fi
du -sh "$folder"/* "$folder"
