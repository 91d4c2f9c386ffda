"""DistributedDataParallel as its manual has it. The calls of `ddp_run` do nothing under torchrun."""
import atexit
import os
import sys

import ddp_run
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 10


def main(checkpoint):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(dist.destroy_process_group)  # also where `boundary` ends the script
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    inputs = torch.randn(2048, 16)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if os.path.exists(checkpoint):  # after a restart
        state = torch.load(checkpoint, map_location=device)
        first = state["epoch"] + 1
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if first >= EPOCHS and dist.get_rank() == 0:
        print(f"`{checkpoint}` is of a finished run: delete it to train again", flush=True)
    ddp = DDP(model)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    steps = first * len(loader)  # that are finished

    def save():
        if dist.get_rank() == 0:
            state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)

    with ddp_run.stoppable(save) as boundary:
        for epoch in range(first, EPOCHS):
            sampler.set_epoch(epoch)
            total = torch.zeros(1, device=device)
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(ddp(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach()
                steps += 1
                ddp_run.heartbeat(steps)
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {total.item() / (len(data) // 32):.4f}", flush=True)
            boundary(steps)  # after a request to stop it calls `save`, and exits
            save()


if __name__ == "__main__":
    main(sys.argv[1])
