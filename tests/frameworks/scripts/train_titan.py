"""A trainer in the style of torchtitan's: a mesh of FSDP2 and tensor parallelism, state with asynchronous checkpoints."""
import argparse
import os
import pathlib
import signal
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class TrainState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


class Checkpointer:
    def __init__(self, folder, state):
        self.folder, self.state, self.pending, self.pending_step = folder, state, None, 0
        self.group = dist.new_group(backend="gloo")  # for a thread beside the training

    def load(self):
        complete = sorted(self.folder.glob("step-*/.metadata"))
        if complete:
            dcp.load({"train": self.state}, checkpoint_id=complete[-1].parent)

    def wait(self):
        if self.pending:
            self.pending.result()
            self.pending = None
            if dist.get_rank() == 0:
                print(f"saved step {self.pending_step}", flush=True)

    def save(self):
        self.wait()
        self.pending_step = self.state.step
        path = self.folder / f"step-{self.state.step:06}"
        self.pending = dcp.async_save({"train": self.state}, checkpoint_id=path, process_group=self.group)


def any_rank_is_asked(asked):
    flag = torch.tensor(float(len(asked)))
    dist.all_reduce(flag)
    return flag.item() > 0


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    checkpointer = Checkpointer(args.out, state)
    checkpointer.load()
    print(f"rank {dist.get_rank()} starts at step {state.step}", flush=True)
    while state.step < args.steps:
        state.step += 1
        torch.manual_seed(state.step)
        x = torch.randn(8, 16)
        loss = (model(x) - x.flip(1)).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        time.sleep(0.05)
        if dist.get_rank() == 0:
            print(f"step {state.step} loss {loss.item():.4f}", flush=True)
        if stops := any_rank_is_asked(asked):
            checkpointer.save()
            break
        if state.step % 20 == 0:
            checkpointer.save()
    checkpointer.wait()
    print(f"rank {dist.get_rank()} {'stops, saved' if stops else 'finished at'} step {state.step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
