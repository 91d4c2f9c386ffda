"""One replica group of torchft: it averages gradients with the other groups, and a restarted group gets their state."""
import argparse
import os
import pathlib
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
group, rank = os.environ["REPLICA_GROUP_ID"], int(os.environ["RANK"])
dist.init_process_group("gloo")  # of this group alone
torch.manual_seed(0)


def any_rank_is_asked():
    flag = torch.tensor(float(len(asked)))
    dist.all_reduce(flag)
    return flag.item() > 0


def load_state_dict(state):
    module.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


def state_dict():
    return {"model": module.state_dict(), "optimizer": inner.state_dict()}


module = torch.nn.Linear(16, 16)
inner = torch.optim.AdamW(module.parameters(), lr=1e-2)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"group_{group}",
    timeout=timedelta(seconds=60),
)
model = DistributedDataParallel(manager, module)
optimizer = Optimizer(manager, inner)
checkpoint = args.out / f"group-{group}-rank-{rank}.pt"


def save():
    torch.save({"state": state_dict(), "manager": manager.state_dict()}, checkpoint.with_suffix(".new"))
    os.replace(checkpoint.with_suffix(".new"), checkpoint)


if checkpoint.exists():
    saved = torch.load(checkpoint)
    load_state_dict(saved["state"])
    manager.load_state_dict(saved["manager"])
print(f"group {group} rank {rank} starts at step {manager.current_step()}", flush=True)

announced = False
while manager.current_step() < args.steps:
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.1)
    step, groups = manager.current_step(), manager.num_participants()
    if not announced:
        print(f"group {group} rank {rank} goes on at step {step}", flush=True)
        announced = True
    if rank == 0:
        print(f"group {group} of {groups} step {step} loss {loss.item():.4f}", flush=True)
    if any_rank_is_asked():
        save()
        print(f"group {group} rank {rank} stops, saved step {step}", flush=True)
        break
    if step % 20 == 0:
        save()
manager.shutdown(wait=False)
dist.destroy_process_group()
