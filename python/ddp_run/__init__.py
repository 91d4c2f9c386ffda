"""What a training script tells `ddp-run`, and learns from it. It needs nothing but Python.

    import ddp_run

    with ddp_run.stoppable(save) as boundary:
        for step in range(first, steps):
            train(step)
            boundary(step + 1)  # finished steps; sends a heartbeat; after a stop request all ranks save here and exit

Under another launcher, or without one, every call does nothing. No call waits longer than a few seconds for the
launcher, and none raises because the launcher is gone. All functions are thread-safe and work in forked children.

`proto/src/control.rs` in the repository of ddp-run documents the messages.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import itertools
import json
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from .launch import Failure, LaunchConfig, LaunchFailed, elastic_launch

__all__ = ["GenerationOver", "LiveJob", "StateLost", "check_generation", "generation", "heartbeat", "live", "record", "sizes"]
__all__ += ["stop_requested", "stoppable"]
# For programs that start jobs; training scripts do not import them.
_OF_LAUNCH = ("Failure", "LaunchConfig", "LaunchFailed", "elastic_launch")
__all__ += _OF_LAUNCH

PHASES = ("starting", "training", "validating", "saving", "finishing")
# Longest time to connect or to write one message. A launcher that reads nothing for so long counts as gone.
SEND_TIMEOUT_S = 5
# Longest time until the launcher knows that this script listens.
ANSWER_TIMEOUT_S = 5.0
# The signals that stop `ddp-run` unless `--signals-to-handle` says otherwise; it sends the same one to its workers.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# How long a failed rank waits to learn whose failure caused its own; one that may go on waits longer.
CAUSE_TIMEOUT_S, CONFIRM_TIMEOUT_S = 1.0, 5.0
# Longest wait for the next generation. The launcher ends processes for which there is none.
PARK_TIMEOUT_S = 24 * 3600.0
# How often a rank looks for a request that another rank got, and for the answers of all ranks to it.
LOOK_INTERVAL_S, ANSWER_INTERVAL_S = 1.0, 0.1
# Longest time to connect to PyTorch's store, to learn where all ranks stop, and until all others know it.
STORE_TIMEOUT_S, AGREEMENT_TIMEOUT_S, LEAVE_TIMEOUT_S = 30, 20.0, 5.0
# The protocol's longest line.
MAX_LINE_BYTES = 1 << 20
# Longest description of the threads of this process.
MAX_STATE_CHARS = 64 << 10
MAX_COLLECTIVES = 256


class GenerationOver(Exception):
    """The launcher stops all ranks, and may restart them: another rank or node failed, or nodes join or leave.

    A script that does not catch it prints one line instead of a traceback, and exits with 1.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        #: In words: "rank 5 (node `b`) died of SIGKILL".
        self.cause = cause
        if getattr(sys.excepthook, "func", None) is not _shorten:
            sys.excepthook = functools.partial(_shorten, sys.excepthook)


def _shorten(report: Any, kind: Any, error: BaseException, trace: Any) -> None:
    """Reports an uncaught `GenerationOver` in one line: this rank did nothing wrong. `report` is the hook before."""
    if isinstance(error, GenerationOver):
        if error.__cause__ is not None:
            here = traceback.format_exception_only(type(error.__cause__), error.__cause__)[0].split("\n")[0]
            error.args = (f"{error.cause} (here: {here})",)
        error.__cause__, error.__suppress_context__, trace = None, True, None
        error.with_traceback(None)
    report(kind, error, trace)


