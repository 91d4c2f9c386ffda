#!/usr/bin/env bash
# From a text to a model of GPT-2's tokens, in the current folder. Arguments go to the training.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=${DDP_BIN:-$here/../../target/release}
# Without a build in this checkout, the programs that are installed.
if [[ -z ${DDP_BIN:-} && ! -x $bin/ddp-run ]] && installed=$(command -v ddp-run); then
    bin=$(dirname "$installed")
fi
text=$here/../data/python-reference.txt

# The last lines are held out. With a token file of their own, their loss is known in nats per byte too.
mkdir -p tokens
head -n 9900 "$text" >tokens/train.txt
tail -n +9901 "$text" >tokens/val.txt
for part in train val; do
    "$bin/ddp-train" tokenize --tokenizer gpt2 --overwrite -o "tokens/$part.safetensors" "tokens/$part.txt"
done
"$bin/ddp-run" --nproc-per-node 2 --set data.train="$PWD/tokens/train.safetensors" \
    --set data.val="$PWD/tokens/val.safetensors" "$@" "$here/train.yaml"
