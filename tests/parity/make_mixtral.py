#!/usr/bin/env python3
"""Tiny Mixtrals as Hugging Face's transformers saves them, with loss and gradients of its own to compare with.

    pip install torch transformers && python3 tests/parity/make_mixtral.py

writes the folders `mixtral/*` beside this file, as `make_llama.py` writes `llama/*`. `golden.json` has the loss and the
norm of the gradient of 30 steps of gradient descent on the same samples as well, without momentum and decay, at the
learning rate that stands there. `worker/tests/kernels/ops/published.rs` reads them.
"""

import copy
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

HERE = Path(__file__).resolve().parent / "mixtral"
SAMPLES, POSITIONS, STEPS, LR = 2, 16, 30, 0.005
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "sliding_window": None,
    # Wide, so that every part of the network shows in the loss.
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
KINDS = {
    "plain": {"num_hidden_layers": 2},
    # The load-balancing loss of transformers is that of all layers together: here there is one.
    "balanced": {"num_hidden_layers": 1, "output_router_logits": True, "router_aux_loss_coef": 0.1},
}


def published(gradients, like):
    """The gradients under the names and in the shapes of the file `like`: newer versions of transformers hold the experts of
    a layer in one tensor."""
    found = {}
    for name, weight in like.items():
        if name in gradients:
            found[name] = gradients[name]
            continue
        layer, rest = name.split(".block_sparse_moe.")
        if rest == "gate.weight":
            found[name] = gradients[f"{layer}.mlp.gate.weight"]
            continue
        _, expert, matrix, _ = rest.split(".")
        tensor = "down_proj" if matrix == "w2" else "gate_up_proj"
        rows = slice(weight.shape[0], None) if matrix == "w3" else slice(weight.shape[0])
        found[name] = gradients[f"{layer}.mlp.experts.{tensor}"][int(expert)][rows]
        assert found[name].shape == weight.shape, name
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def make(name, words):
    torch.manual_seed(5)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, **words, attn_implementation="eager"))
    with torch.no_grad():
        for param in model.parameters():
            # The weights of norms would all be 1.
            if param.dim() == 1:
                param.uniform_(0.5, 1.5)
            elif param.dim() == 3:
                # Some versions leave these as they find the memory.
                param.normal_(0.0, SIZES["initializer_range"])
    copy.deepcopy(model).save_pretrained(HERE / name)
    tokens = torch.randint(SIZES["vocab_size"], (SAMPLES, POSITIONS + 1))
    losses, norms = [], []
    for step in range(STEPS):
        model.zero_grad()
        out = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
        total = loss
        if "router_aux_loss_coef" in words:
            total = loss + words["router_aux_loss_coef"] * out.aux_loss
        total.backward()
        gradients = {name: param.grad for name, param in model.named_parameters()}
        losses.append(loss.item())
        norms.append(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item())
        if step == 0:
            weights = load_file(HERE / name / "model.safetensors")
            save_file(published(gradients, weights), HERE / name / "gradients.safetensors")
        with torch.no_grad():
            for param in model.parameters():
                param -= LR * param.grad
    golden = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokens": tokens.tolist(),
        "loss": losses[0],
        "lr": LR,
        "losses": losses,
        "norms": norms,
    }
    (HERE / name / "golden.json").write_text(json.dumps(golden) + "\n")
    (HERE / name / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for name, words in KINDS.items():
        make(name, words)
