#!/usr/bin/env bash
# Every check that needs a GPU. Takes a folder that tests/gpu/pack.sh made, needs no network and no compiler, uses the
# CUDA libraries of the machine, and ends with a short table; full logs go to a folder of their own.
#
#     tests/gpu/run.sh PACKED-FOLDER LOG-FOLDER [SECTION...]
#
# GPU_PRECISION and GPU_STEPS change what the section `speed` measures, GPU_PRECISIONS what `losses` compares.
#
# Sections: doctor device ops nccl losses ranks kill9 kernels speed peers; without any, all, within 8 minutes. The exit
# status is 0 if nothing failed.
set -uo pipefail
packed=$(cd "${1:?folder made by pack.sh}" && pwd)
mkdir -p "${2:?folder for logs}"
logs=$(cd "$2" && pwd)
shift 2
all=(doctor device ops nccl losses ranks kill9 kernels speed peers)
wanted=("$@")
(($# > 0)) || wanted=("${all[@]}")

export DDP_REQUIRE_GPU=1 DDP_REQUIRE_NVRTC=1 RUST_BACKTRACE=1
export XDG_CACHE_HOME="$logs/cache"
run=$packed/ddp-run
steps=${GPU_STEPS:-30}
precision=${GPU_PRECISION:-bf16}
results=()

# A check with a name and a limit in seconds; its output goes to a log of that name.
check() {
    local name=$1 limit=$2 start=$SECONDS outcome status
    shift 2
    timeout --kill-after=10 "$limit" "$@" >"$logs/$name.log" 2>&1
    status=$?
    case $status in
        0) outcome=ok ;;
        124 | 137) outcome="FAILED after $limit s" ;;
        *) outcome="FAILED ($status)" ;;
    esac
    # A test that found no GPU passes without having run.
    grep -q SKIPPED "$logs/$name.log" && outcome="FAILED (skipped)"
    results+=("$(printf '%-24s %-22s %4d s' "$name" "$outcome" $((SECONDS - start)))")
    [[ $outcome == ok ]] || { echo "--- $name: $outcome"; tail -n 25 "$logs/$name.log"; }
}

# A prebuilt test or example, if it was packed.
binary() {
    local name=$1 limit=$2
    shift 2
    if [[ -x $packed/$name ]]; then
        check "$name" "$limit" "$packed/$name" "$@"
    else
        results+=("$(printf '%-24s %-22s' "$name" "not packed")")
    fi
}

# A training run of N ranks: its metrics lie in LOGS/NAME/metrics.jsonl.
train() {
    local name=$1 limit=$2 ranks=$3 config=$4
    shift 4
    rm -rf "${logs:?}/$name"
    check "$name" "$limit" "$run" --max-restarts 0 --nproc-per-node "$ranks" --set "run.out_dir=$logs/$name" "$@" "$packed/$config"
}

section_doctor() { check doctor 60 "$packed/ddp-train" doctor; }
section_device() { binary gpu_device 120; }
section_ops() { binary gpu_ops 180; }
section_nccl() { binary gpu_nccl 180; }

# The same run on the processor and on the GPU, also with the optimizer's state on the host: losses agree step by step.
section_losses() {
    local compared
    train loss-cpu 180 1 small.yaml --set parallel.backend=cpu --set train.threads=8
    for compared in ${GPU_PRECISIONS:-f32 tf32 bf16}; do
        train "loss-$compared" 120 1 small.yaml --set parallel.backend=nccl --set "train.precision=$compared"
        check "loss-$compared-agrees" 10 python3 "$packed/report.py" agree "$compared" \
            "$logs/loss-cpu/metrics.jsonl" "$logs/loss-$compared/metrics.jsonl"
    done
    train loss-offload 120 1 small.yaml --set parallel.backend=nccl --set train.offload.optimizer=host --set train.threads=8
    check loss-offload-agrees 10 python3 "$packed/report.py" agree f32 \
        "$logs/loss-cpu/metrics.jsonl" "$logs/loss-offload/metrics.jsonl"
}

# Ranks that share the card: for function, not for speed.
section_ranks() {
    local ranks strategy
    export NCCL_MULTI_RANK_GPU_ENABLE=1
    for ranks in 2 4; do
        train "ranks-$ranks" 120 "$ranks" small.yaml --set "train.micro_batch=$((8 / ranks))"
        check "ranks-$ranks-agree" 10 python3 "$packed/report.py" agree f32 \
            "$logs/loss-cpu/metrics.jsonl" "$logs/ranks-$ranks/metrics.jsonl"
    done
    for strategy in zero1 zero2 zero3; do
        train "ranks-2-$strategy" 120 2 small.yaml --set train.micro_batch=4 --set "parallel.strategy=$strategy"
        check "ranks-2-$strategy-agree" 10 python3 "$packed/report.py" agree f32 \
            "$logs/loss-cpu/metrics.jsonl" "$logs/ranks-2-$strategy/metrics.jsonl"
    done
    unset NCCL_MULTI_RANK_GPU_ENABLE
}

# A rank is killed in the middle; the job is restarted and comes to the end.
section_kill9() {
    check kill9 120 env NCCL_MULTI_RANK_GPU_ENABLE=1 python3 "$packed/report.py" kill9 "$run" "$packed/small.yaml" \
        "$logs/kill9-run"
}

section_kernels() { binary gpu_kernels 120; }

section_speed() {
    local size
    for size in 124m 350m; do
        train "speed-$size" 120 1 "gpt2-$size.yaml" --set "train.steps=$steps" --set "train.precision=$precision"
    done
}

# PyTorch on the same card, eager and compiled.
section_peers() {
    check peers 240 python3 "$packed/gpt2_gpu.py" --out "$logs/peers.json"
}

for name in "${wanted[@]}"; do
    declare -F "section_$name" >/dev/null || { echo "error: unknown section \`$name\`, known are: ${all[*]}" >&2; exit 2; }
done
for name in "${wanted[@]}"; do "section_$name"; done

echo
python3 "$packed/report.py" table "$logs" 2>&1 | tee "$logs/table.txt"
echo
printf '%s\n' "${results[@]}" | tee "$logs/results.txt"
rm -rf "$logs/cache" "$logs"/*/checkpoints
! printf '%s\n' "${results[@]}" | grep -q FAILED
