# shellcheck shell=bash
# What each section of tests/gpu/run.sh checks, with the words of lanes.sh: `check NAME LIMIT COMMAND...`.
#
# The script that reads this sets `packed` and `logs` (folders), `run` (the program), `steps` and `precision` (of `speed`),
# `batches` (of `speed` and `peers`, by the model's size), `turns` (steps of several ranks), `cards` (how many there are),
# `sharing` (how ranks may share one: `nccl` or `hosts`), and `nccl_of_user` (NCCL's variables before the script set them).
# Its `asked` says which sections are to run.

# What `speed` trains 124M with once more, each to be compared with 124M without: NAME, then VARIABLE=VALUE of the
# environment or KEY=VALUE of the configuration. report.py finds them by their logs.
switches=("kept train.recompute=nothing")

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
    [[ -z $(asked losses) ]] || train loss-cpu 60 1 small.yaml parallel.backend=cpu train.threads=8
    [[ -z $(asked ranks kill9 layouts queues) ]] || train ranks-cpu 20 1 ranks.yaml parallel.backend=cpu train.threads=8
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
    binary gpu_ops gpu_ops 60 --skip sizes_of_training
    binary gpu_ops-training gpu_ops 80 sizes_of_training
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

# Several ranks take the samples of one on the processor: NAME RANKS PRECISION [KEY=VALUE...]. A wait that never ends is
# an error that says what for, before the check is killed.
together() {
    local name=$1 ranks=$2 precision=$3
    shift 3
    train "$name" 30 "$ranks" ranks.yaml "train.steps=$turns" "train.micro_batch=$((8 / ranks))" \
        "train.precision=$precision" "parallel.timeout_s=$(allowed 20)" "$@"
    agrees "$name" "$precision" ranks-cpu
}

# Keys of layouts: four micro-batches a step, of one replica or two.
one_replica=(train.micro_batch=2 train.grad_accumulation=4) two_replicas=(train.micro_batch=1 train.grad_accumulation=4)
tensor=parallel.tensor=2 stages=parallel.pipeline.stages schedule=parallel.pipeline.schedule

# A model that is cut over ranks, in each way.
section_layouts() {
    local name
    together tp 2 f32 "${one_replica[@]}" "$tensor"
    together tp-seq 2 f32 "${one_replica[@]}" "$tensor" parallel.sequence=true
    together tp-dp 4 f32 "${two_replicas[@]}" "$tensor"
    together hsdp 4 f32 parallel.strategy=zero3 parallel.shard_group=2
    for name in gpipe 1f1b interleaved zb-h1 zbv greedy; do
        together "pp-$name" 2 f32 "${one_replica[@]}" "$stages=2" "$schedule=$name"
    done
    together pp-tp 8 f32 "${one_replica[@]}" "$stages=4" "$tensor"
    together pp-dp-tp 8 f32 "${two_replicas[@]}" "$stages=2" "$tensor" parallel.strategy=zero1
}

# Pipelines whose streams share one hardware queue of the card, or 8, as CUDA has it; in `layouts` they have 32, as our
# launcher has it. Nothing may wait in a queue for what its own rank launches later.
section_queues() {
    local queues
    for queues in 1 8; do
        switched "CUDA_DEVICE_MAX_CONNECTIONS=$queues" \
            together "queues-$queues-pp" 2 f32 "${one_replica[@]}" "$stages=2" "$schedule=zbv"
        switched "CUDA_DEVICE_MAX_CONNECTIONS=$queues" \
            together "queues-$queues-pp-tp" 8 f32 "${one_replica[@]}" "$stages=4" "$tensor"
    done
}