def __getattr__(name: str) -> Any:
    if name in _OF_LAUNCH:
        from . import launch

        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def record(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the main function of a worker: its exception gets into the failure report, as with torchrun's `record`.

    `sys.exit(0)` in it returns None. A `GenerationOver` is another rank's failure, and is not recorded.
    """

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # no descriptor for standard error
            faulthandler.enable(all_threads=True)
        try:
            return function(*args, **kwargs)
        except SystemExit as end:
            if end.code == 0:
                return None
            raise
        except GenerationOver:
            raise
        except Exception as error:
            extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
            text = json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})
            if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
                with contextlib.suppress(OSError), open(file, "w") as target:
                    target.write(text)
            raise

    return recorded


def generation() -> int:
    """The number of times that the job's ranks were started so far: 1 at first, and outside of `ddp-run`."""
    return int(os.environ.get("DDP_GENERATION") or 1)


def heartbeat(step: int, phase: str = "training", loss: float | None = None, waited_s: float | None = None) -> None:
    """Reports progress, for `--hang-timeout`, failure reports and the status page. Call it once per step.

    `step` is the number of finished steps, `phase` one of `PHASES`. Report steps only if ranks train in lock-step, with
    a collective in each: a new step tells the rendezvous that all nodes are alive. `loss` is that of the last step;
    rank 0's is shown. `waited_s` is how long the last step waited for other ranks: the rank that waits least is slow.
    """
    if phase not in PHASES or step < 0:
        raise ValueError(f"step {step} in phase `{phase}`: steps count from 0, phases are {', '.join(PHASES)}")
    # JSON has no NaN and no infinity.
    known = {"loss": float(loss)} if loss is not None and math.isfinite(loss) else {}
    if waited_s is not None and math.isfinite(waited_s):
        _launcher.waited_s += waited_s
        known["waited_s"] = _launcher.waited_s
    _launcher.say(type="heartbeat", step=int(step), phase=phase, **known)


def sizes(ranks_divide: int | None = None, ranks_multiple_of: int | None = None) -> None:
    """Reports with how many ranks this job can continue when nodes join or leave (`--nnodes MIN:MAX`).

    The number of ranks must divide the first argument, and be a multiple of the second. One rank calls it, once per
    generation. Without it any number of ranks is accepted.
    """
    bounds = {"ranks_divide": ranks_divide, "ranks_multiple_of": ranks_multiple_of}
    given = {name: int(bound) for name, bound in bounds.items() if bound is not None}
    if any(bound < 1 for bound in given.values()):
        raise ValueError(f"numbers of ranks are at least 1: {given}")
    _launcher.say(type="sizes", **given)


def stop_requested() -> bool:
    """Whether `ddp-run` asked this rank to stop: it received a signal, on any node, or nodes join or leave.

    Ranks may see the request one step apart; `stoppable` makes them agree. The first call tells the launcher that this
    script handles requests: from then on a rank has `--shutdown-timeout` to save and to exit with 0, and gets a signal
    5 s before its end. A script that calls neither this nor `stoppable` receives the signal at once.
    """
    _launcher.listen()
    return _launcher.asked_to_stop.is_set()


def check_generation() -> None:
    """Raises `GenerationOver` if the generation is over."""
    _launcher.listen()
    if _launcher.cause is not None:
        raise GenerationOver(_launcher.cause)


@contextlib.contextmanager
def stoppable(save: Callable[[], Any], agree: Callable[[bool], bool] | None = None) -> Iterator[Callable[..., None]]:
    """Saves and exits with 0 at a step boundary when the job is asked to stop.

    Yields `boundary(step, loss=None, waited_s=None)`, which every rank calls once per step, with the number of finished
    steps. It sends a heartbeat. If the ranks were asked to stop, all of them leave the block at the same boundary, call
    `save` and exit. They have `--shutdown-timeout` for that; while they save, the signals that stop a job are ignored. A
    failure that another rank or node caused is raised as `GenerationOver`.

    A block that ends normally closes the connection to the launcher. The script is then neither watched for
    `--hang-timeout` nor asked to stop, and gets signals at once, until it calls a function of this package again.

    If `torch.distributed` is initialised, the ranks agree through its store, without a collective. Each must call
    `boundary` equally often. `agree(asked)` replaces that: it gets whether this rank was asked, and returns whether any
    rank was. Without both each rank decides alone, and ranks may leave at different steps.
    """
    with _Block(save, agree) as block:
        block.start()
        yield block.boundary


class _Block(contextlib.AbstractContextManager):
    """The block of `stoppable`; of `live`, if it `lives`: another generation may follow in this process."""

    def __init__(self, save: Callable[[], Any], agree: Callable[[bool], bool] | None, lives: bool = False) -> None:
        self._save, self._lives, self._done = save, lives, 0
        # A process that is kept has had more blocks than a new one.
        self._agreement = _Agreement("live" if lives else next(_blocks), _launcher.asked_to_stop)
        self._agree = agree

    def start(self) -> None:
        """Called as soon as possible: another rank may be asked before this one gets to its first boundary."""
        if self._agree is None:
            self._agreement.start()

    def boundary(self, step: int, loss: float | None = None, waited_s: float | None = None) -> None:
        self._done = step
        heartbeat(step, loss=loss, waited_s=waited_s)
        check_generation()
        if (self._agree or self._agreement.stops_here)(stop_requested()):
            raise _Stop

    def __enter__(self) -> _Block:
        self._agreement.__enter__()
        _launcher.listen()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._agreement.__exit__(kind, error, trace)
        if kind is None:
            _launcher.hang_up()
        elif kind is _Stop:
            heartbeat(self._done, "saving")
            with _signals_ignored():
                self._save()
            # Another rank may have been asked first.
            if self._lives and _launcher.asked_to_stop.wait(CONFIRM_TIMEOUT_S) and _launcher.may_stay:
                raise GenerationOver("nodes join or leave") from None
            raise SystemExit(0) from None
        elif isinstance(error, (RuntimeError, OSError)) and not isinstance(error, StateLost):
            # What collectives raise when a peer is gone.
            if _launcher.over.wait(CONFIRM_TIMEOUT_S if self._lives else CAUSE_TIMEOUT_S) and _launcher.cause is not None:
                raise GenerationOver(_launcher.cause) from error
            if _launcher.asked_to_stop.is_set():
                raise GenerationOver("the job was asked to stop, and ranks of it are gone") from error
        elif self._lives and isinstance(error, ValueError) and _launcher.cause is not None:
            # What they raise where the process groups are gone already.
            raise GenerationOver(_launcher.cause) from error


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignores the signals that stop a job: the launcher sends one 5 s before the end of the time.
    Only the main thread may change handlers; in another one the signals keep theirs.
    """
    numbers = STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that Python did not install.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Stop(BaseException):
    """Leaves the block of `stoppable`, past every `except Exception` of the script."""


class _Agreement(contextlib.AbstractContextManager):
    """The boundary at which all ranks leave a block, found through PyTorch's store and without a collective.

    A rank that knows of a request publishes the first boundary that it has not passed, and waits there. All ranks leave
    at the highest of these. No rank has passed it, and none leaves before, so none waits in a collective for one that has
    left. Only the thread uses the store: the rank itself may be in a collective that waits for a rank that waits here.
    """

    def __init__(self, block: int | str, asked: threading.Event) -> None:
        self._prefix, self._asked, self._lock = f"ddp_run/stop/{generation()}/{block}/", asked, threading.Lock()
        self._passed, self._limit, self._last = 0, 0, 0  # numbers of boundaries; 0: not known yet
        self._wake, self._left, self._known = threading.Event(), threading.Event(), threading.Event()
        self._has_failed, self._error, self._thread = False, None, None
        # Ranks whose word is awaited; None: the store has not answered.
        self._awaited: list[int] | None = None

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        ends_well = kind in (None, _Stop) or (kind is SystemExit and error.code in (None, 0))
        self._has_failed = not ends_well
        self._left.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * LEAVE_TIMEOUT_S)

    def start(self) -> bool:
        dist = sys.modules.get("torch.distributed")
        if "DDP_CONTROL" not in os.environ or dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return False
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._thread = threading.Thread(target=self._run, args=(store, dist.TCPStore), name="ddp_run stop", daemon=True)
        self._thread.start()
        return True

    def stops_here(self, asked: bool) -> bool:
        """Whether all ranks leave at this boundary."""
        if self._thread is None and not self.start():
            return asked
        with self._lock:
            here = self._passed + 1
            self._limit = self._limit or (here if asked else 0)
            if not self._limit:
                self._passed = here
                return False
        self._wake.set()
        deadline = time.monotonic() + AGREEMENT_TIMEOUT_S
        while not self._known.wait(ANSWER_INTERVAL_S):
            check_generation()
            if time.monotonic() > deadline:
                waited = f"waited {AGREEMENT_TIMEOUT_S:.0f} s for "
                if self._awaited is None:
                    raise RuntimeError(waited + "an answer of PyTorch's store")
                raise RuntimeError(waited + f"ranks {self._awaited[:16]} to say at which step they can stop")
        if self._error is not None:
            raise self._error
        self._passed = here
        return 0 < self._last <= here

    def _run(self, store: Any, tcp_store: Any) -> None:
        try:
            if isinstance(store, tcp_store):
                # A client of its own: one that waits for a key serves no other thread.
                timeout = datetime.timedelta(seconds=STORE_TIMEOUT_S)
                store = tcp_store(store.host, store.port, is_master=False, timeout=timeout, wait_for_workers=False)
            self._store = store
            self._agree()
        except Exception as error:  # the rank that hosts the store is gone
            self._error = error
        self._known.set()

    def _agree(self) -> None:
        store, (asked, last, done) = self._store, (self._prefix + name for name in ("asked", "last", "done"))
        while not (self._left.is_set() or self._limit or self._asked.is_set() or store.check([asked])):
            self._wake.wait(LOOK_INTERVAL_S)
        if self._has_failed:
            return
        with self._lock:
            limit = self._limit = self._limit or self._passed + 1
        if not self._left.is_set():
            store.set(asked, "1")
        # No rank gets to the boundary that a rank names after its last one.
        limits = {rank: f"{self._prefix}limit/{rank}" for rank in range(self._ranks)}
        store.set(limits[self._rank], str(limit))
        if self._rank == 0:
            if self._is_there(limits):
                limit = max(int(store.get(key)) for key in limits.values())
            elif self._has_failed:
                return
            store.set(last, str(limit))
        if self._is_there({0: last}):
            self._last = int(store.get(last))
            self._known.set()
        store.add(done, 1)
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        # The store may end with rank 0.
        while self._rank == 0 and not self._has_failed and store.check([asked]) and store.add(done, 0) < self._ranks:
            if time.monotonic() > deadline:
                break
            time.sleep(ANSWER_INTERVAL_S)

    def _is_there(self, keys: dict[int, str]) -> bool:
        """Waits for all of these keys, by the rank that writes them; false if this rank has left the block before."""
        while True:
            keys = {rank: key for rank, key in keys.items() if not self._store.check([key])}
            self._awaited = list(keys)
            if not keys:
                return True
            if self._left.wait(ANSWER_INTERVAL_S):
                return False


_blocks = itertools.count()


class _Launcher:
    """The connection to the launcher. A call opens it if it is not open; once lost, it stays closed."""

    def __init__(self) -> None:
        self.asked_to_stop = threading.Event()
        # It was, for nodes that join or leave: this process may take part in the next generation.
        self.may_stay = False
        # Set as soon as `cause` is known, or never will be.
        self.over = threading.Event()
        self.cause: str | None = None
        # Called before `over` is set; another thread may wait for a collective that never ends by itself.
        self.on_over: Callable[[], None] | None = None
        # The launcher has answered to the last `hello`, or never will.
        self._answered = threading.Event()
        # Reentrant: a signal handler may interrupt a call of its own thread.
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._listens = False
        self._parks = False
        self._is_lost = False
        self.waited_s = 0.0
        if "DDP_CONTROL" not in os.environ:
            self._lose()

    def say(self, **message: Any) -> None:
        with self._lock:
            if self._socket is None:
                self._open(listens=False)
            if self._socket is not None and not self._is_lost:
                try:
                    self._socket.sendall(_line(message))
                except OSError:
                    self._lose()

    def listen(self) -> None:
        """Tells the launcher that this script handles its requests, and waits until it knows: it signals others at once."""
        with self._lock:
            if not self._listens:
                self._open(listens=True)
        self._answered.wait(ANSWER_TIMEOUT_S)

    def hang_up(self) -> None:
        """Closes the connection; the next call opens another one."""
        with self._lock:
            last, self._socket, self._listens = self._socket, None, False
        if last is not None:
            _hang_up(last)

    def park(self) -> bool:
        """Waits for this process' place in the next generation, which `os.environ` has then; false if none follows."""
        if self._is_lost or (self.asked_to_stop.is_set() and not self.may_stay):
            return False
        with self._lock:
            self._parks = True
            self._open(listens=True)
        self._answered.wait(PARK_TIMEOUT_S)
        return not self._is_lost and not self._parks

    def _take(self, assignment: dict[str, str]) -> None:
        """The next generation begins in this process."""
        # With `--virtual-local-rank`, the local rank of this process is another one.
        os.environ.update((name, value) for name, value in assignment.items() if name != "LOCAL_RANK")
        self._parks, self.cause, self.may_stay, self.waited_s = False, None, False, 0.0
        self.asked_to_stop.clear()
        self.over.clear()

    def _open(self, listens: bool) -> None:
        if self._is_lost:
            return
        local_rank = int(os.environ.get("DDP_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or 0)
        place = {"local_rank": local_rank, "generation": generation(), "pid": int(os.environ.get("DDP_STAND_IN") or os.getpid())}
        # The first line says once whether this script listens, so listening needs a new connection.
        self._listens, last, self._socket = listens, self._socket, None
        self._answered.clear()
        try:
            self._socket = opened = socket.socket(socket.AF_UNIX)
            # Limits connecting and writing only: the reader waits for as long as it takes.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
            opened.connect(os.environ["DDP_CONTROL"].replace("@", "\0", 1))
            outlives = {"outlives": True} if self._parks else {}
            opened.sendall(_line({"type": "hello", "protocol": 1, "listens": listens, **outlives, **place}))
            threading.Thread(target=self._read, args=(opened,), name="ddp_run", daemon=True).start()
        except (OSError, RuntimeError):  # the second: no thread can be started any more
            self._lose()
        if last is not None:
            _hang_up(last)

    def _lose(self) -> None:
        self._is_lost = True
        self._answered.set()
        self.over.set()
        if self._socket is not None:
            _hang_up(self._socket)

    def _read(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                while (line := lines.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                    message = json.loads(line)
                    with self._lock:
                        # A process that parks leaves an earlier generation's connection.
                        is_current = connection is self._socket
                    if is_current:
                        self._receive(message)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        with self._lock:
            if connection is self._socket:
                self._lose()

    def _receive(self, message: Any) -> None:
        kind = message.get("type") if isinstance(message, dict) else None
        if kind == "assignment":
            if self._parks:
                self._take(message["env"])
            self._answered.set()
        elif kind == "stop_at_step_boundary":
            self.may_stay = message.get("stay") is True
            self.asked_to_stop.set()
        elif kind == "generation_over" and message.get("generation", 0) >= generation():
            self.cause = str(message.get("cause"))
            if self.on_over is not None:
                self.on_over()
            self.over.set()
        elif kind == "describe":
            text = _threads()[:MAX_STATE_CHARS]
            self.say(type="state", text=text)
            # PyTorch may hang too where it asks a device.
            self.say(type="state", text=text, collectives=_collectives())


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _threads() -> str:
    """The stack of each thread of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = threading.main_thread().ident
    text: list[str] = []
    for thread in sorted(frames, key=lambda ident: ident != main):
        if thread != threading.get_ident():
            stack = traceback.extract_stack(frames[thread])
            text.append(f"thread {names.get(thread, thread)}")
            text += [f"  {frame.name} at {frame.filename}:{frame.lineno}: {frame.line}" for frame in reversed(stack)]
    return "\n".join(text) + "\n"


def _collectives() -> list[dict[str, Any]]:
    """The last collectives of this process, oldest first, as far as PyTorch's flight recorder has them."""
    c10d, told = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None), []
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):  # another version of PyTorch
            for entry in json.loads(getattr(c10d, dump)(True, False)).get("entries", ()):
                name, description = entry["process_group"]
                given = [f" {kind}{size}" for kind, size in zip(entry["input_dtypes"], entry["input_sizes"])]
                operation = entry["profiling_name"].rpartition(":")[2] + (" of" if given else "") + ",".join(given[:4])
                done = entry["retired"] or entry["state"] == "completed"
                place = {"group": f"{description}:{name}"[:256], "number": entry["collective_seq_id"], "done": done}
                if not entry["is_p2p"]:
                    told.append({**place, "operation": operation[:256]})
    return told[-MAX_COLLECTIVES:]


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Wakes the reader; closing alone does not.
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


_launcher = _Launcher()


def _forget_in_child() -> None:
    """A forked child has no reader, and must not write between its parent's lines."""
    global _launcher
    inherited, _launcher = _launcher._socket, _Launcher()
    if inherited is not None and (descriptor := inherited.detach()) >= 0:
        os.close(descriptor)


os.register_at_fork(after_in_child=_forget_in_child)

from .recovery import LiveJob, StateLost, live  # noqa: E402  (it uses what is above)
