#!/usr/bin/env bash
# Correctness, then speed, of the CUDA device from carried binaries: nothing is built here. Run in the repository's root on a machine with an NVIDIA GPU.
#
#   lab/device/cuda.sh FOLDER OUT [step...]
#
# Three lists of steps are calls of their own, each within 9 minutes (minutes on an H200, from the steps' times so far):
#   hold   tests golden train laya cli steps decide probe crowd sanitize    7   every bar, without peers
#   race   steps probe decide peer-loss peer-encoder peer-gpt2              8   our figures and PyTorch's, side by side
#   try    tests of candidates, then they and what they would replace by turns   7   kernels not in the build; see candidates.py
# Without a step: hold. `profile` alone runs Nsight Compute. `TILEWRIGHT_BUDGET` seconds (540) is the whole call's time: each step has its own limit, and what does not
# fit any more is skipped and said. Logs go to OUT/logs.tgz, which is written anew after each step, and records to OUT/*.json.
#
# FOLDER holds stripped `ops-tests` (cargo test --no-run -p tilewright-ops --features cuda), `cuda-probe` (cargo build -p lab --features cuda),
# `laya-tests` (cargo test --no-run -p tilewright-models --test laya --features tilewright-ops/cuda),
# `laya-speed` (cargo build -p lab --bin laya-speed --features cuda), `golden` and `train-tests` (cargo test --no-run -p tilewright-train --test golden --test cuda
# --features tilewright-ops/cuda), `tilewright` (--features cuda), for `race` also `peers/` (gpt2_train.py, linear_ce.py, encoder.py and _bench.py), for `try`
# `candidates/` (lab/device/candidates.py FOLDER/candidates) and, to try kernels in every step, `sources/<op>/*.cu`.
# The tests' data lie where they lay when the tests were built.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1 out=$2
shift 2
budget=${TILEWRIGHT_BUDGET:-540}
logs=$(mktemp -d)
mkdir -p "$out"

steps=()
for word in "${@:-hold}"; do
    case $word in
    hold) steps+=(tests golden train laya cli steps decide probe crowd sanitize) ;;
    race) steps+=(steps probe decide peer-loss peer-encoder peer-gpt2) ;;
    *) steps+=("$word") ;;
    esac
done

libs=$(python3 - <<'P'
import glob, os, sys
folders = []
for site in sys.path:
    folders += glob.glob(os.path.join(site, "nvidia", "cu13", "lib")) + glob.glob(os.path.join(site, "nvidia", "*", "lib"))
print(":".join(dict.fromkeys(folders)))
P
)
export TILEWRIGHT_CUDA_LIBS=$libs TILEWRIGHT_CACHE=${TILEWRIGHT_CACHE:-/tmp/tilewright-cache} RUST_BACKTRACE=0 PYTHONDONTWRITEBYTECODE=1
[ -d "$folder/sources" ] && export TILEWRIGHT_CUDA_SOURCES=$folder/sources
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,power.draw --format=csv,noheader 2>&1 | tee "$logs/card.txt"
echo "libraries: $libs" | cut -c1-300

# Seconds that are left; a step's limit is the smaller of its own and this.
left() { echo $((budget - SECONDS - 6)); }
within() {
    local most=$1 room
    shift
    room=$(left)
    [ "$room" -lt "$most" ] && most=$room
    [ "$most" -lt 5 ] && return 125
    timeout -k 5 "$most" "$@"
}
# The first lines of each panic, without the libraries' paths.
panics() { grep -A 3 -E "^thread '.*panicked at" "$1" | grep -vE '^(--|note:|thread)' | cut -c1-260 | awk '!seen[$0]++' | head -n "$2"; }
summary() { grep -E '^test result' "$1" | cut -c1-100; }

