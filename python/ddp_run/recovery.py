"""Training that outlives the death of another rank, or a change of nodes (`ddp_run.live`).

A survivor keeps its process, and so its memory. It leaves its process groups, *parks* at its launcher, gets its place in
the next generation, and calls the script's function again. New processes get their state from a rank that has it.

**Commit rule.** No rank updates its parameters in a step before all ranks have their gradients. So a rank that has not
updated them, though another has, can still do so, by itself; and where none has, all repeat the step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

import ddp_run


class StateLost(RuntimeError):
    """Ranks need state that no other rank has. All ranks raise it, so that the job restarts from its checkpoint."""


class _Version(NamedTuple):
    """A state, the same on all ranks that have it. Of two the greater one is the newer."""

    #: In which its last step was made; 0: none, it was loaded or is the first one.
    generation: int
    #: Number of finished steps.
    step: int


class _Report(NamedTuple):
    """What one rank has when a generation begins."""

    #: None: its last update did not end.
    version: _Version | None
    #: What it can get to without others, where it has passed the gradients of a step but not the update.
    unfinished: _Version | None
    #: Which part of the state that is, of how many; None: the one that this generation wants.
    part: tuple[int, int] | None
    #: The ranks that are to have the same part in this generation.
    peers: tuple[int, ...]

    def has(self, version: _Version, part: tuple[int, int]) -> bool:
        return version in (self.version, self.unfinished) and self.part in (None, part)


def _parts(reports: list[_Report]) -> list[tuple[int, ...]]:
    """The ranks that have each part of the state."""
    return sorted({report.peers for report in reports})


def _decide(reports: list[_Report]) -> tuple[_Version, dict[int, int]]:
    """With which state the ranks go on, and for each rank that lacks it, from which rank it gets it."""
    versions = [report.version for report in reports if report.version is not None]
    if not versions:
        raise StateLost("every rank was in the middle of an update when the last generation ended")
    # A rank that was cut off for long may be behind a checkpoint of the others.
    saved = max((version for version in versions if version.generation == 0), default=max(versions))
    newest = saved if saved.step > max(versions).step else max(versions)
    sources, parts = {}, _parts(reports)
    for number, peers in enumerate(parts):
        part = number, len(parts)
        holders = [rank for rank in peers if reports[rank].has(newest, part)]
        receivers = [rank for rank in peers if not reports[rank].has(newest, part)]
        if receivers and not holders:
            raise StateLost(f"none of ranks {list(peers)} has the state of step {newest.step}, which other ranks have")
        sources.update({rank: holders[place % len(holders)] for place, rank in enumerate(receivers)})
    return newest, sources


class LiveJob:
    """The job, as a function that `live` calls sees it."""

    def __init__(self) -> None:
        self._block: Any = None
        self._version: _Version | None = None
        self._part: tuple[int, int] | None = None
        self._unfinished: tuple[_Version, Callable[[], Any]] | None = None
        self._is_new = True

    @property
    def finished(self) -> int:
        """The number of finished steps."""
        return self._version.step if self._version is not None else 0

    def restore(
        self, state: Mapping[str, Any] | Callable[[int, list[int]], Any], group: Any = None, finished: int = 0
    ) -> int:
        """Makes the state of all ranks the newest one that any of them has; returns the number of finished steps.

        All ranks call it, once their process groups exist. A new process has made `finished` steps, those of the
        checkpoint that it has loaded. `state` maps names to objects with `state_dict` and `load_state_dict`. Ranks that
        lack the newest state get it from others of `group`, whose ranks have equal parts of it: none means all ranks.
        Models and optimizers in it lose their gradients.

        `state` may be a function instead, to move the state in another way. `state(source, receivers)` is called on
        both sides of each transfer, with numbers of ranks.

        Raises `StateLost` on all ranks if no rank of a group has the newest state.
        """
        if self._is_new:
            self._version, self._is_new = _Version(0, finished), False
        if not _has_peers():
            return self.finished
        self._block.start()
        dist = sys.modules["torch.distributed"]
        unfinished, update = self._unfinished or (None, None)
        own = _Report(self._version, unfinished, self._part, tuple(dist.get_process_group_ranks(group)))
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, own)
        version, sources = _decide(reports)
        rank = dist.get_rank()
        if update is not None and unfinished == version and rank not in sources:
            self._update(version, update)
        self._unfinished = None
        receivers = [receiver for receiver, source in sources.items() if source == rank]
        if rank in sources:
            self._version = None
            others = [other for other, source in sources.items() if source == sources[rank]]
            _transfer(state, sources[rank], others, rank, group)
        elif receivers:
            _transfer(state, rank, receivers, rank, group)
        if isinstance(state, Mapping):
            # The next backward pass would add to the gradients of a step that was broken off.
            for part in state.values():
                getattr(part, "zero_grad", lambda: None)()
        parts = _parts(reports)
        self._version, self._part = version, (parts.index(own.peers), len(parts))
        return version.step

    def step(self, update: Callable[[], Any], loss: float | None = None, waited_s: float | None = None) -> None:
        """Ends a step: calls `update` once all ranks have their gradients, and `boundary` of `stoppable`.

        `update` is `optimizer.step`, or a function that calls it and `scheduler.step`. It may be called when the process
        groups are gone: it uses no collective, and does not refer to them. What follows `step` in the script may be
        skipped.
        """
        next_version = _Version(ddp_run.generation(), self.finished + 1)
        if _has_peers():
            # What a device still computes may fail.
            _synchronize()
            ddp_run.check_generation()
            self._unfinished = (next_version, update)
            _meet()
            ddp_run.check_generation()
        self._update(next_version, update)
        self._block.boundary(self.finished, loss, waited_s)

    def _update(self, version: _Version, update: Callable[[], Any]) -> None:
        # As long as it lasts, the state is of no use.
        self._version, self._unfinished, self._is_new = None, None, False
        update()
        self._version = version


def live(
    train: Callable[[LiveJob], Any], save: Callable[[LiveJob], Any] | None = None, agree: Callable[[bool], bool] | None = None
) -> Any:
    """Calls `train(job)`, and again in each later generation for which this process is kept; returns what it returns.

        def train(job):
            dist.init_process_group("nccl")
            first = job.restore({"model": net, "optimizer": optimizer})
            model = DDP(net)
            for step in range(first, steps):
                compute_gradients(model, step)
                job.step(optimizer.step)

        ddp_run.live(train)

    When another rank or node fails, or nodes join or leave, `train` ends with an exception. If the launcher confirms
    within 5 s that this rank is not the cause, the process groups are destroyed and `train` is called again, in the
    same process. Any other exception leaves `live`, and the launcher restarts the process.

    What refers to a process group (a DDP or FSDP model, a mesh) must be local to `train`: a rank that keeps connections
    open holds up ranks that wait at their other ends. What is to be kept (parameters, optimizer) must not be.

    When the job is asked to stop, all ranks leave at the same step and call `save(job)`, as with `stoppable`. Then this
    process exits with 0. If nodes join or leave, it is kept instead.
    """
    if "DDP_CONTROL" in os.environ:
        # Otherwise PyTorch ends a process whose peer is lost.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        ddp_run._launcher.on_over = _abort
    job = LiveJob()
    while True:
        block = job._block = ddp_run._Block(lambda: save and save(job), agree, lives=True)
        try:
            with block:
                return train(job)
        except ddp_run.GenerationOver as over:
            if ddp_run._launcher.cause is not None:
                # Another thread may still be in `_abort`.
                ddp_run._launcher.over.wait(ddp_run.CONFIRM_TIMEOUT_S)
            _release(over)
            if not ddp_run._launcher.park():
                raise


def _release(over: BaseException) -> None:
    """Ends the process groups, and all that refers to them in the functions that this exception has left."""
    errors: list[BaseException | None] = [over]
    while errors:
        error = errors.pop()
        if error is not None and error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
            # A cleared frame keeps its function, and what that has captured: `torch.nn.Module` calls `forward` in one.
            error.__traceback__ = None
            errors += [error.__cause__, error.__context__]
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    with contextlib.suppress(Exception):  # what is broken may say so
        if dist.is_initialized():
            dist.destroy_process_group()
    _forget_meshes()
    gc.collect()
    names = [name.read_text() for name in pathlib.Path("/proc/self/task").glob("*/comm")]
    if any(name.startswith("pt_gloo_runloop") for name in names):
        print(
            f"ddp_run: rank {os.environ['RANK']} still refers to a process group of generation {ddp_run.generation()}\n"
            "  hint: models, meshes and groups must be local to the function that `ddp_run.live` calls, and the update that\n"
            "  `step` gets must not refer to them",
            file=sys.stderr,
            flush=True,
        )


def _forget_meshes() -> None:
    """Ends what PyTorch keeps of meshes: caches of DTensor's operations, and the process groups of each mesh. A mesh of the
    next generation equals one of the last.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    mesh_kind = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
    for part in gc.get_objects():
        if type(part) is functools._lru_cache_wrapper and (part.__module__ or "").startswith("torch.distributed."):
            part.cache_clear()
        elif type(part) is mesh_kind:
            getattr(part, "_pg_registry", {}).clear()
    # Of other versions of PyTorch, these may be missing.
    getattr(sys.modules.get("torch.distributed.tensor._redistribute"), "_planner_cache", {}).clear()
    getattr(sys.modules["torch"]._C, "_clear_DTensor_sharding_propagator_cache", gc.collect)()


