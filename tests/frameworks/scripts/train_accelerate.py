"""Hugging Face accelerate with `save_state`. A notebook calls `train` too."""
import argparse
import pathlib
import signal
import time

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


class Progress:
    """What `save_state` keeps beside model, optimizer and random numbers."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def train(out, steps):
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    folders = ProjectConfiguration(project_dir=out, automatic_checkpoint_naming=True, total_limit=3)
    accelerator = Accelerator(cpu=True, project_config=folders)
    rank = accelerator.process_index
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.DataLoader(torch.randn(64, 16), batch_size=8, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    def save():
        accelerator.save_state()
        if accelerator.is_main_process:
            (pathlib.Path(out) / "complete").write_text(str(accelerator.save_iteration - 1))
        accelerator.wait_for_everyone()

    if (complete := pathlib.Path(out) / "complete").exists():
        last = int(complete.read_text())
        accelerator.load_state(f"{out}/checkpoints/checkpoint_{last}")
        # A save that was cut short may have left the folder of the next one.
        taken = [int(path.name.split("_")[1]) for path in pathlib.Path(out).glob("checkpoints/checkpoint_*")]
        accelerator.project_configuration.iteration = max(taken) + 1
    accelerator.wait_for_everyone()
    print(f"rank {rank} starts at step {progress.step}", flush=True)

    while True:
        for x in data:
            loss = (model(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            time.sleep(0.05)
            progress.step += 1
            step = progress.step
            accelerator.print(f"step {step} loss {loss.item():.4f}", flush=True)
            if accelerator.reduce(torch.tensor(float(len(asked)))).item() > 0:
                save()
                print(f"rank {rank} stops, saved step {step}", flush=True)
                return accelerator.end_training()
            if step % 20 == 0:
                save()
                accelerator.print(f"saved step {step}", flush=True)
            if step >= steps:
                print(f"rank {rank} finished at step {steps}", flush=True)
                return accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    train(args.out, args.steps)
