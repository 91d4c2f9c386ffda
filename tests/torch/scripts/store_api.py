"""Every operation of TCPStore's clients, each answered as PyTorch's own server answers it. `MODE` is how rank 0 comes to
the store: `client`, as all ranks do, or `master`, in which it would open one if it could."""
import os
from datetime import timedelta

import torch.distributed as dist

host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SOON, LONG = timedelta(milliseconds=300), timedelta(seconds=60)


def operations(store):
    """All answers, in words."""
    yield store.num_keys()
    store.set("a", "1")
    yield store.get("a")
    yield [store.add("n", 2), store.add("n", -5), store.get("n")]
    yield [store.check(["a", "n"]), store.check(["a", "missing"])]
    yield store.compare_set("missing", "x", "y")
    yield store.check(["missing"])
    yield [store.compare_set("c", "", "1"), store.compare_set("c", "2", "3"), store.compare_set("c", "1", "3")]
    yield [store.delete_key("c"), store.delete_key("c")]
    store.append("a", "2")
    store.append("new", "x")
    yield store.multi_get(["a", "new"])
    store.multi_set(["m1", "m2"], ["one", ""])
    yield store.multi_get(["m1", "m2"])
    for attempt in range(2):
        try:
            store.wait(["a", "never"], SOON)
        except dist.DistStoreError as error:
            yield f"{attempt}: {type(error).__name__}"
    # The connection is as good as before.
    yield store.get("a")
    store.set("big", "x" * (8 << 20))
    yield len(store.get("big"))
    yield store.delete_key("big")
    yield store.queue_len("q")
    try:
        store.queue_pop("q", False)
    except dist.QueueEmptyError as error:
        yield type(error).__name__
    store.queue_push("q", "first")
    store.queue_push("q", "second")
    yield [store.queue_len("q"), store.check(["q"]), store.queue_pop("q"), store.queue_pop("q", False)]
    yield sorted(store.list_keys())
    yield store.num_keys()
    clone = store.clone()
    clone.set("clone", "here")
    yield store.get("clone")
    if hasattr(store, "barrier"):
        store.barrier("alone", 1, LONG)
        try:
            store.barrier("of two", 2, SOON)
        except dist.DistStoreError as error:
            yield f"barrier: {type(error).__name__}"
        yield [store.get("alone"), store.get("of two")]
    inner = dist.PrefixStore("p", dist.PrefixStore("q", store))
    inner.set("k", "v")
    yield [inner.get("k"), store.check(["q/p/k"])]


if rank == 0:
    own = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=LONG, wait_for_workers=False)
    expected = list(operations(own))

connect = dict(timeout=LONG, wait_for_workers=False, use_libuv=os.environ.get("USE_LIBUV", "1") == "1")
store = dist.TCPStore(host, port, world, is_master=rank == 0 and os.environ["MODE"] == "master", **connect)
if rank == 0:
    found = list(operations(store))
    if found != expected:
        raise SystemExit(f"{found}\nis not\n{expected}")
    print(f"{len(found)} answers as PyTorch's own", flush=True)
    store.set("operations", "done")
store.wait(["operations"])
# Every other rank gets one value of a queue that it waits for.
if rank == 0:
    for other in range(1, world):
        store.queue_push("work", str(other))
else:
    store.set(f"got {store.queue_pop('work').decode()}", "")
store.wait([f"got {other}" for other in range(1, world)])
print(f"rank {rank} saw all values taken", flush=True)
