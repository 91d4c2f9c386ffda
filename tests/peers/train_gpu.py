#!/usr/bin/env python3
"""Training steps of GPT-2 and of four layers of Llama 8B in PyTorch on one GPU, for comparison:
scaled_dot_product_attention by each of its two fast back ends, bf16 autocast, fused AdamW, gradient clipping, compiled
and eager. Prints tokens/s and writes each as JSON when it is known, the rates that matter most first. What there is no
time left for is not measured, and the exit status is 1.

    train_gpu.py --out peers.json --tokens FILE [--seconds 200] [--samples 124m=32 350m=16 llama8b=1]
                 [--kinds compiled eager] [--backends flash cudnn]
    train_gpu.py --compile-only --tokens FILE ...    only fills the compiler's cache (TORCHINDUCTOR_CACHE_DIR), as far
                                                     as the time goes: a later call with the same sizes starts sooner

The file is one that `ddp-train tokenize` makes: the same tokens as in the runs that are compared.
"""
import argparse
import collections
import gc
import json
import math
import os
import statistics
import sys
import threading
import time

STARTED = time.monotonic()
# The keys of this cache leave out attention's back end: the second one got the compiled code of the first (seen with
# PyTorch 2.15). Those of the cache of the code itself (TORCHINDUCTOR_CACHE_DIR) do not.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY = 50304
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# Rounds of a measurement, of which the median counts, and steps of each.
ROUNDS, STEPS = 5, 10
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
    def __init__(self, positions, layers, heads, width):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1), targets.flatten())


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class LlamaBlock(nn.Module):
    def __init__(self, heads, kv_heads, width, inner):
        super().__init__()
        self.head = width // heads
        self.parts = [heads * self.head, kv_heads * self.head, kv_heads * self.head]
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = linear(width, sum(self.parts)), linear(width, width)
        self.gate_up, self.down = linear(width, 2 * inner), linear(inner, width)

    def forward(self, x, cos, sin):
        def rotated(y):
            a, b = y.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(y)

        b, t, c = x.shape
        q, k, v = (part.view(b, t, -1, self.head).transpose(1, 2)
                   for part in self.qkv(self.norm_1(x)).split(self.parts, dim=2))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, positions, layers, heads, kv_heads, width, inner):
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCABULARY, width), linear(width, VOCABULARY)
        self.blocks = nn.ModuleList(LlamaBlock(heads, kv_heads, width, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        size = width // heads
        angles = torch.outer(torch.arange(positions), 500000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# The model, positions of a sample, and what else the model is made of.
SIZES = {"124m": (GPT2, 1024, 12, 12, 768), "350m": (GPT2, 1024, 24, 16, 1024),
         "llama8b": (Llama, 8192, 4, 32, 8, 4096, 14336)}
# What is measured: a size, `compiled` or `eager`, and the back end of attention.
Variant = collections.namedtuple("Variant", "size kind backend")


def prepare(variant, text):
    """The model's parameters, and a function that computes their gradients. `text`: ids of a batch, and one more."""
    torch.manual_seed(1337)
    kind, positions, *others = SIZES[variant.size]
    model = kind(positions, *others).cuda()
    # A second size must not be taken for a first one whose sizes vary.
    torch.compiler.reset()
    run = torch.compile(model, dynamic=False) if variant.kind == "compiled" else model
    tokens, targets = text[:-1].view(-1, positions), text[1:].view(-1, positions)

    def gradients():
        # With one back end allowed, PyTorch fails rather than take another.
        with sdpa_kernel(BACKENDS[variant.backend]), torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens, targets)
        loss.backward()

    return list(model.parameters()), gradients


def measure(variant, text, deadline):
    """Tokens a second; none if the deadline comes before the first round."""
    parameters, gradients = prepare(variant, text)
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step():
        gradients()
        nn.utils.clip_grad_norm_(parameters, 1.0)
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
        rates.append(STEPS * (len(text) - 1) / (time.perf_counter() - started))
    return statistics.median(rates) if rates else None


def compile_all(args, texts):
    """Compiles each variant by computing its gradients once. Ends the process when the time is over: a compilation
    cannot be asked to stop, and what has been compiled is in the cache."""
    timer = threading.Timer(max(0, STARTED + args.seconds - MARGIN - time.monotonic()), os._exit, [0])
    timer.daemon = True
    if args.seconds < math.inf:
        timer.start()
    for variant in variants(args, ["compiled"]):
        outcome = attempt(lambda: prepare(variant, texts[variant.size])[1]())
        print(f"{' '.join(variant)}: {outcome.problem or 'compiled'} after {time.monotonic() - STARTED:.0f} s",
              flush=True)


def variants(args, kinds):
    """The ones that matter most first."""
    return [Variant(size, kind, backend) for kind in kinds for size in args.samples for backend in args.backends]


Outcome = collections.namedtuple("Outcome", "value problem")


def attempt(what):
    """Its value, or the first line of what PyTorch refuses: a back end that a card or a build does not have, or memory.
    What it held on the card is free afterwards."""
    try:
        return Outcome(what(), None)
    except RuntimeError as e:
        return Outcome(None, str(e).strip().split("\n")[0] or type(e).__name__)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


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


def measure_all(args, texts):
    """Writes each rate when it is known; the exit status says whether all are."""
    deadline = STARTED + args.seconds - MARGIN
    results = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    missing = []
    for variant in variants(args, args.kinds):
        outcome = Outcome(None, "no time left")
        if time.monotonic() < deadline:
            outcome = attempt(lambda: measure(variant, texts[variant.size], deadline))
        if outcome.value is None:
            missing.append(f"{' '.join(variant)} ({outcome.problem or 'no time left'})")
            continue
        results.setdefault(variant.size, {})[f"{variant.kind}-{variant.backend}"] = outcome.value
        write(args.out, results)
        print(f"PyTorch {torch.__version__} {' '.join(variant)}: {outcome.value:.0f} tokens/s, known after "
              f"{time.monotonic() - STARTED:.0f} s", flush=True)
    if missing:
        sys.exit(f"not measured: {'; '.join(missing)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", help="where the rates go, as JSON")
    parser.add_argument("--tokens", required=True, help="a token file")
    parser.add_argument("--seconds", type=float, default=math.inf, help="how long all of it may take")
    parser.add_argument("--samples", nargs="+", default=["124m=32", "350m=16"], metavar="SIZE=NUMBER",
                        help=f"of a step; sizes are {', '.join(SIZES)}")
    parser.add_argument("--kinds", nargs="+", choices=["compiled", "eager"], default=["compiled", "eager"])
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--compile-only", action="store_true", help="measure nothing, fill the compiler's cache")
    args = parser.parse_args()
    if not args.compile_only and not args.out:
        parser.error("--out is needed, unless --compile-only is there")
    args.samples = {size: int(number) for size, number in (words.split("=") for words in args.samples)}
    # What a user would set: tf32 where f32 is left.
    torch.set_float32_matmul_precision("high")
    texts = {size: tokens_of(args.tokens, number * SIZES[size][1] + 1).cuda() for size, number in args.samples.items()}
    if args.compile_only:
        compile_all(args, texts)
    else:
        measure_all(args, texts)


if __name__ == "__main__":
    main()
