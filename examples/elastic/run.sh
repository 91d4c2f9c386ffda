#!/usr/bin/env bash
# A job of one or two nodes, on one machine: a node joins while the job runs, and is killed later. Arguments go to both nodes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=${DDP_BIN:-$here/../../target/release}
# Without a build in this checkout, the programs that are installed.
if [[ -z ${DDP_BIN:-} && ! -x $bin/ddp-run ]] && installed=$(command -v ddp-run); then
    bin=$(dirname "$installed")
fi
out=${DDP_OUT:-runs/elastic/$$}

# Whoever hosts the rendezvous must outlive every node: a daemon of its own does. Its first line is its address.
coproc RENDEZVOUS { exec "$bin/ddp-rendezvous" serve --listen 127.0.0.1:0; }
daemon=$RENDEZVOUS_PID
read -r address <&"${RENDEZVOUS[0]}"
trap 'kill "$daemon" ${first:-} ${second:-} 2>/dev/null || true' EXIT

node() {
    exec "$bin/ddp-run" --rdzv-endpoint "$address" --rdzv-id "elastic-$$" --set run.out_dir="$out" "$@" \
        "$here/train.yaml"
}

# Waits until the run's metrics have at least $2 steps made by $1 ranks.
until_trained_by() {
    until (($(grep -s "\"world_size\":$1\b" "$out/metrics.jsonl" | wc -l) >= $2)); do
        kill -0 "$first" || { echo "the first node ended early" >&2; exit 1; }
        sleep 0.1
    done
}

node "$@" &
first=$!
until_trained_by 2 1
echo "run.sh: two ranks train; a second node joins"
node "$@" &
second=$!
# With a checkpoint among them: the steps after it are lost with the node.
until_trained_by 4 20
echo "run.sh: four ranks train; the second node is killed"
kill -9 "$second"
wait "$first"
echo "run.sh: the first node finished alone"
