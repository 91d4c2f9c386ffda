"""A script whose entry point is decorated with `record`: what it raises is written to the launcher's error file."""
import os

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("shard 7 of the data is missing")
    # The launcher ends the wait for a peer that is gone.
    dist.barrier()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
