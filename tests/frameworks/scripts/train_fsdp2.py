"""`fully_shard` (FSDP2) with distributed checkpoints (DCP)."""
import argparse
import pathlib
import signal
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_dict(step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def save(step):
    dcp.save(state_dict(step), checkpoint_id=args.out / f"step-{step:06}")


def any_rank_is_asked():
    flag = torch.tensor(float(len(asked)))
    dist.all_reduce(flag)
    return flag.item() > 0


first = 0
# DCP writes `.metadata` last.
complete = sorted(args.out.glob("step-*/.metadata"))
if complete:
    state = state_dict(0)
    dcp.load(state, checkpoint_id=complete[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
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
