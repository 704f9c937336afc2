#!/usr/bin/env bash
# Correctness, then speed, of the portable GPU device through Vulkan from carried binaries: nothing is built here. Run in the repository's root on a
# machine with a GPU.
#
#   lab/device/vulkan.sh FOLDER OUT [step...]     steps, in the order of their worth, with the seconds that each may take at most:
#     doctor 20, speed 150, steps 60, large 60, golden 60, train 120, laya 60, tables 240, production 120     (14 minutes in all)
#
# FOLDER holds stripped
#   ops-tests    cargo test --no-run -p tilewright-ops --features vulkan --release
#   laya-tests   cargo test --no-run -p tilewright-models --test laya --features tilewright-ops/vulkan --release
#   golden, train-tests   cargo test --no-run -p tilewright-train --test golden --test cuda --features tilewright-ops/vulkan --release
#   laya-speed   cargo build -p lab --bin laya-speed --features vulkan --release
#   tilewright   cargo build -p tilewright --features vulkan --release
# and, where the machine has no Vulkan loader, libvulkan.so.1 (Debian's libvulkan1). A line for each step comes last; logs and JSON go to OUT.
set -uo pipefail
folder=$1 out=$2
shift 2
steps=${*:-doctor speed steps large golden train laya tables production}

if ! ldconfig -p | grep -q libvulkan.so.1; then
    # Only the loader: other libraries beside it could hide the system's.
    mkdir -p "$out/loader"
    cp "$folder/libvulkan.so.1" "$out/loader/"
    export LD_LIBRARY_PATH=$out/loader${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
# Where containers put the vendor's description of its driver.
for description in /usr/share/vulkan/icd.d/nvidia_icd.json /etc/vulkan/icd.d/nvidia_icd.json /usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json; do
    [ -z "${VK_DRIVER_FILES:-}" ] && [ -e "$description" ] && export VK_DRIVER_FILES=$description
done
export TILEWRIGHT_CACHE=/tmp/tilewright-cache RUST_BACKTRACE=0
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader 2>/dev/null
echo "driver: ${VK_DRIVER_FILES:-chosen by the loader}"

lines=()
note() { lines+=("$1"); echo "$1"; }

# NAME SECONDS COMMAND...: what a test program says, failures and the figures that it prints.
tests() {
    local name=$1 limit=$2 start=$SECONDS status=0
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1 || status=$?
    note "== $name: exit $status after $((SECONDS - start)) s: $(grep -E '^test result' "$out/$name.log" | cut -c1-100)"
    grep -E 'BEST|WRONG|\^3: .*TFLOP/s|deviation|largest|probability|step [0-9]+:|NOT TESTED|attention .* ms' "$out/$name.log" | sort -u | cut -c1-200 | head -n 60
    grep -E ' \.\.\. FAILED$' "$out/$name.log" | sort | head -n 40
    # The first lines of each panic, without the libraries' paths.
    grep -A 3 -E "^thread '.*panicked at" "$out/$name.log" | grep -vE '^(--|note:|thread)' | cut -c1-300 | awk '!seen[$0]++' | head -n 40
}

for step in $steps; do
    start=$SECONDS
    case $step in
    doctor)
        timeout 20 "$folder/tilewright" doctor 2>&1 | tee "$out/doctor.log" | grep -iE 'vulkan|error'
        ;;
    speed)
        # Products at 2048^3 to 8192^3 (and all variants, where the program sweeps them), attention at GPT-2's size: right, and how fast.
        TILEWRIGHT_TEST_GPU=only tests speed 150 "$folder/ops-tests" --nocapture --test-threads 1 sweep_of_variants runtime::gpu::speed
        ;;
    steps)
        TILEWRIGHT_STEPS_DEVICE=vulkan timeout 60 python3 "$(dirname "$0")/steps.py" "$folder/tilewright" "$out/steps.json" ${TILEWRIGHT_STEPS:-4:0} 2>&1 |
            tee "$out/steps.log" | cut -c1-250
        ;;
    large)
        for graphs in 1 0; do
            # So many that the GPU comes to its clock.
            rows=1x64 reps=100
            [ $graphs = 1 ] && rows=1x64,50x128 reps=300
            TILEWRIGHT_GPU_GRAPHS=$graphs timeout 40 "$folder/laya-speed" --device gpu --shape large --folder /tmp/large --precision f16 \
                --rows $rows --pack 8192 --reps $reps --json "$out/large-graphs-$graphs.json" 2>&1 |
                tee "$out/large-graphs-$graphs.log" | tail -n 4
        done
        ;;
    golden) TILEWRIGHT_TEST_GPU=1 tests golden 60 "$folder/golden" --nocapture ;;
    train) TILEWRIGHT_TEST_GPU=1 tests train 120 "$folder/train-tests" --nocapture --test-threads 1 ;;
    # The checkpoints of the tests lie where they lay when `laya-tests` was built.
    laya) TILEWRIGHT_TEST_GPU=1 tests laya 60 "$folder/laya-tests" --nocapture --test-threads 2 cuda ;;
    tables)
        TILEWRIGHT_TEST_GPU=only tests tables 240 "$folder/ops-tests" --test-threads 4 --skip cpu:: --skip mapped --skip speed --skip production \
            --skip 8192 --skip thousand
        ;;
    production) TILEWRIGHT_TEST_GPU=only tests production 120 "$folder/ops-tests" --test-threads 1 production 8192 thousand ;;
    *) echo "no step '$step'" >&2 ;;
    esac
    note "   $step took $((SECONDS - start)) s"
done
printf '\n%s\n' "${lines[@]}"
