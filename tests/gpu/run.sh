#!/usr/bin/env bash
# Every check that needs a GPU. Takes a folder that tests/gpu/pack.sh made, needs no network and no compiler, uses the
# CUDA libraries of the machine, and ends with a short table, also when it is stopped; full logs go to a folder of
# their own.
#
#     tests/gpu/run.sh PACKED-FOLDER LOG-FOLDER [SECTION...]
#
# In two calls, each of which ends in under 8 minutes:
#
#     tests/gpu/run.sh PACKED-FOLDER LOGS-1 losses kernels speed peers
#     tests/gpu/run.sh PACKED-FOLDER LOGS-2 ranks kill9 overlap nccl ops device
#
# Each section has a limit, and all of a call together GPU_BUDGET_S seconds (465): what hangs is killed, what is left
# over is said to have not run, and a call whose limits do not fit says so first. Without sections all are asked for,
# in this order, which no one call has the time for. GPU_PRECISION and GPU_STEPS change what `speed` measures,
# GPU_PRECISIONS what `losses` compares. The logs also lie in LOG-FOLDER/logs.tgz. The exit status is 0 if everything
# ran and nothing failed.
set -uo pipefail
packed=$(cd "${1:?folder made by pack.sh}" && pwd)
mkdir -p "${2:?folder for logs}"
logs=$(cd "$2" && pwd)
shift 2

# Sections in order, with the seconds that each may take: those of each call fit into the budget.
first_call=(losses kernels speed peers)
second_call=(ranks kill9 overlap nccl ops device)
declare -A limits=([losses]=75 [kernels]=60 [speed]=100 [peers]=210 [ranks]=130 [kill9]=60 [overlap]=50 [nccl]=100
    [ops]=70 [device]=35)
