#!/usr/bin/env python3
"""GPT-2 training steps in PyTorch on one GPU, for comparison: scaled_dot_product_attention, bf16 autocast, fused AdamW,
gradient clipping, compiled and eager. Prints tokens/s and writes each as JSON when it is known, the rates that matter
most first. What there is no time left for is not measured, and the exit status is 1.

    gpt2_gpu.py --out peers.json --tokens FILE [--seconds 200] [--batches 32 16] [--sizes 124m 350m] [--kinds compiled eager]

The file is one that `ddp-train tokenize` makes: the same tokens as in the runs that are compared.
"""
import argparse
import json
import math
import os
import statistics
import sys
import time

STARTED = time.monotonic()

import torch
from torch import nn
from torch.nn import functional as F

# Layers, heads, width.
SIZES = {"124m": (12, 12, 768), "350m": (24, 16, 1024)}
SEQUENCE, VOCABULARY = 1024, 50304
# Rounds of a measurement, of which the median counts, and steps of each.
ROUNDS, STEPS = 5, 4
# Steps before: they compile, choose kernels and take memory.
WARM_UP = 8
# Seconds that the last round, and the way out, may take after the time to end.
MARGIN = 5


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                   for part in self.qkv(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.fc_proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, heads, width):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def measure(size, text, compiled, deadline):
    """Tokens a second; none if the deadline comes before the first round. `text`: the ids of a batch, and one more."""
    layers, heads, width = SIZES[size]
    torch.manual_seed(1337)
    model = GPT2(layers, heads, width).cuda()
    # A second size must not be taken for a first one whose sizes vary.
    torch.compiler.reset()
    run = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens, targets = text[:-1].view(-1, SEQUENCE), text[1:].view(-1, SEQUENCE)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    rates = []
    while len(rates) < ROUNDS and time.monotonic() < deadline:
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        rates.append(STEPS * tokens.numel() / (time.perf_counter() - started))
    return statistics.median(rates) if rates else None


def tokens_of(path, count):
    """The first `count` ids of a token file (safetensors, 16 bits an id), from its start again if it has fewer."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        ids = torch.frombuffer(bytearray(file.read()), dtype=torch.int16).long() & 0xFFFF
    if header["tokens"]["dtype"] != "U16" or header["tokens"]["shape"] != [len(ids)]:
        sys.exit(f"{path} is no file of 16-bit tokens: {header['tokens']}")
    return ids.repeat(-(-count // len(ids)))[:count]


def write(path, results):
    """Whole or not at all: this process may be killed at any time."""
    with open(f"{path}.part", "w") as file:
        json.dump(results, file)
    os.replace(f"{path}.part", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokens", required=True, help="a token file")
    parser.add_argument("--batches", nargs=2, type=int, default=[32, 16], help="samples of a step, of 124m and of 350m")
    parser.add_argument("--seconds", type=float, default=math.inf, help="how long all of it may take")
    parser.add_argument("--sizes", nargs="+", default=["124m", "350m"])
    parser.add_argument("--kinds", nargs="+", default=["compiled", "eager"])
    args = parser.parse_args()
    deadline = STARTED + args.seconds - MARGIN
    # What a user would set: tf32 where f32 is left.
    torch.set_float32_matmul_precision("high")
    texts = {size: tokens_of(args.tokens, batch * SEQUENCE + 1).cuda() for size, batch in zip(SIZES, args.batches)}
    results = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    missing = []
    for kind in args.kinds:
        for size in args.sizes:
            rate = measure(size, texts[size], kind == "compiled", deadline) if time.monotonic() < deadline else None
            torch.cuda.empty_cache()
            if rate is None:
                missing.append(f"{size} {kind}")
                continue
            results.setdefault(size, {})[kind] = rate
            write(args.out, results)
            print(f"PyTorch {torch.__version__} {size} {kind}: {rate:.0f} tokens/s, known after "
                  f"{time.monotonic() - STARTED:.0f} s", flush=True)
    if missing:
        sys.exit(f"not measured, for lack of time: {', '.join(missing)}")


if __name__ == "__main__":
    main()
