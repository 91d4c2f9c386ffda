#!/usr/bin/env python3
"""Tiny Llamas as Hugging Face's transformers saves them, with loss and gradients of its own to compare with.

    pip install torch transformers && python3 tests/parity/make_llama.py

writes the folders `llama/*` beside this file: `config.json` and `model.safetensors` by `save_pretrained`, the gradients
of all weights as `gradients.safetensors` under the names of the weights, and `golden.json` with tokens and loss. They
are read by `worker/tests/ops/published.rs`, which has the same sizes as a `model` section.
"""

import copy
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent / "llama"
SAMPLES, POSITIONS = 2, 16
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    # Wide, so that every part of the network shows in the loss.
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
KINDS = {
    # Like Llama 3.1: grouped queries, scaled angles, a head of its own.
    "scaled": (
        {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "rope_scaling": LLAMA3},
        torch.float32,
    ),
    # One head of keys and values, the head tied; in halves.
    "tied": ({"num_key_value_heads": 1, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}, torch.bfloat16),
}


def make(name, words, dtype):
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **words, attn_implementation="eager"))
    with torch.no_grad():
        for param in model.parameters():
            # The weights of norms would all be 1.
            if param.dim() == 1:
                param.uniform_(0.5, 1.5)
            # What is saved, but in f32. `model.to` would also round the frequencies of the positions, for good.
            param.copy_(param.to(dtype))
    copy.deepcopy(model).to(dtype).save_pretrained(HERE / name)
    tokens = torch.randint(SIZES["vocab_size"], (SAMPLES, POSITIONS + 1))
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    save_file(gradients, HERE / name / "gradients.safetensors")
    golden = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokens": tokens.tolist(),
        "loss": loss.item(),
    }
    (HERE / name / "golden.json").write_text(json.dumps(golden) + "\n")
    (HERE / name / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    for name, (words, dtype) in KINDS.items():
        make(name, words, dtype)
