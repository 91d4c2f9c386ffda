#!/usr/bin/env python3
"""GPT-2 training steps in PyTorch on one GPU, for comparison: scaled_dot_product_attention, bf16 autocast, fused AdamW,
gradient clipping, compiled and eager. Prints tokens/s and writes them as JSON, the rates that matter most first.

    gpt2_gpu.py --out peers.json [--sizes 350m 124m] [--kinds compiled eager]
"""
import argparse
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

# Layers, heads, width, micro-batch.
SIZES = {"124m": (12, 12, 768, 32), "350m": (24, 16, 1024, 16)}
SEQUENCE, VOCABULARY = 1024, 50304


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


def measure(size, compiled, warm_up, steps):
    layers, heads, width, batch = SIZES[size]
    torch.manual_seed(1337)
    model = GPT2(layers, heads, width).cuda()
    # A second size must not be taken for a first one whose sizes vary.
    torch.compiler.reset()
    run = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, VOCABULARY, (batch, SEQUENCE), device="cuda")
    targets = torch.randint(0, VOCABULARY, (batch, SEQUENCE), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    rates = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        rates.append(steps * batch * SEQUENCE / (time.perf_counter() - started))
    return statistics.median(rates)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--sizes", nargs="+", default=["350m", "124m"])
    parser.add_argument("--kinds", nargs="+", default=["compiled", "eager"])
    args = parser.parse_args()
    # What a user would set: tf32 where f32 is left.
    torch.set_float32_matmul_precision("high")
    results = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    for kind in args.kinds:
        for size in args.sizes:
            rate = measure(size, kind == "compiled", warm_up=8, steps=6)
            results.setdefault(size, {})[kind] = rate
            print(f"PyTorch {torch.__version__} {size} {kind}: {rate:.0f} tokens/s", flush=True)
            torch.cuda.empty_cache()
            with open(args.out, "w") as file:
                json.dump(results, file)


if __name__ == "__main__":
    main()