# A rank is killed: first every other one names it, also in a pipeline; then, in the middle of a run, the job is
# restarted, goes on from the checkpoint, and comes to the end with the processor's losses.
section_kill9() {
    local endless=(train.steps=1000000 train.checkpoint_every=0)
    training kill9-named 3 ranks.yaml train.micro_batch=2 "${endless[@]}"
    killing kill9-named 25 0 named
    training kill9-named-pp-tp 4 ranks.yaml "${one_replica[@]}" "$stages=2" "$tensor" "${endless[@]}"
    killing kill9-named-pp-tp 25 0 named
    training kill9-restart 4 ranks.yaml "${two_replicas[@]}" "$stages=2" "$schedule=zbv"
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

# Errors of memory, and threads of a block that read what another one writes without waiting for it. At sizes of its
# own: the tool makes a kernel many times slower.
section_sanitizer() {
    local tool
    for tool in memcheck racecheck; do
        # Without a status of its own it ends with that of the program, whatever it found. The driver's refusals are
        # answers, such as of a function that an older one does not have.
        below "sanitizer-$tool" compute-sanitizer --tool "$tool" --error-exitcode 3 --report-api-errors no \
            "$packed/gpu_kernels" --sanitize
    done
}

# The kernels furthest from their roofline, one launch of each shape. Without the right to count, the tool ends well too.
section_ncu() {
    rm -f "$logs/ncu.log"
    below ncu ncu --clock-control none --set detailed --filter-mode per-launch-config --launch-skip 3 --launch-count 1 \
        --kernel-name "regex:^(flash|norm_backward|cross_entropy)" "$packed/gpu_kernels"
    [[ ! -f $logs/ncu.log ]] || check ncu-counted 5 grep "^ *Duration " "$logs/ncu.log"
}

# `gpu_kernels` below a program of CUDA's toolkit: NAME PROGRAM ARGUMENT...
below() {
    local name=$1 program
    program=$(command -v "$2") || program=${CUDA_HOME:-/usr/local/cuda}/bin/$2
    if [[ ! -x $program ]]; then
        line "$name" "NOT RUN: $2 was not found"
    elif [[ ! -x $packed/gpu_kernels ]]; then
        line "$name" "NOT RUN: not packed"
    else
        check "$name" 100 "$program" "${@:3}"
    fi
}

# Ceilings of copy and product first, then each operation with its share of the roofline.
section_kernels() { binary gpu_kernels gpu_kernels 60 --tokens "$packed/python-reference.safetensors"; }

# The last two steps of the sizes have a timeline, which says what each operation took.
section_speed() {
    local size switch
    for size in 124m 350m; do
        timed "speed-$size" "$size" "$(last_steps)"
    done
    # Fewer steps are enough to compare with.
    local steps=$((steps < 30 ? steps : 30))
    for switch in "${switches[@]}"; do
        read -ra switch <<<"$switch"
        switched "${switch[@]:1}" timed "speed-124m-${switch[0]}" 124m
    done
}

# The key of a timeline.
last_steps() { echo "run.timeline=$((steps - 1))-$steps"; }

# A run that is measured, by estimate at 475 to 530 thousand tokens/s (124M on an H100): 100 steps of 32 samples take 6 to
# 7 s, those of 350M 12 s, and twice as long with the micro-batches of an H200: NAME SIZE [KEY=VALUE...].
timed() {
    local name=$1 size=$2
    shift 2
    train "$name" 60 1 "$(basename "$packed"/*"$size.yaml")" "train.micro_batch=${batches[$size]}" "train.steps=$steps" \
        "train.precision=$precision" "$@"
}

# A command with more variables in its environment, or more keys at its end: VARIABLE=VALUE or KEY=VALUE... COMMAND...
switched() {
    local keys=()
    while [[ $1 == *=* ]]; do
        if [[ $1 == [A-Z]* ]]; then local -x "${1?}"; else keys+=("$1"); fi
        shift
    done
    "$@" "${keys[@]}"
}

# How much of the communication runs beside the computing, by the events of both streams: once as it trains, once with
# all communication after backward, once with few blocks for NCCL; and one rank alone, of whose step several should take
# no longer. Then bucket by bucket. On one card two ranks share it and the loopback, so the times are not those of two
# cards.
section_overlap() {
    local ranks=2 batch=4 sharing=$sharing overlap
    if ((cards > 1)); then
        # What is needed on a shared card makes NCCL slower.
        local -x "${nccl_of_user[@]}"
        ranks=$cards batch=${batches[124m]} sharing=nccl
    fi
    local common=(gpt2-124m.yaml train.steps=16 "train.micro_batch=$batch")
    train overlap-alone 40 1 "${common[@]}"
    for overlap in true false; do
        train "overlap-$overlap" 40 "$ranks" "${common[@]}" run.timeline=15-16 "parallel.overlap=$overlap"
    done
    if ((cards > 1)); then
        # Fewer of NCCL's blocks leave more multiprocessors to what computes beside them.
        switched NCCL_MAX_CTAS=8 train overlap-ctas 40 "$ranks" "${common[@]}" run.timeline=15-16
    fi
    binary gpu_nccl-overlap gpu_nccl 20 --exact collectives_run_beside_kernels --nocapture
}

# PyTorch's training steps of these sizes, as one word, in what is left of the section: NAME SIZES ARGUMENT...
of_pytorch() {
    local name=$1 seconds=$((section_end - SECONDS)) size samples=()
    for size in $2; do samples+=("$size=${batches[$size]}"); done
    shift 2
    check "$name" "$seconds" python3 "$packed/train_gpu.py" "$@" --seconds "$seconds" \
        --tokens "$packed/python-reference.safetensors" --samples "${samples[@]}"
}

# Compiles what `peers` measures, beside sections whose times do not matter; what is left over then, `peers` compiles.
# The others go first.
section_compile() {
    renice --priority 10 "$BASHPID" >/dev/null
    of_pytorch compile "124m 350m" --compile-only
}

# PyTorch on the same card, compiled and eager, with both back ends of its attention, as far as the time goes.
section_peers() {
    rm -f "$logs/peers.json"
    of_pytorch peers "124m 350m" --out "$logs/peers.json"
}

# PyTorch's attention on the same card, at shapes of `kernels`.
section_attention() { check attention 60 python3 "$packed/attention_gpu.py"; }

# Layers with the sizes of Llama 8B, beside PyTorch.
section_llama() {
    local steps=$((steps < 30 ? steps : 30))
    timed speed-llama8b llama8b "$(last_steps)"
    rm -f "$logs/peers-llama8b.json"
    of_pytorch peers-llama8b llama8b --kinds compiled --out "$logs/peers-llama8b.json"
}
