#!/usr/bin/env python3
"""Weights of one layer after two steps of `torch.optim.Muon`.

    pip install torch && python3 tests/parity/make_muon.py

writes `muon.json` beside this file: some elements of each parameter of a layer of GPT-2 and of Llama. Each projection is
a parameter of its own, as in Hugging Face's Llama; GPT-2 fuses queries, keys and values there too. The tests of
`worker/src/optim/muon.rs` have the same layers, weights and gradients. PyTorch iterates in bf16. Here it is kept from
that, because the worker iterates in f32.
"""

import json
from pathlib import Path
from unittest import mock

import torch

# Parameter to columns, and the rows of its projections.
LAYERS = {
    "gpt2": {
        "h.0.attn.c_attn.weight": (24, [8]),
        "h.0.attn.c_proj.weight": (8, [8]),
        "h.0.mlp.c_fc.weight": (32, [8]),
        "h.0.mlp.c_proj.weight": (8, [32]),
    },
    "llama": {
        "model.layers.0.self_attn.qkv_proj.weight": (8, [8, 4, 4]),
        "model.layers.0.self_attn.o_proj.weight": (8, [8]),
        "model.layers.0.mlp.gate_up_proj.weight": (8, [12, 12]),
        "model.layers.0.mlp.down_proj.weight": (12, [8]),
    },
}
LR, WEIGHT_DECAY, SCALE = 0.125, 0.5, 0.5
# Every eleventh element: all projections have some of them.
STRIDE = 11


def numbers(first, count):
    """From -1 to below 1, exact in f32."""
    hashes = [(i * 2_654_435_761 >> 16) % 65_536 for i in range(first, first + count)]
    return torch.tensor([h / 32_768 - 1 for h in hashes])


def trained(cols, rows):
    whole = [numbers(first, sum(rows) * cols).reshape(-1, cols) for first in (0, 1_000_000)]
    weights, grads = (part.split(rows) for part in whole)
    params = [torch.nn.Parameter(weight * 0.25) for weight in weights]
    muon = torch.optim.Muon(params, lr=LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        for param, grad in zip(params, grads):
            param.grad = grad * SCALE
        with mock.patch.object(torch, "bfloat16", torch.float32):
            muon.step()
    return torch.cat([param.detach() for param in params]).flatten()[::STRIDE].tolist()


if __name__ == "__main__":
    golden = {kind: {key: trained(*cut) for key, cut in layer.items()} for kind, layer in LAYERS.items()}
    path = Path(__file__).resolve().parent / "muon.json"
    path.write_text(json.dumps({"torch": torch.__version__, **golden}) + "\n")
