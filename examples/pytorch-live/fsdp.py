"""FSDP with replicas (HSDP) whose ranks keep their processes when another one dies; see README.md."""
import glob
import os
import sys

import ddp_run
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS, SAVE_EVERY, SHOW_EVERY, SHARDS = 200, 100, 20, 2


class Shard:
    """This rank's part of parameters and optimizer: plain tensors, which refer to no process group."""

    def __init__(self):
        self.parts = None

    def state_dict(self):
        return self.parts

    def load_state_dict(self, parts):
        self.parts = parts

    def read_from(self, optimizer):
        """Copies nothing."""
        self.parts = [
            (local(param.detach()), {name: local(value) for name, value in optimizer.state[param].items()})
            for param in optimizer.param_groups[0]["params"]
        ]

    def write_to(self, optimizer):
        for param, (value, state) in zip(optimizer.param_groups[0]["params"], self.parts or ()):
            param.detach().to_local().copy_(value)
            optimizer.state[param] = {
                name: value if name == "step" else distributed(value, param) for name, value in state.items()
            }


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distributed(tensor, param):
    return DTensor.from_local(tensor, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


def main(folder):
    shard = Shard()

    def file(number, step):
        return f"{folder}/shard_{number}_step_{step}.pt"

    def saved(number):
        """The steps after which this shard was saved, ascending."""
        names = glob.glob(file(number, "*"))
        return sorted(int(name.rpartition("_")[2].removesuffix(".pt")) for name in names)

    def save(job):
        number = dist.get_rank()
        if number < SHARDS:
            name = file(number, job.finished)
            torch.save(shard.parts, f"{name}.new")
            os.replace(f"{name}.new", name)
            # All ranks may die before the other shards of this step are saved.
            for step in saved(number)[:-2]:
                os.remove(file(number, step))

    def train(job):
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
        finished = 0
        if shard.parts is None:  # a new process
            finished = max(set.intersection(*(set(saved(number)) for number in range(SHARDS))), default=0)
            if finished:
                shard.parts = torch.load(file(rank % SHARDS, finished))
        first = job.restore({"shard": shard}, mesh.get_group("replicate"), finished)
        print(f"pid {os.getpid()} trains from step {first}", flush=True)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        shard.write_to(optimizer)

        def update():
            optimizer.step()
            shard.read_from(optimizer)

        for step in range(first, STEPS):
            random = torch.Generator().manual_seed(step * ranks + rank)
            inputs = torch.randn(32, 16, generator=random)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin()[:, :2])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            job.step(update)
            if job.finished % SHOW_EVERY == 0 and rank == 0:
                print(f"step {job.finished} loss {loss.item():.4f}", flush=True)
            if job.finished % SAVE_EVERY == 0:
                save(job)
        dist.barrier()

    ddp_run.live(train, save)
    dist.destroy_process_group()
    print(f"weights {sum(value.double().sum().item() for value, _ in shard.parts):.17g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
