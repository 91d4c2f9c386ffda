"""Training against one process of transformers, under several layouts: losses and norms of 50 steps, and the gradient of
every parameter before and after them. Started by `tests/torch/run.sh`; skipped where transformers is missing."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch

from test_weights import BLOCK, CHANNELS, DDP_RUN, DDP_TRAIN, HEADS, NEEDED, PATIENCE_S, gpt2, llama, text

try:
    from transformers import AutoModelForCausalLM
except ImportError:
    AutoModelForCausalLM = None

LAYERS, STEPS, SAMPLES, ACCUMULATION = 4, 50, 2, 4
# Of f32, in whose last bits sums in another order differ.
LOSSES, NORMS, GRADIENT = 1e-5, 1e-4, 1e-5
# Of one parameter: where attention is nearly even, gradients of queries and keys are small differences of large numbers.
ONE_GRADIENT = 1e-4
# So far that what is left of a parameter after a step is its gradient.
LONG_STEP = 1e4

ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
DECAY, CLIP = 0.1, 1.0
YAML = f"""\
run: {{ out_dir: out, overwrite: true }}
model: {{ n_layer: {LAYERS}, n_head: {HEADS}, n_embd: {CHANNELS}, block_size: {BLOCK}, init_from: hf, KIND }}
data: {{ train: train.txt, val: val.txt, order: sequential }}
train:
  steps: {STEPS}
  micro_batch: {SAMPLES}
  grad_accumulation: {ACCUMULATION}
  grad_clip: {CLIP}
  optimizer: {{ kind: adamw, lr: {ADAMW["lr"]}, betas: [0.9, 0.95], eps: {ADAMW["eps"]}, weight_decay: {DECAY} }}
  schedule: {{ kind: constant }}
  threads: 1
