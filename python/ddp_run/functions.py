"""Functions as workers: how they get from the process that calls `elastic_launch` to processes of `ddp-run`.

Pickled, as `multiprocessing` does with `spawn`; or, with `fork`, as forks of the caller. `ddp-run` cannot fork another
process, so each of its workers is a small stand-in then: it gives its environment and its streams to a fork of the
caller, passes signals on, and ends as that one does.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, Callable

PACKAGE_PARENT = str(pathlib.Path(__file__).resolve().parents[1])
MAX_ENVIRONMENT_BYTES = 4 << 20
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def command(folder: pathlib.Path) -> list[str]:
    """The program of each worker."""
    code = f"import sys; sys.path.append({PACKAGE_PARENT!r}); from ddp_run.functions import main; main({str(folder)!r})"
    return [sys.executable, "-u", "-c", code]


@contextlib.contextmanager
def sent(folder: pathlib.Path, start_method: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
    """Makes the function available to workers in `folder`, which only this user can read."""
    if start_method == "fork":
        with _forking(folder, function, args):
            yield
        return
    from multiprocessing import spawn

    preparation = spawn.get_preparation_data("ddp_run")
    # It cannot be pickled, and the workers have no other use for it.
    preparation.pop("authkey", None)
    # Two parts: the second can be read only after the first has been carried out.
    (folder / "preparation").write_bytes(pickle.dumps(preparation))
    (folder / "function").write_bytes(pickle.dumps((function, args)))
    yield


def result(folder: pathlib.Path, rank: int) -> Any:
    """What the function returned on this rank in the last generation."""
    of_rank = sorted(folder.glob(f"result-*-{rank}"), key=lambda file: int(file.name.split("-")[1]))
    return pickle.loads(of_rank[-1].read_bytes()) if of_rank else None


def main(folder_name: str) -> None:
    """A worker of `ddp-run`."""
    folder = pathlib.Path(folder_name)
    if (folder / "fork").exists():
        _stand_in(folder)
        return
    from multiprocessing import spawn

    spawn.prepare(pickle.loads((folder / "preparation").read_bytes()))
    function, args = pickle.loads((folder / "function").read_bytes())
    _call(folder, function, args)


def _call(folder: pathlib.Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import ddp_run

    own = os.environ.get("DDP_LOCAL_RANK") or os.environ["LOCAL_RANK"]
    args = tuple(_substituted(arg, own) if isinstance(arg, str) else arg for arg in args)
    value = ddp_run.record(function)(*args)
    file = folder / f"result-{ddp_run.generation()}-{os.environ['RANK']}"
    file.with_suffix(".part").write_bytes(pickle.dumps(value))
    file.with_suffix(".part").replace(file)


def _substituted(text: str, local_rank: str) -> str:
    """As torchrun's macros: `$$` is a dollar sign, other names stay."""
    known = r"\$(?:(\$)|(?:local_rank(?![A-Za-z0-9_])|\{local_rank\}))"
    return re.sub(known, lambda match: match[1] or local_rank, text)


@contextlib.contextmanager
def _forking(folder: pathlib.Path, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
    """Forks a server, which forks a worker for each stand-in that connects."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "fork"))
        listener.listen(socket.SOMAXCONN)
        # The server ends when the other end is closed, also by the death of this process.
        alive, watched = os.pipe()[::-1]
        server = os.fork()
        if server == 0:
            os.close(alive)
            _exit_after(lambda: _serve(listener, watched, folder, function, args))
        os.close(watched)
        listener.close()
        try:
            yield
        finally:
            os.close(alive)
            os.waitpid(server, 0)


def _serve(listener: socket.socket, watched: int, folder: pathlib.Path, function: Any, args: tuple[Any, ...]) -> None:
    # A signal for the caller's process group is for the caller, and for `ddp-run`, which passes it on.
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while watched not in (ready := select.select([listener, watched], [], [])[0]):
        if ready:
            connection = listener.accept()[0]
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                _exit_after(lambda: _keep(connection, folder, function, args))
            connection.close()


def _keep(connection: socket.socket, folder: pathlib.Path, function: Any, args: tuple[Any, ...]) -> None:
    """Forks the worker, passes on what the stand-in says, and reports the end. The worker does not outlive its stand-in."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3, socket.MSG_WAITALL)
    size = int.from_bytes(head, "big")
    if len(head) < 8 or len(streams) < 3 or size > MAX_ENVIRONMENT_BYTES:
        return
    text = b""
    while len(text) < size and (part := connection.recv(size - len(text))):
        text += part
    worker = os.fork()
    if worker == 0:
        connection.close()
        _exit_after(lambda: _become(json.loads(text), streams, folder, function, args))
    process = os.pidfd_open(worker)
    try:
        while process not in (ready := select.select([connection, process], [], [])[0]):
            number = connection.recv(1) if ready else b""
            if not number:
                os.kill(worker, signal.SIGKILL)
                return
            os.kill(worker, number[0])
    finally:
        # What it has started is no descendant of the launcher, which could not find it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(4, "big"))


def _become(env: dict[str, str], streams: list[int], folder: pathlib.Path, function: Any, args: tuple[Any, ...]) -> None:
    import ddp_run

    # Signals of a terminal are for the caller; and all that this worker starts can be found.
    os.setsid()
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(int(env["DDP_STAND_IN"])))
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # The caller's may be those of a notebook.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    ddp_run._forget_in_child()
    _call(folder, function, args)


def _exit_after(work: Callable[[], None]) -> None:
    """Ends this fork without the exit handlers of the process that it was forked from."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException as error:
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(BaseException):
            from multiprocessing import util

            util._exit_function()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _relay(path: pathlib.Path, control: str) -> None:
    """The launcher takes control connections from descendants of its workers only, which the fork is not."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            worker, launcher = listener.accept()[0], socket.socket(socket.AF_UNIX)
            launcher.connect(control.replace("@", "\0", 1))
            for source, target in ((worker, launcher), (launcher, worker)):
                threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def _stand_in(folder: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / "fork"))
        relay = folder / f"control-{os.getpid()}"
        threading.Thread(target=_relay, args=(relay, os.environ["DDP_CONTROL"]), daemon=True).start()
        place = {"DDP_CONTROL": str(relay), "DDP_STAND_IN": str(os.getpid())}
        text = json.dumps({**os.environ, **place}).encode()
        for number in FORWARDED:
            signal.signal(number, lambda received, _frame: connection.sendall(bytes([received])))
        socket.send_fds(connection, [len(text).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(text)
        status = connection.recv(4, socket.MSG_WAITALL)
    if len(status) < 4:
        sys.stderr.write("error: the process that called `elastic_launch` is gone\n")
        sys.exit(1)
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)
