#!/usr/bin/env python3
"""Text from a prompt, ours beside transformers on the same processor, with the same weights; prints Markdown.

    tests/peers/generate.py CKPT --binary target/release/ddp-train [--tokens 100] [--threads 2] [--rounds 3] [--precision f32]

The checkpoint is exported in Hugging Face's layout, so that both read the same numbers; without temperature both make
the same tokens, which is checked. Each figure is a median with its smallest and largest value; the two take turns.
Needs torch and transformers.
"""
import argparse
import json
import statistics
import subprocess
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--binary", required=True, help="ddp-train")
parser.add_argument("--prompt", default="Hello world")
parser.add_argument("--tokenizer", choices=["bytes", "gpt2"], default="bytes", help="that of the run")
parser.add_argument("--tokens", type=int, default=100)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
args = parser.parse_args()

import torch
import transformers

torch.set_num_threads(args.threads)


def encode(text):
    if args.tokenizer == "bytes":
        return list(text.encode())
    import tiktoken

    return tiktoken.get_encoding("gpt2").encode(text)


def decode(tokens):
    if args.tokenizer == "bytes":
        return bytes(tokens).decode(errors="replace")
    import tiktoken

    return tiktoken.get_encoding("gpt2").decode(tokens)


def ours():
    words = [args.binary, "generate", args.checkpoint, "--prompt", args.prompt, "--temperature", "0", "--json", "--device", "cpu"]
    words += ["--max-tokens", str(args.tokens), "--threads", str(args.threads), "--precision", args.precision]
    made = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return made["tokens_per_s"], made["first_token_ms"], made["text"]


def load(folder):
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def theirs(model):
    """The loop of `generate` without its options: greedy, with its key-value cache."""
    prompt = torch.tensor([encode(args.prompt)])
    made, cache, started = [], None, time.perf_counter()
    inputs = prompt
    while len(made) < args.tokens:
        out = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        inputs = out.logits[:, -1:].argmax(-1)
        made.append(inputs.item())
        if len(made) == 1:
            first = time.perf_counter() - started
    rest = time.perf_counter() - started - first
    return (len(made) - 1) / rest, first * 1e3, decode(made)


def row(name, results):
    def of(column):
        values = [result[column] for result in results]
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    print(f"| {name} | {of(0)} | {of(1)} |")


with tempfile.TemporaryDirectory() as folder:
    exported = f"{folder}/model"
    subprocess.run([args.binary, "ckpt", "export", args.checkpoint, "--to", exported], check=True, capture_output=True)
    model = load(exported)
theirs(model)
results = {"ours": [], "theirs": []}
for _ in range(args.rounds):
    results["ours"].append(ours())
    results["theirs"].append(theirs(model))
print(f"| {args.tokens} tokens, {args.precision}, {args.threads} threads | tokens/s | first token, ms |\n|---|---|---|")
row("ddp-train generate", results["ours"])
row(f"transformers {transformers.__version__}", results["theirs"])
same = results["ours"][0][2] == results["theirs"][0][2]
print(f"\nThe texts are {'the same' if same else 'different'}.")
