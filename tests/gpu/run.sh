#!/usr/bin/env bash
# Every check that needs a GPU, in under 8 minutes. Takes a folder that tests/gpu/pack.sh made, needs no network and no
# compiler, uses the CUDA libraries of the machine, and ends with a short table, also when it is stopped; full logs go
# to a folder of their own.
#
#     tests/gpu/run.sh PACKED-FOLDER LOG-FOLDER [SECTION...]
#
# Sections that check function run in two lanes beside each other, those of one process and those of several ranks;
# then those that measure, each alone. Each has a limit, and what it leaves over goes to those after it; all together have
# GPU_BUDGET_S seconds (450; more stretch all limits): what hangs is killed, and what is left over is said to have not run.
# What cannot be killed, and packing the logs, may take 25 seconds more.
# Without sections all are run; those that are named run in the same order. GPU_PRECISION, GPU_STEPS and GPU_BATCHES
# ("64 32": micro-batches of 124M and 350M) change what `speed` measures, GPU_PRECISIONS what `losses` compares,
# GPU_RANKS_STEPS how long `ranks` trains. The logs also lie in LOG-FOLDER/logs.tgz. The exit status is 0 if everything
# ran and nothing failed.
set -uo pipefail
packed=$(cd "${1:?folder made by pack.sh}" && pwd)
mkdir -p "${2:?folder for logs}"
logs=$(cd "$2" && pwd)
shift 2

# Sections in order. Ranks that share a card take turns on it, so that they gain nothing from more of their kind beside.
of_one_process=(losses ops device)
of_several_ranks=(ranks kill9 nccl)
measuring=(kernels speed overlap peers)
known=("${of_one_process[@]}" "${of_several_ranks[@]}" "${measuring[@]}")
# The seconds that each may take, and what comes before them. With the longer lane of two all together make the budget.
full_budget=450
declare -A limits=([doctor]=15 [reference]=25 [losses]=50 [ops]=60 [device]=25 [ranks]=45 [kill9]=45 [nccl]=45
    [kernels]=45 [speed]=75 [overlap]=40 [peers]=115)
sections=("$@")
(($# > 0)) || sections=("${known[@]}")

export DDP_REQUIRE_GPU=1 DDP_REQUIRE_NVRTC=1 RUST_BACKTRACE=1
# Several ranks train on the one card: NCCL allows it from 2.30 on, and so do our workers.
export NCCL_MULTI_RANK_GPU_ENABLE=1
# Such ranks cannot use NVLink SHARP, and few blocks leave room for the other ranks' where an MPS daemon lets them run at once.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} NCCL_MAX_CTAS=${NCCL_MAX_CTAS:-2}
# One for all: processes may compile the same kernel at once.
export XDG_CACHE_HOME="$logs/cache"
run=$packed/ddp-run steps=${GPU_STEPS:-30} precision=${GPU_PRECISION:-bf16} turns=${GPU_RANKS_STEPS:-10} sharing=
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
    gib=$(sed -n 's/.*, \([0-9]*\)[0-9.]* GiB.*/\1/p' <<<"$gpu")
    choose_batches "${gib:-0}"
    nccl=$(sed -n 's/^  libnccl\.so .*, \([0-9][0-9.]*\) (.*/\1/p' "$logs/doctor.log")
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

for name in "${sections[@]}"; do
    [[ " ${known[*]} " == *" $name "* ]] || { echo "error: unknown section \`$name\`, known are: ${known[*]}" >&2; exit 2; }
done
first=$([[ -n $(asked losses ranks) ]] && echo reference)
lanes=("$(asked "${of_one_process[@]}")" "$(asked "${of_several_ranks[@]}")")
last=$(asked "${measuring[@]}")
read -ra planned <<<"doctor $first ${lanes[*]} $last"
for_last=$(longest "$last")
for_lanes=$(longest "${lanes[@]}")
for_first=$(longest "$first")
needed=$((limits[doctor] + for_first + for_lanes + for_last))
((needed <= budget)) || cat <<END
note: these sections may take $needed s, and GPU_BUDGET_S is $budget: the last of them may not run
  hint: name fewer sections, or give them more time
END
trap 'summary; exit $?' EXIT
trap stopped INT TERM HUP
beside $((for_first + for_lanes + for_last)) doctor
look_at_the_machine
beside $((for_lanes + for_last)) "$first"
beside "$for_last" "${lanes[@]}"
beside 0 "$last"