doctor_limit=20
wanted=("$@")
(($# > 0)) || wanted=("${first_call[@]}" "${second_call[@]}")

export DDP_REQUIRE_GPU=1 DDP_REQUIRE_NVRTC=1 RUST_BACKTRACE=1
# Several ranks train on the one card: NCCL allows it from 2.30 on, and so do our workers.
export NCCL_MULTI_RANK_GPU_ENABLE=1
export XDG_CACHE_HOME="$logs/cache"
run=$packed/ddp-run
steps=${GPU_STEPS:-30}
precision=${GPU_PRECISION:-bf16}
budget=${GPU_BUDGET_S:-465}
end=$((SECONDS + budget))
section_end=$end
results=()
child=
sharing=

# A check with a name and a limit in seconds; its output goes to a log of that name.
check() {
    local name=$1 limit=$2 start=$SECONDS left outcome status
    shift 2
    left=$(((section_end < end ? section_end : end) - SECONDS))
    if ((left < 3)); then
        results+=("$(printf '%-24s %s' "$name" "NOT RUN: no time left")")
        return
    fi
    limit=$((limit < left ? limit : left))
    # In the background, so that this script can be stopped meanwhile and still says what it knows.
    timeout --kill-after=5 "$limit" "$@" >"$logs/$name.log" 2>&1 &
    child=$!
    wait "$child"
    status=$?
    child=
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

# A prebuilt test or example, if it was packed: NAME FILE LIMIT [ARGUMENT...].
binary() {
    local name=$1 file=$2 limit=$3
    shift 3
    if [[ -x $packed/$file ]]; then
        check "$name" "$limit" "$packed/$file" "$@"
    else
        results+=("$(printf '%-24s %s' "$name" "NOT RUN: not packed")")
    fi
}

# Sets `command` to a training run: NAME RANKS CONFIG [KEY=VALUE...]. Its metrics lie in LOGS/NAME/metrics.jsonl.
training() {
    local name=$1 ranks=$2 config=$packed/$3 assignment
    local assignments=(--set "run.out_dir=$logs/$name")
    shift 3
    for assignment; do assignments+=(--set "$assignment"); done
    rm -rf "${logs:?}/$name"
    command=("$run" --nproc-per-node "$ranks" "${assignments[@]}" "$config")
    if ((ranks > 1)) && [[ $sharing == hosts ]]; then
        command=("$run" --nproc-per-node "$ranks" -- "$packed/sharing.sh" "$config" "${assignments[@]}")
    fi
}

# The same as a check: NAME LIMIT RANKS CONFIG [KEY=VALUE...].
train() {
    local name=$1 limit=$2
    shift 2
    training "$name" "$@"
    check "$name" "$limit" env PET_MAX_RESTARTS=0 "${command[@]}"
}

# Losses of a run beside those of another: NAME PRECISION [REFERENCE].
agrees() {
    check "$1-agrees" 10 python3 "$packed/report.py" agree "$2" "$logs/${3:-loss-cpu}/metrics.jsonl" "$logs/$1/metrics.jsonl"
}

# The run on the processor that others are compared with, once.
reference() {
    [[ -f $logs/loss-cpu/metrics.jsonl ]] || train loss-cpu 60 1 small.yaml parallel.backend=cpu train.threads=8
}

# Ends the script where there is nothing to check, and finds out how ranks may share the card.
look_at_the_machine() {
    local gpu nccl
    check doctor "$doctor_limit" "$packed/ddp-train" doctor
    gpu=$(sed -n 's/^  device 0 *//p' "$logs/doctor.log")
    if [[ -z $gpu ]]; then
        echo "error: no GPU that can be used on this machine, so nothing was checked; all of its words: $logs/doctor.log" >&2
        sed -n '/^missing or in the way/,$p' "$logs/doctor.log" >&2
        trap - EXIT
        exit 1
    fi
    nccl=$(sed -n 's/^  libnccl\.so .*, \([0-9][0-9.]*\) (.*/\1/p' "$logs/doctor.log")
    if [[ $(printf '%s\n' 2.30 "${nccl:-0}" | sort -V | head -n 1) == 2.30 ]]; then sharing=nccl; else sharing=hosts; fi
    echo "$gpu; NCCL ${nccl:-not found}; ranks share it by $([[ $sharing == nccl ]] && echo NCCL_MULTI_RANK_GPU_ENABLE || echo NCCL_HOSTID)"
}

# The same run on the processor and on the GPU, also with the optimizer's state on the host: losses agree step by step.
section_losses() {
    local compared
    reference
    for compared in ${GPU_PRECISIONS:-bf16 f32 tf32}; do
        train "loss-$compared" 30 1 small.yaml parallel.backend=nccl "train.precision=$compared"
        agrees "loss-$compared" "$compared"
    done
    train loss-offload 30 1 small.yaml parallel.backend=nccl train.offload.optimizer=host train.threads=8
    agrees loss-offload f32
}

# Ceilings of copy and product first, then each operation with its share of the roofline.
section_kernels() { binary gpu_kernels gpu_kernels 60; }

# Once more with GELUs within products, to be compared with 124M without.
section_speed() {
    local size
    for size in 124m 350m; do
        train "speed-$size" 40 1 "gpt2-$size.yaml" "train.steps=$steps" "train.precision=$precision"
    done
    DDP_FUSED_GELU=1 train speed-124m-fused 40 1 gpt2-124m.yaml "train.steps=$steps" "train.precision=$precision"
}

# PyTorch on the same card, compiled and eager.
section_peers() { check peers 210 python3 "$packed/gpt2_gpu.py" --out "$logs/peers.json"; }

# Ranks that share the card: for function, not for speed.
section_ranks() {
    local ranks strategy
    reference
    for ranks in 2 4; do
        train "ranks-$ranks" 30 "$ranks" small.yaml "train.micro_batch=$((8 / ranks))"
        agrees "ranks-$ranks" f32
    done
    train ranks-2-bf16 30 2 small.yaml train.micro_batch=4 train.precision=bf16
    agrees ranks-2-bf16 bf16
    for strategy in zero1 zero2 zero3; do
        train "ranks-2-$strategy" 30 2 small.yaml train.micro_batch=4 "parallel.strategy=$strategy"
        agrees "ranks-2-$strategy" f32
    done
}

# A rank is killed in the middle; the job is restarted and comes to the end.
section_kill9() {
    training kill9-run 2 small.yaml train.micro_batch=4 train.steps=400
    check kill9 60 env PET_MAX_RESTARTS=3 python3 "$packed/report.py" kill9 "$logs/kill9-run" "${command[@]}"
}

# How much of the communication runs beside the computing, by the events of both streams: once as it trains, once with
# all communication after backward. Two ranks share the card and the loopback, so the times are not those of two cards.
section_overlap() {
    local overlap
    for overlap in true false; do
        train "overlap-$overlap" 40 2 gpt2-124m.yaml train.steps=14 train.micro_batch=4 "parallel.overlap=$overlap"
    done
}

# Each test starts ranks of its own, which share the card already.
section_nccl() { binary gpu_nccl gpu_nccl 100 --test-threads 1; }

# The sizes of training by themselves: the host takes long for them.
section_ops() {
    binary gpu_ops gpu_ops 45 --skip sizes_of_training
    binary gpu_ops-training gpu_ops 60 sizes_of_training
}

section_device() { binary gpu_device gpu_device 35; }

# What may take longer than there is time for is said before it runs.
say_if_they_do_not_fit() {
    local name needed=$doctor_limit
    for name in "${wanted[@]}"; do needed=$((needed + limits[$name])); done
    ((needed <= budget)) || cat <<END
note: these sections may take $needed s, and GPU_BUDGET_S is $budget: the last of them may not run
  hint: in two calls they all do, \`${first_call[*]}\` and \`${second_call[*]}\`
END
}

# Whatever is known when the script ends.
summary() {
    echo
    python3 "$packed/report.py" table "$logs" 2>&1 | tee "$logs/table.txt"
    echo
    printf '%s\n' "${results[@]}" | tee "$logs/results.txt"
    rm -rf "$logs/cache" "$logs"/*/checkpoints
    # Made elsewhere: a folder that is being packed must not grow.
    packed_logs=$(mktemp) && tar -C "$logs" --exclude=./logs.tgz -czf "$packed_logs" . && mv "$packed_logs" "$logs/logs.tgz"
    ! printf '%s\n' "${results[@]}" | grep -qE 'FAILED|NOT RUN'
}

stopped() {
    [[ -n $child ]] && kill "$child"
    results+=("$(printf '%-24s %s' "the rest" "NOT RUN: stopped")")
    exit 1
}

for name in "${wanted[@]}"; do
    [[ -v "limits[$name]" ]] || { echo "error: unknown section \`$name\`, known are: ${first_call[*]} ${second_call[*]}" >&2; exit 2; }
done
say_if_they_do_not_fit
trap 'summary; exit $?' EXIT
trap stopped INT TERM
look_at_the_machine
for name in "${wanted[@]}"; do
    section_end=$((SECONDS + limits[$name]))
    "section_$name"
done
