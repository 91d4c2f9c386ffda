#!/usr/bin/env bash
# From a text to a model of GPT-2's tokens, in the current folder. Arguments go to the training.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=${DDP_BIN:-$here/../../target/release}

mkdir -p tokens
"$bin/ddp-train" tokenize --tokenizer gpt2 --overwrite -o tokens/python-reference.safetensors "$here/../data/python-reference.txt"
"$bin/ddp-run" --nproc-per-node 2 --set data.train="$PWD/tokens/python-reference.safetensors" "$@" "$here/train.yaml"
