#!/usr/bin/env bash
# Correctness, then speed, of the CUDA device from carried binaries: nothing is built here. Run in the repository's root on a machine with an NVIDIA GPU.
#
#   lab/device/cuda.sh FOLDER OUT [step...]     steps: tests golden train probe steps laya decide profile sanitize; all but the last two by default
#
# FOLDER holds stripped `ops-tests` (cargo test --no-run -p tilewright-ops --features cuda), `cuda-probe` (cargo build -p lab --features cuda),
# `laya-tests` (cargo test --no-run -p tilewright-models --test laya --features tilewright-ops/cuda),
# `laya-speed` (cargo build -p lab --bin laya-speed --features cuda), `golden` and `train-tests` (cargo test --no-run -p tilewright-train --test golden --test cuda --features tilewright-ops/cuda), `tilewright` and, to try kernels without a build, `sources/<op>/*.cu`.
# A short table comes last; logs and JSON go to OUT.
set -uo pipefail
folder=$1 out=$2
shift 2
steps=${*:-tests golden train probe steps laya decide}

libs=$(python3 - <<'P'
import glob, os, sys
folders = []
for site in sys.path:
    folders += glob.glob(os.path.join(site, "nvidia", "cu13", "lib")) + glob.glob(os.path.join(site, "nvidia", "*", "lib"))
print(":".join(dict.fromkeys(folders)))
P
)
export TILEWRIGHT_CUDA_LIBS=$libs TILEWRIGHT_CACHE=/tmp/tilewright-cache RUST_BACKTRACE=0
[ -d "$folder/sources" ] && export TILEWRIGHT_CUDA_SOURCES=$folder/sources
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader
echo "libraries: $libs" | cut -c1-300

for step in $steps; do
    start=$SECONDS
    case $step in
    tests)
        TILEWRIGHT_TEST_CUDA=only timeout 240 "$folder/ops-tests" --test-threads 8 --skip cpu:: --skip mapped >"$out/tests.log" 2>&1
        status=$?
        echo "== tests: exit $status after $((SECONDS - start)) s: $(grep -E '^test result' "$out/tests.log" | cut -c1-100)"
        grep -E ' \.\.\. FAILED$' "$out/tests.log" | sort | head -n 60
        # The first lines of each panic, without the libraries' paths.
        grep -A 3 -E "^thread '.*panicked at" "$out/tests.log" | grep -vE '^(--|note:|thread)' | cut -c1-260 | awk '!seen[$0]++' | head -n 60
        ;;
    golden)
        TILEWRIGHT_TEST_CUDA=1 timeout 90 "$folder/golden" --nocapture >"$out/golden.log" 2>&1
        echo "== golden: exit $? after $((SECONDS - start)) s"
        grep -vE '^(running|test result|$)' "$out/golden.log" | cut -c1-300 | tail -n 12
        ;;
    train)
        TILEWRIGHT_TEST_CUDA=1 timeout 150 "$folder/train-tests" --nocapture --test-threads 1 >"$out/train.log" 2>&1
        echo "== train: exit $? after $((SECONDS - start)) s: $(grep -E '^test result' "$out/train.log" | cut -c1-100)"
        grep -E 'FAILED|deviation of bf16|step 5:' "$out/train.log" | sort -u | head -n 20
        grep -A 3 -E "^thread '.*panicked at" "$out/train.log" | grep -vE '^(--|note:|thread)' | cut -c1-300 | head -n 20
        ;;
    laya)
        # The checkpoints of the tests lie where they lay when `laya-tests` was built.
        TILEWRIGHT_TEST_CUDA=1 timeout 100 "$folder/laya-tests" --nocapture --test-threads 4 cuda >"$out/laya.log" 2>&1
        echo "== laya: exit $? after $((SECONDS - start)) s: $(grep -E '^test result' "$out/laya.log" | cut -c1-100)"
        grep -vE '^(running|test |$)' "$out/laya.log" | cut -c1-300 | tail -n 30
        ;;
    decide)
        for shape in large mmbert; do
            timeout 90 "$folder/laya-speed" --device cuda --shape $shape --folder "/tmp/$shape" --precision f16 --rows 1x64,50x128,1x8192 \
                --pack 16384 --reps 30 2>&1 | tee "$out/laya-$shape.log"
        done
        echo "== decide: after $((SECONDS - start)) s"
        ;;
    steps)
        timeout 200 python3 "$(dirname "$0")/steps.py" "$folder/tilewright" "$out/steps.json" ${TILEWRIGHT_STEPS:-} 2>&1 | tee "$out/steps.log" | cut -c1-250
        echo "== steps: after $((SECONDS - start)) s"
        ;;
    profile)
        for setting in ${TILEWRIGHT_PROFILE:-32:2}; do
            timeout 200 python3 "$(dirname "$0")/profile.py" "$folder/tilewright" "$out/profile-${setting/:/-}.csv" "$setting" 2>&1 | tee "$out/profile-${setting/:/-}.log"
        done
        echo "== profile: after $((SECONDS - start)) s"
        ;;
    probe)
        timeout 180 "$folder/cuda-probe" --json "$out/probe.json" 2>&1 | tee "$out/probe.log" | cut -c1-200
        echo "== probe: after $((SECONDS - start)) s"
        ;;
    sanitize)
        for name in gelu::tests layernorm::tests::backward_makes attention::tests::backward::specified_cases_in_bf16 \
            matmul::tests::gelu_forward adamw::tests::many_updates linear_cross_entropy::tests::training::every_row; do
            TILEWRIGHT_TEST_CUDA=only timeout 100 compute-sanitizer --error-exitcode 9 "$folder/ops-tests" --test-threads 1 "$name" >"$out/sanitize.log" 2>&1
            echo "== sanitize $name: exit $?: $(grep -E '^test result' "$out/sanitize.log" | cut -c1-60)"
            grep -E '=========' "$out/sanitize.log" | cut -c1-200 | head -n 6
        done
        ;;
    esac
done