def _abort() -> None:
    """Ends what this process waits for in NCCL; with gloo, the loss of a peer ends it."""
    dist = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):  # another version of PyTorch, or the groups are gone by now
        if dist.is_initialized() and "nccl" in dist.get_backend_config():
            dist.distributed_c10d._abort_process_group()


def _has_peers() -> bool:
    dist = sys.modules.get("torch.distributed")
    return "DDP_CONTROL" in os.environ and dist is not None and dist.is_available() and dist.is_initialized()


def _device(group: Any = None) -> Any:
    """Whose tensors the ranks of a group can exchange."""
    torch = sys.modules["torch"]
    kinds = dict(pair.split(":") for pair in torch.distributed.get_backend_config(group).split(","))
    kind = "cpu" if "cpu" in kinds else next(iter(kinds))
    return torch.device(kind) if kind == "cpu" else torch.device(kind, getattr(torch, kind).current_device())


def _synchronize() -> None:
    torch = sys.modules["torch"]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def _meet() -> None:
    """A barrier: `dist.barrier` has no device of its own choice, and NCCL's ends before the device has passed it."""
    torch = sys.modules["torch"]
    torch.distributed.all_reduce(torch.zeros(1, device=_device()))
    _synchronize()


def _transfer(state: Any, source: int, receivers: list[int], rank: int, group: Any) -> None:
    if callable(state):
        state(source, receivers)
    elif rank == source:
        for receiver in receivers:
            _send({name: part.state_dict() for name, part in state.items()}, receiver, group)
    else:
        received = _receive(source, group)
        for name, part in state.items():
            part.load_state_dict(received[name])


