#!/usr/bin/env python3
"""Losses of a small GPT-2 over 50 steps, computed by PyTorch: an independent implementation to compare with.

    pip install torch numpy blake3 && python3 tests/parity/make_golden.py

writes `golden.json` beside this file. Nothing of the worker is used: first values (Philox and Box-Muller), the order
of the samples, the network, clipping, the schedule and the update are written down here once more.

Mixed precision is the worker's: parameters, activations and gradients in bf16; each rank's gradients are summed in
f32, in rank order, and rounded once; AdamW updates f32 masters, which are rounded into the parameters.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from blake3 import blake3

HERE = Path(__file__).resolve().parent
TEXT = HERE.parent.parent / "examples/data/python-reference.txt"

SETTINGS = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "block_size": 64,
    "ranks": 2,
    "micro_batch": 4,
    "steps": 50,
    "seed": 1337,
    "grad_clip": 1.0,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "warmup_steps": 5,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
}
VOCAB = 256


def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011) of many counters `[4, n]`."""
    mask = np.uint64(0xFFFFFFFF)
    c = [x.astype(np.uint64) for x in counter]
    k = list(key)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        hi0, lo0 = p0 >> np.uint64(32), p0 & mask
        hi1, lo1 = p1 >> np.uint64(32), p1 & mask
        c = [hi1 ^ c[1] ^ np.uint64(k[0]), lo1, hi0 ^ c[3] ^ np.uint64(k[1]), lo0]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def normal(key, shape, std):
    """Element `e` is word `e mod 4` of block `e div 4` of the key's stream, made normal (Box & Muller 1958)."""
    stream = blake3(key.encode(), derive_key_context="ddp-worker first values of a parameter").digest()
    low, high = (int.from_bytes(stream[at : at + 4], "little") for at in (0, 4))
    count = math.prod(shape)
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    same = np.ones_like(blocks)
    counter = [blocks, same * 0, same * np.uint64(low), same * np.uint64(high)]
    w = [x.astype(np.float64) for x in philox(counter, [SETTINGS["seed"] & 0xFFFFFFFF, SETTINGS["seed"] >> 32])]
    out = []
    for r, a in ((w[0], w[1]), (w[2], w[3])):
        radius = np.sqrt(-2.0 * np.log((r + 1.0) / 2.0**32))
        angle = a / 2.0**32 * 2.0 * np.pi
        out += [radius * np.cos(angle), radius * np.sin(angle)]
    values = np.stack(out, axis=1).reshape(-1)[:count] * np.float64(np.float32(std))
    return torch.from_numpy(values.astype(np.float32)).reshape(shape)


def first_values():
    """Name to f32 tensor; matrices are `[inputs, outputs]`."""
    layers, c = SETTINGS["n_layer"], SETTINGS["n_embd"]
    into_stream = np.float32(0.02) / np.sqrt(np.float32(2 * layers))
    shapes = [("wte.weight", (VOCAB, c), 0.02), ("wpe.weight", (SETTINGS["block_size"], c), 0.02)]
    for i in range(layers):
        h = f"h.{i}."
        shapes += [(h + "ln_1.weight", (c,), 1), (h + "ln_1.bias", (c,), 0)]
        shapes += [(h + "attn.c_attn.weight", (c, 3 * c), 0.02), (h + "attn.c_attn.bias", (3 * c,), 0)]
        shapes += [(h + "attn.c_proj.weight", (c, c), into_stream), (h + "attn.c_proj.bias", (c,), 0)]
        shapes += [(h + "ln_2.weight", (c,), 1), (h + "ln_2.bias", (c,), 0)]
        shapes += [(h + "mlp.c_fc.weight", (c, 4 * c), 0.02), (h + "mlp.c_fc.bias", (4 * c,), 0)]
        shapes += [(h + "mlp.c_proj.weight", (4 * c, c), into_stream), (h + "mlp.c_proj.bias", (c,), 0)]
    shapes += [("ln_f.weight", (c,), 1), ("ln_f.bias", (c,), 0)]
    # Vectors are constant: ones and zeros.
    return {
        name: normal(name, shape, value) if len(shape) > 1 else torch.full(shape, float(value))
        for name, shape, value in shapes
    }


