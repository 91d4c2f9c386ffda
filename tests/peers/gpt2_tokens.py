#!/usr/bin/env python3
"""Encodes what `ddp-train tokenize` has encoded with Python's tokenizers, compares every token, and prints the speeds.

    ddp-train tokenize --tokenizer gpt2 --threads 2 -o web.safetensors web.jsonl
    tests/peers/gpt2_tokens.py web.jsonl web.safetensors --threads 2 --tokenizer-json gpt2/tokenizer.json

Needs tiktoken, tokenizers, numpy and safetensors; without a network, TIKTOKEN_CACHE_DIR with r50k_base.
"""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("lines", help="the .jsonl that was encoded, text in the field `text`")
parser.add_argument("tokens", help="the token file that was made")
parser.add_argument("--threads", type=int, default=os.cpu_count())
parser.add_argument("--tokenizer-json", help="GPT-2's tokenizer.json, for Hugging Face's tokenizers")
args = parser.parse_args()
os.environ["RAYON_NUM_THREADS"] = str(args.threads)

import numpy as np
import safetensors.numpy
import tiktoken
import tokenizers

END_OF_TEXT = 50256
BATCH = 2000

ours = safetensors.numpy.load_file(args.tokens)["tokens"]


def compare(name, encode):
    """Reading and decoding of the lines counts, as it does for us; comparing does not."""
    at, seconds, cpu, size = 0, 0.0, 0.0, 0
    with open(args.lines, encoding="utf-8") as lines:
        while True:
            started, started_cpu = time.perf_counter(), time.process_time()
            batch = [json.loads(line)["text"] for _, line in zip(range(BATCH), lines)]
            if not batch:
                break
            found = encode(batch)
            seconds += time.perf_counter() - started
            cpu += time.process_time() - started_cpu
            size += sum(len(text.encode()) for text in batch)
            expected = np.concatenate([np.array([END_OF_TEXT, *document], dtype=ours.dtype) for document in found])
            same = np.array_equal(ours[at : at + len(expected)], expected)
            assert same, f"{name}: other tokens in the documents at token {at}"
            at += len(expected)
    assert at == len(ours), f"{name}: {at} tokens, the file has {len(ours)}"
    print(f"{name}: {at} tokens, all equal; {size} bytes in {seconds:.1f} s ({cpu:.1f} s of processor)")


gpt2 = tiktoken.get_encoding("r50k_base")
compare(f"tiktoken {tiktoken.__version__}", lambda batch: gpt2.encode_ordinary_batch(batch, num_threads=args.threads))
if args.tokenizer_json:
    fast = tokenizers.Tokenizer.from_file(args.tokenizer_json)
    fast.encode_special_tokens = True
    compare(f"tokenizers {tokenizers.__version__}", lambda batch: [e.ids for e in fast.encode_batch_fast(batch, add_special_tokens=False)])
