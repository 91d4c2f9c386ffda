#!/usr/bin/env bash
# Two launchers of two ranks each on the loopback address. Arguments go to both, but for --separate-daemon.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=${DDP_BIN:-$here/../../target/release}
# Without a build in this checkout, the programs that are installed.
if [[ -z ${DDP_BIN:-} && ! -x $bin/ddp-run ]] && installed=$(command -v ddp-run); then
    bin=$(dirname "$installed")
fi
port=${DDP_PORT:-29400}

separate=
arguments=()
for word in "$@"; do
    if [[ $word == --separate-daemon ]]; then
        separate=1
    else
        arguments+=("$word")
    fi
done
set -- "${arguments[@]}"

daemon=
if [[ -n $separate ]]; then
    # The daemon's first line is the address that it serves.
    coproc RENDEZVOUS { exec "$bin/ddp-rendezvous" serve --listen "127.0.0.1:$port"; }
    daemon=$RENDEZVOUS_PID
    read -r address <&"${RENDEZVOUS[0]}"
    port=${address##*:}
fi

launch() {
    "$bin/ddp-run" --nnodes 2 --rdzv-endpoint "127.0.0.1:$port" --rdzv-id "two-nodes-$$" "$@" "$here/train.yaml"
}

launch "$@" &
first=$!
launch "$@" &
second=$!
trap 'kill $first $second $daemon 2>/dev/null || true' EXIT

# Every node of a job ends with the same code.
code=0
wait "$first" || code=$?
wait "$second" || code=$?
if [[ -n $daemon ]]; then
    kill "$daemon" && wait "$daemon" || true
fi
trap - EXIT
exit "$code"