def losses_of(p, tokens, targets):
    """Mean loss of a micro-batch `[B, T]`; logits are as narrow as the parameters, the loss is f32."""
    c, heads = SETTINGS["n_embd"], SETTINGS["n_head"]
    b, t = tokens.shape

    def norm(x, name):
        return F.layer_norm(x, (c,), p[name + ".weight"], p[name + ".bias"], 1e-5)

    def dense(x, name):
        return x @ p[name + ".weight"] + p[name + ".bias"]

    x = p["wte.weight"][tokens] + p["wpe.weight"][:t]
    for i in range(SETTINGS["n_layer"]):
        h = f"h.{i}."
        qkv = dense(norm(x, h + "ln_1"), h + "attn.c_attn").split(c, dim=2)
        q, k, v = (y.view(b, t, heads, c // heads).transpose(1, 2) for y in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + dense(mixed.transpose(1, 2).reshape(b, t, c), h + "attn.c_proj")
        wide = F.gelu(dense(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh")
        x = x + dense(wide, h + "mlp.c_proj")
    logits = norm(x, "ln_f") @ p["wte.weight"].T
    return F.cross_entropy(logits.float().reshape(b * t, VOCAB), targets.reshape(b * t))


def micro_batch(text, step, rank):
    """`data.order: sequential`, without accumulation."""
    size, b, ranks = SETTINGS["block_size"], SETTINGS["micro_batch"], SETTINGS["ranks"]
    blocks = (len(text) - 1) // size
    starts = [((step * ranks + rank) * b + i) % blocks * size for i in range(b)]
    rows = [text[start : start + size + 1] for start in starts]
    rows = torch.tensor([list(row) for row in rows])
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step):
    """Linear warm-up, then half a cosine down to `min_lr` in the last step."""
    peak, low, warmup = SETTINGS["lr"], SETTINGS["min_lr"], SETTINGS["warmup_steps"]
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (SETTINGS["steps"] - warmup - 1)
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))


def train(dtype):
    """Mean loss over all ranks before each step's update."""
    text = TEXT.read_bytes()
    masters = {name: value.clone().requires_grad_() for name, value in first_values().items()}
    decaying = [m for m in masters.values() if m.dim() > 1]
    others = [m for m in masters.values() if m.dim() == 1]
    groups = [{"params": decaying, "weight_decay": SETTINGS["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=tuple(SETTINGS["betas"]), eps=SETTINGS["eps"])
    losses = []
    for step in range(SETTINGS["steps"]):
        sums = {name: torch.zeros_like(m) for name, m in masters.items()}
        loss_sum = 0.0
        for rank in range(SETTINGS["ranks"]):
            params = {name: m.detach().to(dtype).requires_grad_() for name, m in masters.items()}
            loss = losses_of(params, *micro_batch(text, step, rank))
            loss.backward()
            loss_sum += loss.item()
            for name, param in params.items():
                sums[name] += param.grad.float()
        losses.append(loss_sum / SETTINGS["ranks"])
        for name, master in masters.items():
            master.grad = (sums[name] / SETTINGS["ranks"]).to(dtype).float()
        torch.nn.utils.clip_grad_norm_(list(masters.values()), SETTINGS["grad_clip"])
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step)
        adamw.step()
    return losses


def main():
    # The known answer published with Random123.
    zeros = [np.zeros(1, dtype=np.uint64)] * 4
    assert [int(x[0]) for x in philox(zeros, [0, 0])] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    golden = {
        "torch": torch.__version__,
        "text_bytes": len(TEXT.read_bytes()),
        "settings": SETTINGS,
        "f32": train(torch.float32),
        "bf16": train(torch.bfloat16),
    }
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
