"""What `run.tensorboard` writes, read by TensorBoard itself: of a run that was killed after its checkpoint, too. Started by
`tests/torch/run.sh`; skipped where `tensorboard` is missing, and needs nothing of PyTorch."""
import json
import os
import pathlib
import re
import signal
import tempfile
import unittest

from launched import Launched

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    EventAccumulator = None

TAGS = ["grad_norm", "loss", "lr", "tokens_per_s", "val_loss"]
YAML = """\
run: { out_dir: OUT, tensorboard: true }
model: { kind: gpt2, n_layer: 2, n_head: 2, n_embd: 32, block_size: 32 }
data: { train: text.txt }
train: { steps: 60, micro_batch: 2, eval_every: 20, checkpoint_every: 20, checkpoint_async: false, log_every: 1, threads: 1 }
"""


@unittest.skipIf(EventAccumulator is None, "tensorboard is missing")
class TensorBoard(unittest.TestCase):
    def test_it_reads_the_numbers_of_metrics_jsonl(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            out = folder / "out"
            (folder / "text.txt").write_text("".join(chr(48 + i % 61) for i in range(8192)))
            (folder / "tiny.yaml").write_text(YAML.replace("OUT", str(out)))
            launched = Launched("--nproc-per-node", 1, folder / "tiny.yaml")
            self.addCleanup(launched.kill)
            # Steps behind the checkpoint of step 20 are trained again.
            launched.wait_for(r"step 2[5-9]/60 ")
            for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
                try:
                    of_worker = b"DDP_CONTROL=" in (words := path.read_bytes()) and str(folder).encode() in (
                        path.with_name("cmdline").read_bytes() + words)
                except OSError:
                    continue
                if of_worker:
                    os.kill(int(path.parent.name), signal.SIGKILL)
            self.assertEqual(launched.finish(), 0, launched.transcript())
            self.assertTrue(launched.matches(r"restarted"), launched.transcript())
            files = sorted(path.name for path in (out / "tensorboard").iterdir())
            self.assertEqual(len(files), 2)
            self.assertTrue(all(re.fullmatch(r"events\.out\.tfevents\.\d{10}\.ddp-run", name) for name in files), files)

            read = EventAccumulator(str(out / "tensorboard"))
            read.Reload()
            self.assertEqual(sorted(read.Tags()["scalars"]), TAGS)
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            for tag in TAGS:
                expected = [(line["step"], line[tag]) for line in lines if tag in line]
                found = [(event.step, event.value) for event in read.Scalars(tag)]
                self.assertEqual([step for step, _ in found], [step for step, _ in expected], tag)
                for (step, value), (_, number) in zip(found, expected):
                    self.assertAlmostEqual(value, number, delta=1e-6 * abs(number), msg=f"{tag} of step {step}")


if __name__ == "__main__":
    unittest.main()
