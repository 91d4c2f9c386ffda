"""DistributedDataParallel whose ranks keep their processes when another one dies; see README.md."""
import os
import sys

import ddp_run
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, SAVE_EVERY, SHOW_EVERY = 400, 100, 20


def main(checkpoint):
    # What is kept: it refers to no process group.
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    finished = 0
    if os.path.exists(checkpoint):  # a new process
        state = torch.load(checkpoint)
        finished = state["finished"]
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save(job):
        if dist.get_rank() == 0:
            state = {"finished": job.finished, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)

    def train(job):
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        first = job.restore({"model": net, "optimizer": optimizer}, finished=finished)
        print(f"pid {os.getpid()} trains from step {first}", flush=True)
        if first and first % SAVE_EVERY == 0:  # a rank may have died before it saved
            save(job)
        # Without this, DDP adds gradients in another order in the first step after a start: other last bits.
        model = DDP(net, find_unused_parameters=True)
        for step in range(first, STEPS):
            # All that is random follows from the step, so that a step can be repeated.
            random = torch.Generator().manual_seed(step * ranks + rank)
            inputs = torch.randn(32, 16, generator=random)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            job.step(optimizer.step)
            if job.finished % SHOW_EVERY == 0 and rank == 0:
                print(f"step {job.finished} loss {loss.item():.4f}", flush=True)
            if job.finished % SAVE_EVERY == 0:
                save(job)
        dist.barrier()

    ddp_run.live(train, save)
    dist.destroy_process_group()
    print(f"weights {sum(value.double().sum().item() for value in net.parameters()):.17g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
