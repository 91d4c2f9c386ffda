"""Says its place, and works with the others until the folder has a file `stop`. One rank fails once if there is `fail`."""
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

folder = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
with open(folder / f"place-{os.getpid()}", "w") as place:
    place.write(f"rank {dist.get_rank()} of {dist.get_world_size()}\n")
try:
    while True:
        stops = torch.tensor([float((folder / "stop").exists())])
        dist.all_reduce(stops)
        if stops.item() > 0:
            break
        if dist.get_rank() == 1 and (folder / "fail").exists():
            (folder / "fail").unlink()
            sys.exit(3)
        time.sleep(0.05)
finally:
    # Without this, a thread of PyTorch's may free a tensor while Python ends, and abort.
    dist.destroy_process_group()