parallel: {{ backend: cpu }}
"""

# Ranks, and what is set for them.
LAYOUTS = {
    "one process": (1, {}),
    "tp 2": (2, {"parallel.tensor": 2}),
    "tp 2, sequence parallel": (2, {"parallel.tensor": 2, "parallel.sequence": "true"}),
    "pp 2": (2, {"parallel.pipeline.stages": 2}),
    "tp 2 × pp 2": (4, {"parallel.tensor": 2, "parallel.pipeline.stages": 2}),
    "tp 2, sequence parallel × pp 2, ZBV": (
        4,
        {
            "parallel.tensor": 2,
            "parallel.sequence": "true",
            "parallel.pipeline.stages": 2,
            "parallel.pipeline.schedule": "zbv",
        },
    ),
}


def loss_of(model, data, step):
    """Mean over all micro-batches of a step of `data.order: sequential`, of one data-parallel rank."""
    blocks = (len(data) - 1) // BLOCK
    first = step * SAMPLES * ACCUMULATION
    starts = [(first + i) % blocks * BLOCK for i in range(SAMPLES * ACCUMULATION)]
    rows = torch.tensor([list(data[start : start + BLOCK + 1]) for start in starts])
    logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(model, data):
    """Loss and norm of every step."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, **ADAMW)
    rows = []
    for step in range(STEPS):
        adamw.zero_grad()
        loss = loss_of(model, data, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        rows.append((loss.item(), norm.item()))
    return rows


def gradients(model, data):
    model.zero_grad()
    loss_of(model, data, 0).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def distance(found, expected):
    found, expected = (torch.cat([x.flatten() for x in tensors]) for tensors in (found, expected))
    return ((found - expected).norm() / expected.norm()).item()


class TrainingOf:
    """Of one kind of model, `name`: `kind` is what its `model` section has beside the sizes, `make` makes it."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.dir = pathlib.Path(folder.name)
        cls.data = text(201, seed=3)
        (cls.dir / "train.yaml").write_text(YAML.replace("KIND", cls.kind))
        (cls.dir / "train.txt").write_bytes(cls.data)
        (cls.dir / "val.txt").write_bytes(text(4, seed=5))
        torch.manual_seed(11)
        model = cls.make().train()
        model.save_pretrained(cls.dir / "first")
        cls.expected = train(model, cls.data)
        model.save_pretrained(cls.dir / "last")

    def call(self, *words):
        done = subprocess.run(words, cwd=self.dir, capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def run_from(self, weights, layout, settings=()):
        """Trains from these weights under a layout; its metrics."""
        (self.dir / "hf").unlink(missing_ok=True)
        (self.dir / "hf").symlink_to(weights)
        ranks, parallel = LAYOUTS[layout]
        sets = [f"--set={key}={value}" for key, value in {**parallel, **dict(settings)}.items()]
        self.call(DDP_RUN, "--nproc-per-node", str(ranks), *sets, "train.yaml")
        return [json.loads(line) for line in (self.dir / "out/metrics.jsonl").read_text().splitlines()]

    def exported(self):
        self.call("rm", "-rf", "back")
        self.call(DDP_TRAIN, "ckpt", "export", "out", "--to", "back")
        return AutoModelForCausalLM.from_pretrained(self.dir / "back")

    def test_fifty_steps_have_the_losses_and_norms_of_transformers(self):
        self.assertLess(self.expected[-1][0], self.expected[0][0] - 0.5, "it learns")
        for layout in LAYOUTS:
            with self.subTest(layout=layout):
                rows = self.run_from("first", layout)
                self.assertEqual(len(rows), STEPS)
                off = [
                    max(abs(row[key] - pair[i]) / pair[i] for row, pair in zip(rows, self.expected))
                    for i, key in enumerate(("loss", "grad_norm"))
                ]
                print(f"{self.name}, {layout}: losses to {off[0]:.1e}, norms to {off[1]:.1e}")
                self.assertLess(off[0], LOSSES)
                self.assertLess(off[1], NORMS)

    def test_every_gradient_is_that_of_transformers(self):
        plain = {
            "train.steps": 1,
            "train.grad_clip": "null",
            "train.optimizer.kind": "sgd",
            "train.optimizer.lr": LONG_STEP,
            "train.optimizer.weight_decay": 0.0,
            "train.optimizer.momentum": 0.0,
            # SGD has none.
            "train.optimizer.betas": "null",
        }
        for weights in ("first", "last"):
            start = AutoModelForCausalLM.from_pretrained(self.dir / weights)
            expected = gradients(start, self.data)
            for layout in LAYOUTS:
                with self.subTest(layout=layout, weights=weights):
                    self.run_from(weights, layout, plain.items())
                    moved = dict(self.exported().named_parameters())
                    found = {name: (p - moved[name]) / LONG_STEP for name, p in start.named_parameters()}
                    off = {name: distance([found[name]], [grad]) for name, grad in expected.items()}
                    worst, whole = max(off, key=off.get), distance(found.values(), expected.values())
                    print(f"{self.name}, {layout}, {weights}: gradient to {whole:.1e}, {worst} to {off[worst]:.1e}")
                    self.assertLess(whole, GRADIENT)
                    self.assertLess(off[worst], ONE_GRADIENT, worst)


@NEEDED
class Gpt2Training(TrainingOf, unittest.TestCase):
    name = "GPT-2"
    kind = "kind: gpt2"

    @staticmethod
    def make():
        return gpt2(n_layer=LAYERS, initializer_range=0.05, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


@NEEDED
class LlamaTraining(TrainingOf, unittest.TestCase):
    name = "Llama"
    kind = (
        "kind: llama, n_kv_head: 2, n_inner: 96, norm_eps: 1e-6, rope_theta: 500000.0, "
        "rope_scaling: { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 16 }"
    )

    @staticmethod
    def make():
        rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
        rope = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **rope}}
        sizes = {"num_hidden_layers": LAYERS, "num_key_value_heads": 2, "initializer_range": 0.05}
        return llama(rms_norm_eps=1e-6, **sizes, **rope)


if __name__ == "__main__":
    unittest.main()
