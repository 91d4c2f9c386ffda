"""DistributedDataParallel with `torch.save`."""
import argparse
import os
import pathlib
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpoint = args.out / "checkpoint.pt"


def save(step):
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, checkpoint.with_suffix(".new"))
        os.replace(checkpoint.with_suffix(".new"), checkpoint)
    dist.barrier()


def any_rank_is_asked():
    flag = torch.tensor(float(len(asked)))
    dist.all_reduce(flag)
    return flag.item() > 0


first = 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
print(f"rank {rank} starts at step {first}", flush=True)

for step in range(first + 1, args.steps + 1):
    x = torch.randn(8, 16)
    loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if any_rank_is_asked():
        save(step)
        print(f"rank {rank} stops, saved step {step}", flush=True)
        break
    if step % 20 == 0:
        save(step)
        if rank == 0:
            print(f"saved step {step}", flush=True)
else:
    print(f"rank {rank} finished at step {args.steps}", flush=True)
dist.destroy_process_group()
