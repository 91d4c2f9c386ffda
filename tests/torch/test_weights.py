"""Weights to and from Hugging Face's transformers. Started by `tests/torch/run.sh`; skipped where that is missing."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch

try:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
except ImportError:
    AutoModelForCausalLM = None

DDP_RUN = os.environ["DDP_RUN"]
DDP_TRAIN = str(pathlib.Path(DDP_RUN).with_name("ddp-train"))
BLOCK, LAYERS, HEADS, CHANNELS = 64, 2, 4, 64
PATIENCE_S = 240
# Of the loss: sums of f32 in another order.
TOLERANCE = 2e-6

# Wide enough that a wrong scale, order or activation shows in the loss.
WORDS = {"initializer_range": 0.2, "vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
YAML = f"""\
run: {{ out_dir: out }}
model: {{ n_layer: {LAYERS}, n_head: {HEADS}, n_embd: {CHANNELS}, block_size: {BLOCK}, init_from: hf, KIND }}
data: {{ train: train.txt, val: val.txt }}
train: {{ steps: 1, micro_batch: 2, optimizer: {{ lr: 0.0 }} }}
parallel: {{ backend: cpu }}
"""


def text(blocks, seed):
    state, found = seed, bytearray()
    for _ in range(blocks * BLOCK + 1):
        state = (state * 1103515245 + 12345) % 2**31
        found.append(state >> 16 & 127)
    return bytes(found)


def loss_of(model, tokens):
    """Mean over all positions of all blocks, as a validation has it."""
    tokens = torch.tensor(list(tokens))
    inputs, targets = tokens[:-1].view(-1, BLOCK), tokens[1:].view(-1, BLOCK)
    with torch.no_grad():
        logits = model(inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


class WeightsOf:
    """Of one kind of model: `kind` is what its `model` section has beside the sizes, `make` makes it."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.val = text(20, seed=5)
        (self.dir / "train.yaml").write_text(YAML.replace("KIND", self.kind))
        (self.dir / "train.txt").write_bytes(text(40, seed=3))
        (self.dir / "val.txt").write_bytes(self.val)
        torch.manual_seed(11)
        self.model = self.make().eval()

    def call(self, *words):
        done = subprocess.run(words, cwd=self.dir, capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def train(self, ranks, **settings):
        """The validation loss at the end."""
        sets = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
        self.call(DDP_RUN, "--nproc-per-node", str(ranks), *sets, "train.yaml")
        return json.loads((self.dir / "out/summary.json").read_text())["val_loss"]

    def exported(self):
        self.call(DDP_TRAIN, "ckpt", "export", "out", "--to", "back")
        return AutoModelForCausalLM.from_pretrained(self.dir / "back").eval()

    def expect_close(self, found, expected):
        print(f"loss {found:.9f}, in transformers {expected:.9f}: {abs(found - expected) / expected:.1e}")
        self.assertLess(abs(found - expected), TOLERANCE * expected)

    def expect_same_weights(self, found):
        for (name, one), (_, other) in zip(found.state_dict().items(), self.model.state_dict().items(), strict=True):
            self.assertTrue(torch.equal(one, other), name)

    def test_saved_weights_have_the_same_loss_here_and_come_back_bit_by_bit(self):
        self.model.save_pretrained(self.dir / "hf")
        self.expect_close(self.train(1), loss_of(self.model, self.val))
        back = self.exported()
        self.expect_same_weights(back)
        self.assertEqual(loss_of(back, self.val), loss_of(self.model, self.val))

    def test_several_files_are_read_by_shards(self):
        self.model.save_pretrained(self.dir / "hf", max_shard_size="100KB")
        self.assertTrue((self.dir / "hf/model.safetensors.index.json").exists())
        self.expect_close(self.train(2, parallel__strategy="zero3"), loss_of(self.model, self.val))
        self.expect_same_weights(self.exported())

    def test_halves(self):
        for dtype in (torch.float16, torch.bfloat16):
            with self.subTest(dtype=dtype):
                self.make().to(dtype).save_pretrained(self.dir / "hf")
                # Read from the file: a model that was in halves keeps its rotary frequencies rounded.
                halves = AutoModelForCausalLM.from_pretrained(self.dir / "hf", dtype=torch.float32).eval()
                self.expect_close(self.train(1, run__overwrite="true"), loss_of(halves, self.val))

    def test_what_was_trained_here_has_the_same_loss_there(self):
        self.model.save_pretrained(self.dir / "hf")
        loss = self.train(2, train__steps=24, train__optimizer__lr=1e-3)
        self.assertLess(loss, loss_of(self.model, self.val) - 0.1)
        self.expect_close(loss, loss_of(self.exported(), self.val))


def gpt2(**words):
    sizes = {"n_positions": BLOCK, "n_embd": CHANNELS, "n_layer": LAYERS, "n_head": HEADS}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **WORDS, **words}))


def llama(**words):
    sizes = {"max_position_embeddings": 2 * BLOCK, "hidden_size": CHANNELS, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "intermediate_size": 96}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **WORDS, **words}))


NEEDED = unittest.skipUnless(AutoModelForCausalLM, "transformers is not installed: pip install transformers")


@NEEDED
class Gpt2Weights(WeightsOf, unittest.TestCase):
    kind = "kind: gpt2"

    def make(self):
        return gpt2()


@NEEDED
class UntiedGpt2Weights(WeightsOf, unittest.TestCase):
    kind = "kind: gpt2, tied: false, n_inner: 96"

    def make(self):
        return gpt2(tie_word_embeddings=False, n_inner=96)


@NEEDED
class LlamaWeights(WeightsOf, unittest.TestCase):
    kind = (
        "kind: llama, n_kv_head: 2, n_inner: 96, norm_eps: 1e-6, rope_theta: 500000.0, "
        "rope_scaling: { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 16 }"
    )

    def make(self):
        rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
        rope = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **rope}}
        return llama(num_key_value_heads=2, rms_norm_eps=1e-6, **rope)


@NEEDED
class TiedLlamaWeights(WeightsOf, unittest.TestCase):
    kind = "kind: llama, n_inner: 96, tied: true"

    def make(self):
        return llama(rms_norm_eps=1e-5, tie_word_embeddings=True)


if __name__ == "__main__":
    unittest.main()
