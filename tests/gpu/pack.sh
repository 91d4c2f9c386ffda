#!/usr/bin/env bash
# Builds what tests/gpu/run.sh needs, into one folder that can be carried to a machine with a GPU: stripped programs,
# tests, configurations, and a text to train on, also as GPT-2's tokens. FOLDER.tgz is the same in one file, which must
# not be larger than 50 MiB. Needs no GPU.
#
#     tests/gpu/pack.sh FOLDER [CARGO-PROFILE]
set -euo pipefail
mkdir -p "${1:?where to put it}"
folder=$(cd "$1" && pwd)
profile=${2:-release}
cd "$(dirname "$0")/../.."

wanted=(--bin ddp-run --bin ddp-train)
for file in worker/tests/gpu_*.rs; do
    wanted+=(--test "$(basename "$file" .rs)")
done
for example in worker/examples/gpu_*; do
    wanted+=(--example "$(basename "$example" .rs)")
done

cargo build --package ddp-run --package ddp-worker --profile "$profile" "${wanted[@]}" \
    --message-format=json-render-diagnostics |
    sed -n 's/.*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1 \2/p' |
    while read -r name path; do
        # Build scripts are executables too.
        if [[ " ${wanted[*]} " == *" $name "* ]]; then strip -o "$folder/$name" "$path"; fi
    done
"$folder/ddp-train" tokenize --overwrite --tokenizer gpt2 --output "$folder/python-reference.safetensors" \
    examples/data/python-reference.txt
cp tests/gpu/*.{sh,py,yaml} tests/peers/*_gpu.py examples/data/python-reference.txt "$folder"
"$folder/archive.sh" "$folder"