# A test binary: what it is called, its limit, the program and its words. The last line is for the record.
tests() {
    local name=$1 most=$2 start=$SECONDS status
    shift 2
    within "$most" "$@" >"$logs/$name.log" 2>&1
    status=$?
    echo "== $name: exit $status after $((SECONDS - start)) s: $(summary "$logs/$name.log")" | tee -a "$logs/outcomes.txt"
    grep -E ' \.\.\. FAILED$' "$logs/$name.log" | sort | head -n 60
    panics "$logs/$name.log" 40
}

peer() {
    local name=$1 most=$2 start=$SECONDS
    shift 2
    OUT=$logs BENCH_DEADLINE=$(($(date +%s) + $(left))) within "$most" python3 -u "$@" >"$logs/peer-$name.log" 2>&1
    echo "== peer $name: exit $? after $((SECONDS - start)) s: ${*:1}" | tee -a "$logs/outcomes.txt"
    grep -E '^\[' "$logs/peer-$name.log" | cut -c1-220 | tail -n 8
}

keep() {
    tar czf "$out/logs.tgz" -C "$logs" . 2>/dev/null
    python3 "$here/records.py" "$logs" "$out" "${steps[*]}" || echo "records.py failed"
}

for step in "${steps[@]}"; do
    start=$SECONDS
    if [ "$(left)" -lt 10 ]; then
        echo "== $step: SKIPPED, $(left) s are left" | tee -a "$logs/outcomes.txt"
        continue
    fi
    case $step in
    tests) TILEWRIGHT_TEST_CUDA=only tests tests 200 "$folder/ops-tests" --test-threads 8 --skip cpu:: --skip mapped ;;
    golden)
        TILEWRIGHT_TEST_CUDA=1 tests golden 60 "$folder/golden" --nocapture
        grep -vE '^(running|test result|$)' "$logs/golden.log" | cut -c1-300 | tail -n 12
        ;;
    train)
        TILEWRIGHT_TEST_CUDA=1 tests train 130 "$folder/train-tests" --nocapture --test-threads 1
        grep -E 'deviation of bf16|step 5:' "$logs/train.log" | sort -u | head -n 20
        ;;
    laya)
        TILEWRIGHT_TEST_CUDA=1 tests laya 60 "$folder/laya-tests" --nocapture --test-threads 4 cuda
        grep -vE '^(running|test |$)' "$logs/laya.log" | cut -c1-300 | tail -n 30
        ;;
    cli)
        within 90 python3 "$here/cli.py" "$folder/tilewright" crates/tilewright-models/tests/fixtures/laya "$logs/cli.json" 2>&1 | tee "$logs/cli.log" | cut -c1-250
        echo "== cli: exit ${PIPESTATUS[0]} after $((SECONDS - start)) s" | tee -a "$logs/outcomes.txt"
        ;;
    decide)
        for shape in large mmbert; do
            within 60 "$folder/laya-speed" --device cuda --shape $shape --folder "/tmp/$shape" --precision f16 --rows 1x64,50x128,1x8192 \
                --pack 16384 --reps 24 --json "$logs/speed-$shape.json" 2>&1 | tee "$logs/laya-$shape.log"
        done
        echo "== decide: after $((SECONDS - start)) s" | tee -a "$logs/outcomes.txt"
        ;;
    steps)
        # shellcheck disable=SC2086  # the settings are words
        within 150 python3 "$here/steps.py" "$folder/tilewright" "$logs/steps.json" ${TILEWRIGHT_STEPS:-} 2>&1 | tee "$logs/steps.log" | cut -c1-250
        echo "== steps: exit ${PIPESTATUS[0]} after $((SECONDS - start)) s" | tee -a "$logs/outcomes.txt"
        ;;
    profile)
        for setting in ${TILEWRIGHT_PROFILE:-32:2}; do
            within 200 python3 "$here/profile.py" "$folder/tilewright" "$logs/profile-${setting/:/-}.csv" "$setting" 2>&1 | tee "$logs/profile-${setting/:/-}.log"
        done
        echo "== profile: after $((SECONDS - start)) s"
        ;;
    probe)
        within 120 "$folder/cuda-probe" --json "$logs/probe.json" 2>&1 | tee "$logs/probe.log" | cut -c1-200
        echo "== probe: exit ${PIPESTATUS[0]} after $((SECONDS - start)) s" | tee -a "$logs/outcomes.txt"
        ;;
    crowd)
        # Twelve test threads ended once with a segmentation fault: compiled anew by twelve at once, then by twelve from the cache; a debugger says where.
        for cache in /tmp/crowd-cache "$TILEWRIGHT_CACHE"; do
            TILEWRIGHT_CACHE=$cache TILEWRIGHT_TEST_CUDA=only tests "crowd-${cache##*/}" 60 "$folder/ops-tests" --test-threads 12 layernorm gelu embedding adamw rope gather
            if grep -qE 'signal: 11|SIGSEGV' "$logs/crowd-${cache##*/}.log" || tail -n 1 "$logs/outcomes.txt" | grep -q 'exit 139'; then
                TILEWRIGHT_CACHE=$cache TILEWRIGHT_TEST_CUDA=only within 60 cuda-gdb -batch -ex run -ex 'thread apply all bt 12' --args "$folder/ops-tests" --test-threads 12 layernorm gelu embedding adamw rope gather >"$logs/crowd-where.log" 2>&1
                grep -nE 'SIGSEGV|^#' "$logs/crowd-where.log" | cut -c1-160 | head -n 30
            fi
        done
        ;;
    sanitize)
        for name in gelu::tests layernorm::tests::backward_makes attention::tests::backward::specified_cases_in_bf16 matmul::tests::gelu_forward \
            adamw::tests::many_updates linear_cross_entropy::tests::training::every_row encoder_attention::tests::short::turning; do
            TILEWRIGHT_TEST_CUDA=only tests "sanitize-${name%%::*}" 60 compute-sanitizer --error-exitcode 9 "$folder/ops-tests" --test-threads 1 "$name"
            grep -E '=========' "$logs/sanitize-${name%%::*}.log" | cut -c1-200 | head -n 6
        done
        ;;
    peer-loss) peer loss 110 "$folder/peers/linear_ce.py" --shapes qwen,gpt2 --dists flat --impls floor,compile --no-ref ;;
    peer-encoder)
        # A shape compiles in 10 s; the row in a graph is the one to beat.
        peer encoder-large 75 "$folder/peers/encoder.py" --models large --dtypes fp16 --variants region --shapes 1x64,50x128,1x8192 --budget 250
        peer encoder-mmbert 75 "$folder/peers/encoder.py" --models mmbert --dtypes fp16 --variants region --shapes 1x64,50x128,1x8192 --budget 250
        ;;
    peer-gpt2)
        # One batch size a process. The best peer of B=32 first, then of B=64, then of B=4.
        peer gpt2-32 75 "$folder/peers/gpt2_train.py" --variant pure-compiled --batches 32 --no-graph
        peer gpt2-64 75 "$folder/peers/gpt2_train.py" --variant compiled --batches 64 --no-graph
        peer gpt2-4 75 "$folder/peers/gpt2_train.py" --variant pure-compiled --batches 4
        ;;
    try)
        within 530 python3 -u "$here/compare.py" "$folder" "$logs/try.json" 2>&1 | tee "$logs/try.log" | cut -c1-220
        echo "== try: exit ${PIPESTATUS[0]} after $((SECONDS - start)) s" | tee -a "$logs/outcomes.txt"
        ;;
    *) echo "== $step: no such step" ;;
    esac
    keep
done
nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader 2>&1 | tee -a "$logs/card.txt"
keep
echo "== outcomes, $SECONDS s in all"
cat "$logs/outcomes.txt"
python3 "$here/records.py" "$logs" "$out" "${steps[*]}" --verdict