def _send(value: Any, receiver: int, group: Any) -> None:
    """Sends a value tensor by tensor; it is never in memory twice."""
    torch = sys.modules["torch"]
    tensors: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, torch.Tensor):
                return None
            if hasattr(part, "to_local"):
                raise TypeError("`restore` sends plain tensors: give it the local part (`to_local()`) of each DTensor")
            tensors.append(part.detach())
            return len(tensors) - 1

    text = io.BytesIO()
    Pickler(text).dump(value)
    device = _device(group)
    kinds = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    torch.distributed.send_object_list([text.getvalue(), kinds], dst=receiver, group=group, device=device)
    for tensor in tensors:
        torch.distributed.send(tensor.to(device).contiguous(), dst=receiver, group=group)


def _receive(source: int, group: Any) -> Any:
    torch = sys.modules["torch"]
    device, header = _device(group), [None, None]
    torch.distributed.recv_object_list(header, src=source, group=group, device=device)
    text, kinds = header
    tensors = []
    for shape, dtype, kind in kinds:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        torch.distributed.recv(tensor, src=source, group=group)
        # `load_state_dict` takes them to any other device.
        tensors.append(tensor.cpu() if kind == "cpu" else tensor)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Any:
            return tensors[number]

    return Unpickler(io.BytesIO(text)).load()
