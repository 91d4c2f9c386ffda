"""Lightning's Trainer with its own checkpoints.

Its own answer to SIGTERM is a collective in the signal handler: it hangs if another collective has begun on some ranks.
"""
import argparse
import os
import signal
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def training_step(self, x):
        time.sleep(0.05)
        return (self.layer(x) - x.flip(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_start(self):
        print(f"rank {self.global_rank} starts at step {self.global_step}", flush=True)

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_rank == 0:
            print(f"step {self.global_step} loss {outputs['loss'].item():.4f}", flush=True)

    def on_train_end(self):
        print(f"rank {self.global_rank} finished at step {self.global_step}", flush=True)


class StopOnSigterm(lightning.Callback):
    """All ranks save after the same batch."""

    asked = False

    def on_train_start(self, trainer, module):
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.strategy.reduce_boolean_decision(self.asked, all=False):
            trainer.save_checkpoint(f"{args.out}/last.ckpt")
            trainer.should_stop = True


class Trainer(lightning.Trainer):
    def save_checkpoint(self, *args, **kwargs):
        super().save_checkpoint(*args, **kwargs)
        if self.is_global_zero:
            print(f"saved step {self.global_step}", flush=True)


local = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=local,
    num_nodes=int(os.environ["WORLD_SIZE"]) // local,
    max_steps=args.steps,
    default_root_dir=args.out,
    callbacks=[ModelCheckpoint(dirpath=args.out, every_n_train_steps=20, save_last=True), StopOnSigterm()],
    logger=False,
    enable_progress_bar=False,
)
data = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=8, shuffle=True)
trainer.fit(Model(), data, ckpt_path="last")
