"""FSDP with replicas (HSDP) whose ranks keep their processes when another one dies; see README.md."""
import glob
import os
import sys

import ddp_run
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, SAVE_EVERY, SHOW_EVERY, SHARDS = 200, 100, 20, 2


def main(folder):
    # What is kept: this rank's shard of each parameter, as plain tensors. FSDP's own are DTensors, which refer to process
    # groups, and so would an optimizer of them.
    shard = torch.nn.ParameterList()
    optimizer = None

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
            torch.save({"model": shard.state_dict(), "optimizer": optimizer.state_dict()}, f"{name}.new")
            os.replace(f"{name}.new", name)
            # All ranks may die before the other shards of this step are saved.
            for step in saved(number)[:-2]:
                os.remove(file(number, step))

    def load(number):
        """Reads the newest step of which all shards were saved, and returns it."""
        finished = max(set.intersection(*(set(saved(other)) for other in range(SHARDS))), default=0)
        if finished:
            state = torch.load(file(number, finished))
            shard.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        return finished

    def train(job):
        nonlocal optimizer
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        # The model and `shard` share their memory.
        parts = [param.detach().to_local() for param in model.parameters()]
        finished = 0
        if optimizer is None:  # a new process
            shard.extend(parts)
            optimizer = torch.optim.AdamW(shard.parameters(), lr=1e-2)
            finished = load(rank % SHARDS)
        else:
            for own, part in zip(shard, parts):
                # Of a rank whose shard is another one now, `restore` brings it.
                own.data = part.copy_(own.data) if own.shape == part.shape else part
        first = job.restore({"model": shard, "optimizer": optimizer}, mesh.get_group("replicate"), finished)
        print(f"pid {os.getpid()} trains from step {first}", flush=True)
        if first and first % SAVE_EVERY == 0:  # a rank may have died before it saved
            save(job)
        for step in range(first, STEPS):
            random = torch.Generator().manual_seed(step * ranks + rank)
            inputs = torch.randn(32, 16, generator=random)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin()[:, :2])
            model.zero_grad()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for own, param in zip(shard, model.parameters()):
                own.grad = None if param.grad is None else param.grad.to_local()
            job.step(optimizer.step)
            if job.finished % SHOW_EVERY == 0 and rank == 0:
                print(f"step {job.finished} loss {loss.item():.4f}", flush=True)
            if job.finished % SAVE_EVERY == 0:
                save(job)
        dist.barrier()

    ddp_run.live(train, save)
    dist.destroy_process_group()
    print(f"weights {sum(value.double().sum().item() for value in shard):.17g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
