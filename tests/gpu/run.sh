#!/usr/bin/env bash
# Checks that need a GPU, each call in under 10 minutes. Takes a folder that tests/gpu/pack.sh made, needs no network and
# no compiler, uses the CUDA libraries of the machine, and ends with a digest of at most 25 lines, also when it is
# stopped; full logs go to a folder of their own.
#
#     tests/gpu/run.sh PACKED-FOLDER LOG-FOLDER [SECTION... | call-a | call-b | call-c]
#
# call-a: do several ranks work, in every layout, on one card? call-b: does one rank compute right, and how fast is it
# beside PyTorch? call-c: what holds it up, do kernels race, and how fast are the layers of Llama 8B? They may share a
# LOG-FOLDER. Without a name, the sections run that fit into 540 s.
#
# Sections that check function run in two lanes beside each other, those of one process and those of several ranks, and
# PyTorch compiles in a third one what `peers` measures; then the other sections, each alone. Each has a limit, and what
# it leaves over goes to those after it; all together have GPU_BUDGET_S seconds (540; more stretch all limits): what
# hangs is killed, and what is left over is said to have not run. What cannot be killed, and packing the logs, may take
# 25 seconds more.
# Sections that are named run in the order of the script; `overlap` belongs to a call only where there are several
# cards. GPU_PRECISION, GPU_STEPS and GPU_BATCHES ("64 32": micro-batches of 124M and 350M) change what `speed` measures,
# GPU_PRECISIONS what `losses` compares, GPU_RANKS_STEPS how long several ranks train. The logs also lie in
# LOG-FOLDER/logs.tgz. The exit status is 0 if everything ran and nothing failed.
set -uo pipefail
packed=$(cd "${1:?folder made by pack.sh}" && pwd)
mkdir -p "${2:?folder for logs}"
logs=$(cd "$2" && pwd)
shift 2

# Sections in order. Ranks that share a card take turns on it, so that they gain nothing from more of their kind beside.
of_one_process=(losses ops device)
of_several_ranks=(ranks kill9 nccl layouts queues)
alone=(sanitizer ncu kernels speed attention overlap peers llama)
known=("${of_one_process[@]}" "${of_several_ranks[@]}" "${alone[@]}")
# Both sides of a ratio are measured in one call.
declare -A calls=([call-a]="ranks kill9 nccl layouts queues" [call-b]="losses ops device kernels speed attention peers"
    [call-c]="sanitizer ncu llama" [all]="losses ops device ranks kill9 nccl sanitizer kernels speed peers")
# The seconds that each may take, and what comes before them. All take 540 s, with the longer lane of two (145 s),
# `call-a` 455, `call-b` 530, `call-c` 415 and with `overlap` 475: each is done within 600 s, whatever hangs.
full_budget=540
declare -A limits=([doctor]=15 [reference]=25 [losses]=35 [ops]=100 [device]=10 [ranks]=45 [kill9]=55 [nccl]=45
    [layouts]=150 [queues]=120 [sanitizer]=40 [ncu]=90 [kernels]=30 [speed]=115 [attention]=30 [overlap]=60 [peers]=170
    [llama]=270)

export DDP_REQUIRE_GPU=1 DDP_REQUIRE_NVRTC=1 RUST_BACKTRACE=1
# Several ranks train on the one card: NCCL allows it from 2.30 on, and so do our workers.
export NCCL_MULTI_RANK_GPU_ENABLE=1
# NCCL takes a variable without a value for one that is not set.
nccl_of_user=("NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-}" "NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-}")
# Such ranks cannot use NVLink SHARP, and few blocks leave room for the other ranks' where an MPS daemon lets them run at once.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-2}
# One for all: processes may compile the same kernel at once.
export XDG_CACHE_HOME="$logs/cache"
# PyTorch's compiler: what it makes beside other sections, `peers` finds.
export TORCHINDUCTOR_CACHE_DIR="$XDG_CACHE_HOME/inductor"
run=$packed/ddp-run steps=${GPU_STEPS:-100} precision=${GPU_PRECISION:-bf16} turns=${GPU_RANKS_STEPS:-10}
# Known when the doctor has looked.
sharing='' cards=1
declare -A batches
budget=${GPU_BUDGET_S:-$full_budget}
end=$((SECONDS + budget))
stretch=$((budget > full_budget ? 100 * budget / full_budget : 100))
for name in "${!limits[@]}"; do limits[$name]=$((${limits[$name]} * stretch / 100)); done

here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=tests/gpu/lanes.sh
source "$here/lanes.sh"
# shellcheck source=tests/gpu/sections.sh
source "$here/sections.sh"

