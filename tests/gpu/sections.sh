# shellcheck shell=bash
# What each section of tests/gpu/run.sh checks, with the words of lanes.sh: `check NAME LIMIT COMMAND...`.
#
# The script that reads this sets `packed` and `logs` (folders), `run` (the program), `steps` and `precision` (of `speed`),
# `batches` (of `speed` and `peers`, by the model's size), `turns` (steps of `ranks`), and `sharing` (how ranks may share
# the card: `nccl` or `hosts`).

# A prebuilt test or example, if it was packed: NAME FILE LIMIT [ARGUMENT...].
binary() {
    local name=$1 file=$2 limit=$3
    shift 3
    if [[ -x $packed/$file ]]; then
        check "$name" "$limit" "$packed/$file" "$@"
    else
        line "$name" "NOT RUN: not packed"
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

# Losses of a run beside those of one on the processor: NAME PRECISION REFERENCE.
agrees() {
    check "$1-agrees" 10 python3 "$packed/report.py" agree "$2" "$logs/$3/metrics.jsonl" "$logs/$1/metrics.jsonl"
}

section_doctor() { check doctor 20 "$packed/ddp-train" doctor; }

# The runs on the processor that others are compared with.
section_reference() {
    train loss-cpu 60 1 small.yaml parallel.backend=cpu train.threads=8
    train ranks-cpu 20 1 ranks.yaml parallel.backend=cpu train.threads=8
}

# The same run on the processor and on the GPU, also with the optimizer's state on the host: losses agree step by step.
section_losses() {
    local compared
    for compared in ${GPU_PRECISIONS:-bf16 f32 tf32}; do
        train "loss-$compared" 30 1 small.yaml parallel.backend=nccl "train.precision=$compared"
        agrees "loss-$compared" "$compared" loss-cpu
    done
    train loss-offload 30 1 small.yaml parallel.backend=nccl train.offload.optimizer=host train.threads=8
    agrees loss-offload f32 loss-cpu
}

# The sizes of training by themselves: the host takes long for them.
section_ops() {
    binary gpu_ops gpu_ops 45 --skip sizes_of_training
    binary gpu_ops-training gpu_ops 60 sizes_of_training
}

section_device() { binary gpu_device gpu_device 35; }

# Ranks that share the card: for function, not for speed.
section_ranks() {
    local ranks strategy
    for ranks in 2 4; do
        together "ranks-$ranks" "$ranks" f32
    done
    together ranks-2-bf16 2 bf16
    for strategy in zero1 zero2 zero3; do
        together "ranks-2-$strategy" 2 f32 "parallel.strategy=$strategy"
    done
}

# Several ranks take the samples of one on the processor: NAME RANKS PRECISION [KEY=VALUE...].
together() {
    local name=$1 ranks=$2 precision=$3
    shift 3
    train "$name" 30 "$ranks" ranks.yaml "train.steps=$turns" "train.micro_batch=$((8 / ranks))" \
        "train.precision=$precision" "$@"
    agrees "$name" "$precision" ranks-cpu
}

# A rank is killed: first every other one names it; then, in the middle of a run, the job is restarted, goes on from the
# checkpoint, and comes to the end with the processor's losses.
section_kill9() {
    training kill9-named 3 ranks.yaml train.micro_batch=2 train.steps=1000000 train.checkpoint_every=0
    killing kill9-named 25 0 named
    training kill9-restart 2 ranks.yaml train.micro_batch=4
    killing kill9-restart 30 3 restart
    agrees kill9-restart f32 ranks-cpu
}

# A scene of kill9.py with `command` as a check: NAME LIMIT RESTARTS SCENE. It is told a little less than the limit, so that
# it says itself what it waits for.
killing() {
    local name=$1 limit=$2
    check "$name" "$limit" env "PET_MAX_RESTARTS=$3" \
        python3 "$packed/kill9.py" "$4" "$logs/$name" $(($(allowed "$limit") - 2)) "${command[@]}"
}

# Each test starts ranks of its own, which share the card already. The one that looks at the clock is in `overlap`.
section_nccl() { binary gpu_nccl gpu_nccl 100 --test-threads 1 --skip collectives_run_beside_kernels; }

# Ceilings of copy and product first, then each operation with its share of the roofline.
section_kernels() { binary gpu_kernels gpu_kernels 60; }

# Once more with GELUs within products, to be compared with 124M without. The last two steps have a timeline, which says
# what each operation took.
section_speed() {
    local size timeline="run.timeline=$((steps - 1))-$steps"
    for size in 124m 350m; do
        train "speed-$size" 40 1 "gpt2-$size.yaml" "train.micro_batch=${batches[$size]}" "train.steps=$steps" \
            "train.precision=$precision" "$timeline"
    done
    DDP_FUSED_GELU=1 train speed-124m-fused 40 1 gpt2-124m.yaml "train.micro_batch=${batches[124m]}" \
        "train.steps=$steps" "train.precision=$precision"
}

# How much of the communication runs beside the computing, by the events of both streams: once as it trains, once with
# all communication after backward; then bucket by bucket. Two ranks share the card and the loopback, so the times are
# not those of two cards.
section_overlap() {
    local overlap
    for overlap in true false; do
        train "overlap-$overlap" 40 2 gpt2-124m.yaml train.steps=16 run.timeline=15-16 \
            train.micro_batch=4 "parallel.overlap=$overlap"
    done
    binary gpu_nccl-overlap gpu_nccl 20 --exact collectives_run_beside_kernels --nocapture
}

# PyTorch on the same card, compiled and eager, as far as the time goes.
section_peers() {
    local seconds=$((section_end - SECONDS))
    rm -f "$logs/peers.json"
    check peers "$seconds" python3 "$packed/gpt2_gpu.py" --out "$logs/peers.json" --seconds "$seconds" \
        --tokens "$packed/python-reference.safetensors" --batches "${batches[124m]}" "${batches[350m]}"
}
