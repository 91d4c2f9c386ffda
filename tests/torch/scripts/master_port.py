"""The port of the launcher: nobody else gets it, and TCPStore of rank 0 does."""
import errno
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
low, high = map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())
if low <= port <= high:
    raise SystemExit(f"port {port} is one that the kernel gives away ({low} to {high})")
if rank == 0:
    stranger = socket.socket()
    try:
        stranger.bind((host, port))
        raise SystemExit(f"port {port} was free for a stranger")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
store = TCPStore(host, port, world, is_master=rank == 0, timeout=timedelta(seconds=60), wait_for_workers=True)
store.set(f"rank {rank}", "here")
for other in range(world):
    store.wait([f"rank {other}"])
print(f"rank {rank} met {world} at the launcher's port", flush=True)
# Rank 0 keeps the store until all have read it.
if store.add("left", 1) == world:
    store.set("all left", "")
if rank == 0:
    store.wait(["all left"])