# Sets `sections` to those that are asked for: SECTION|CALL...
choose_sections() {
    local name more
    (($# > 0)) || set -- all
    for name; do
        [[ " ${known[*]} ${!calls[*]} " == *" $name "* ]] || {
            echo "error: unknown section \`$name\`, known are: ${known[*]} call-a call-b call-c" >&2
            exit 2
        }
        read -ra more <<<"${calls[$name]:-$name}"
        sections+=("${more[@]}")
        # Their times say nothing of a card that is shared.
        [[ $name != all && $name != call-c ]] || for_several_cards=(overlap)
    done
}

# Sets what runs when, and the seconds that it may take.
plan() {
    first=$([[ -n $(asked losses ranks kill9 layouts queues) ]] && echo reference)
    lanes=("$(asked "${of_one_process[@]}")" "$(asked "${of_several_ranks[@]}")")
    last=$(asked "${alone[@]}")
    for_lanes=$(longest "${lanes[@]}")
    # It has as long as what it runs beside.
    limits[compile]=$for_lanes
    [[ -z $(asked peers) ]] || ((for_lanes == 0)) || lanes+=(compile)
    for_last=$(longest "$last")
    for_first=$(longest "$first")
    read -ra planned <<<"doctor $first ${lanes[*]} $last"
}

# Those of these sections that are asked for, as one word: SECTION...
asked() {
    local name found=()
    for name; do [[ " ${sections[*]} " != *" $name "* ]] || found+=("$name"); done
    echo "${found[*]}"
}

# Sets the micro-batches of what is measured: those that are given, or as the card's GiB allow, a power of two. PyTorch
# without compilation holds the logits of GPT-2 several times in f32: by estimate 1.2 GiB a sample of 124M.
choose_batches() {
    local most=2
    while ((4 * most <= $1)); do most=$((2 * most)); done
    read -r "batches[124m]" "batches[350m]" <<<"${GPU_BATCHES:-$most $((most / 2))}"
    batches[llama8b]=1
}

# Ends the script where there is nothing to check, and finds out how ranks may share the card.
look_at_the_machine() {
    local gpu nccl gib
    gpu=$(sed -n 's/^  device 0 *//p' "$logs/doctor.log")
    if [[ -z $gpu ]]; then
        echo "error: no GPU that can be used on this machine, so nothing was checked; all of its words: $logs/doctor.log" >&2
        sed -n '/problems found$/,$p' "$logs/doctor.log" >&2
        rm -rf "$outcomes"
        trap - EXIT
        exit 1
    fi
    cards=$(grep -c '^  device [0-9]' "$logs/doctor.log")
    gib=$(sed -n 's/.*, \([0-9]*\)[0-9.]* GiB.*/\1/p' <<<"$gpu")
    choose_batches "${gib:-0}"
    nccl=$(sed -n 's/^  libnccl\.so .*, \([0-9][0-9.]*\): .*/\1/p' "$logs/doctor.log")
    if [[ $(printf '%s\n' 2.30 "${nccl:-0}" | sort -V | head -n 1) == 2.30 ]]; then sharing=nccl; else sharing=hosts; fi
    echo "$gpu; NCCL ${nccl:-not found}; ranks share it by $([[ $sharing == nccl ]] && echo NCCL_MULTI_RANK_GPU_ENABLE || echo NCCL_HOSTID)"
}

# Whatever is known when the script ends, whoever wants it to end sooner.
summary() {
    local archive
    trap '' INT TERM HUP
    echo
    python3 "$packed/report.py" table "$logs" 2>&1 | tee "$logs/table.txt"
    echo
    lines_of "${planned[@]}" | tee "$logs/results.txt"
    echo
    # Last, for who sees only the end of the output. It has that many lines itself, unless it fails.
    python3 "$packed/report.py" digest "$logs" 2>&1 | tail -n 25 | tee "$logs/digest.txt"
    rm -rf "$outcomes" "$logs/cache" "$logs"/*/checkpoints
    # Made elsewhere: a folder that is being packed must not grow.
    archive=$(mktemp) && tar -C "$logs" --exclude=./logs.tgz -czf "$archive" . && mv "$archive" "$logs/logs.tgz"
    ! grep -qE 'FAILED|NOT RUN' "$logs/results.txt"
}

stopped() {
    trap '' INT TERM HUP
    stop_lanes
    exit 1
}

sections=() for_several_cards=()
choose_sections "$@"
plan
trap 'summary; exit $?' EXIT
trap stopped INT TERM HUP
beside $((for_first + for_lanes + for_last)) doctor
look_at_the_machine
if ((cards > 1)); then
    sections+=("${for_several_cards[@]}")
    plan
fi
needed=$((limits[doctor] + for_first + for_lanes + for_last))
((needed <= budget)) || cat <<END
note: these sections may take $needed s, and GPU_BUDGET_S is $budget: the last of them may not run
  hint: name fewer sections, or give them more time
END
beside $((for_lanes + for_last)) "$first"
beside "$for_last" "${lanes[@]}"
beside 0 "$last"
