"""Rank 0 ends at once; the others go on with the store. All of them are clients."""
import os
import time
from datetime import timedelta

from torch.distributed import TCPStore

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(*address, world, is_master=False, timeout=timedelta(seconds=60))
store.set(f"rank {rank}", str(os.getpid()))
if rank == 0:
    os._exit(0)
if rank == 1:
    # All nodes of the test are this machine.
    pid = int(store.get("rank 0"))
    while os.path.exists(f"/proc/{pid}/cwd"):
        time.sleep(0.1)
    store.set("rank 0 is gone", "")
store.wait(["rank 0 is gone"])
for turn in range(20):
    store.add("turns", 1)
while int(store.add("turns", 0)) < 20 * (world - 1):
    time.sleep(0.05)
print(f"rank {rank} went on without rank 0", flush=True)
