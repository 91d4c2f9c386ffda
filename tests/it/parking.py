"""A worker of which one rank kills itself in each generation but the last. The others outlive it, but for rank 2."""

import json
import os
import signal
import socket
import sys

LAST, VICTIM = map(int, sys.argv[1:])
outlives = False
while True:
    with socket.socket(socket.AF_UNIX) as control:
        control.connect("\0" + os.environ["DDP_CONTROL"][1:])
        lines, pending = control.makefile(), []

        def send(**message):
            control.sendall(json.dumps(message).encode() + b"\n")

        def receive(*kinds):
            while not any(message["type"] in kinds for message in pending):
                pending.append(json.loads(next(lines)))
            return next(message for message in pending if message["type"] in kinds)

        def meet(name):
            """Waits until all ranks of this generation have written; the store has nothing of the one before."""
            send(type="kv_put", call=1, key=f"{name}/{rank}", value=f"{generation:04}")
            send(type="kv_gather", call=2, prefix=f"{name}/", count=int(os.environ["WORLD_SIZE"]), timeout_ms=600000)
            entries = receive("kv_entries")
            pending.remove(entries)
            assert set(entries["entries"].values()) == {f"{generation:04}"}, entries

        place = {"local_rank": int(os.environ["LOCAL_RANK"]), "generation": int(os.environ["DDP_GENERATION"])}
        send(type="hello", protocol=1, pid=os.getpid(), listens=True, outlives=outlives, **place)
        os.environ.update(receive("assignment")["env"])
        generation, rank = int(os.environ["DDP_GENERATION"]), int(os.environ["RANK"])
        meet("here")
        print(f"rank {rank} of generation {generation} has pid {os.getpid()}", flush=True)
        if generation == LAST:
            break
        if rank == VICTIM:
            # The others must have read the store before it ends with the generation.
            meet("read")
            os.kill(os.getpid(), signal.SIGKILL)
        send(type="kv_put", call=3, key=f"read/{rank}", value=f"{generation:04}")
        over = receive("generation_over", "stop_at_step_boundary")
        if over["type"] == "stop_at_step_boundary" and not over.get("stay"):
            break
        if rank == 2:
            sys.exit(1)
        outlives = True
        print(f"rank {rank} parks", flush=True)
