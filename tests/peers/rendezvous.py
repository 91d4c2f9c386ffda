"""How long N nodes take to meet in torchrun's rendezvous (c10d): clients as threads of one process.

Prints the seconds from the first node that joins to the last that has its rank; all are connected before. Ends with 1 if they have not
met after --patience seconds.
"""
import argparse
import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("nodes", type=int)
parser.add_argument("--patience", type=float, default=60)
args = parser.parse_args()

limit = timedelta(seconds=args.patience)
server = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)


def handler():
    store = dist.TCPStore("127.0.0.1", server.port, None, False, limit, wait_for_workers=False)
    timeouts = RendezvousTimeout(join=limit, last_call=timedelta(seconds=1))
    backend = C10dRendezvousBackend(store, "job")
    return DynamicRendezvousHandler.from_backend("job", store, backend, args.nodes, args.nodes, local_addr="127.0.0.1", timeout=timeouts)


handlers = [handler() for _ in range(args.nodes)]
gate = threading.Barrier(args.nodes + 1)
met, all_met = {}, threading.Event()


def join(node):
    gate.wait()
    info = handlers[node].next_rendezvous()
    met[node] = (time.perf_counter(), info.rank)
    if len(met) == args.nodes:
        all_met.set()


for node in range(args.nodes):
    threading.Thread(target=join, args=(node,), daemon=True).start()
gate.wait()
begun = time.perf_counter()
if not all_met.wait(args.patience):
    print(f"{len(met)} of {args.nodes} nodes have met after {args.patience:.0f} s", flush=True)
    os._exit(1)
assert sorted(rank for _, rank in met.values()) == list(range(args.nodes))
print(f"{max(at for at, _ in met.values()) - begun:.3f}", flush=True)
# Its threads for keep-alives do not end by themselves.
os._exit(0)
