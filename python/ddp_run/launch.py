"""`elastic_launch` with torchrun's configuration: starts `ddp-run` for a command or a function, and returns results."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, Callable

from . import functions
from .__main__ import find, missing

BACKENDS = ("c10d", "static", "grpc", "ddp")
# LaunchConfig of torchrun always has a timeout; this is its default.
TORCHRUN_TIMEOUT_S = 900
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclasses.dataclass
class LaunchConfig:
    """The fields of torchrun's `LaunchConfig`, with the same defaults but for `rdzv_backend`."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "c10d"
    rdzv_configs: dict[str, Any] = dataclasses.field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = dataclasses.field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout


@dataclasses.dataclass
class Failure:
    """The first failure of this node's workers; `rank` and `local_rank` are -1 if it was another node's."""

    rank: int
    local_rank: int
    pid: int
    #: Negative: the number of the signal.
    exit_code: int
    #: What `record` wrote, as JSON.
    error_file: str


class LaunchFailed(Exception):
    """A worker failed, or `ddp-run` could not start the job."""

    def __init__(self, report: str, exit_code: int, failure: Failure | None = None) -> None:
        super().__init__(report)
        #: Of `ddp-run`.
        self.exit_code = exit_code
        #: None if no worker failed.
        self.failure = failure


class elastic_launch:  # noqa: N801, the name in PyTorch
    """`elastic_launch(config, entrypoint)(*args)` starts the job's workers of this node and waits for the job.

    `entrypoint` is a function or a program, and `config` a `LaunchConfig`, of this package or of PyTorch. Returns the
    workers' results by global rank. With `start_method="fork"` workers are forks of this process; otherwise the function
    and its arguments are pickled, as with `multiprocessing`.
    """

    def __init__(self, config: Any, entrypoint: Callable[..., Any] | str | None, health_check_server: Any = None) -> None:
        if entrypoint is None:
            raise ValueError("an entrypoint is needed: a function or a program")
        if health_check_server is not None:
            raise _refused("health_check_server", "set TORCHELASTIC_HEALTH_CHECK_PORT")
        self._config, self._entrypoint = config, entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        program = find()
        if program is None:
            raise FileNotFoundError(missing())
        folder = pathlib.Path(tempfile.mkdtemp(prefix="ddp_run-"))
        try:
            results = self._launch(program, folder, args)
        except BaseException:
            # The exception may name a file in it.
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)
        return results

    def _launch(self, program: str, folder: pathlib.Path, args: tuple[Any, ...]) -> dict[int, Any]:
        env = _environment()
        env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
        words = [program, *flags(self._config)]
        words += ["--event-log-handler", str(folder / "events")]
        with contextlib.ExitStack() as resources:
            if isinstance(self._entrypoint, str):
                words += _target(self._entrypoint, [str(arg) for arg in args], env)
            else:
                resources.enter_context(functions.sent(folder, self._config.start_method, self._entrypoint, args))
                words += ["--no-python", "--", *functions.command(folder)]
            exit_code, stopped_by = _run(words, env, self._config.signals_to_handle)
        ranks, failure, report = _outcome(folder, exit_code)
        if exit_code == 0:
            return {rank: functions.result(folder, rank) for rank in ranks}
        raise self._error(report or f"`ddp-run` ended with exit code {exit_code}", exit_code, failure, stopped_by)

    def _error(self, report: str, exit_code: int, failure: Failure | None, stopped_by: int | None) -> BaseException:
        if stopped_by == signal.SIGINT:
            return KeyboardInterrupt()
        return LaunchFailed(report, exit_code, failure)


def flags(config: Any) -> list[str]:
    """The command line of `ddp-run` that means what `config` does."""
    conf = dict(config.rdzv_configs)
    rank = conf.pop("rank", None)
    if int(conf.get("timeout", TORCHRUN_TIMEOUT_S)) == TORCHRUN_TIMEOUT_S:
        conf.pop("timeout", None)
    if config.rdzv_backend not in BACKENDS:
        raise _refused("rdzv_backend", f"use one of {', '.join(BACKENDS)}", config.rdzv_backend)
    if config.metrics_cfg:
        raise _refused("metrics_cfg", "`ddp-rendezvous` has `/metrics`", config.metrics_cfg)
    if config.event_log_handler != "null":
        raise _refused("event_log_handler", "use `null`: results come with the events", config.event_log_handler)
    values: dict[str, Any] = {
        "nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "nproc-per-node": config.nproc_per_node,
        "max-restarts": config.max_restarts,
        "rdzv-id": config.run_id,
        "role": config.role,
        "signals-to-handle": config.signals_to_handle,
        "shutdown-timeout": config.shutdown_timeout,
        "log-line-prefix-template": config.log_line_prefix_template,
        "local-addr": config.local_addr,
        "rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items()),
        "duplicate-stdout-filters": _words(config.duplicate_stdout_filters),
        "duplicate-stderr-filters": _words(config.duplicate_stderr_filters),
        "numa-binding": config.numa_options and config.numa_options.affinity_mode.value,
        **_place(config, rank),
        **_logs(config.logs_specs),
    }
    given = [word for name, value in values.items() if value not in (None, "") for word in (f"--{name}", str(value))]
    return given + (["--virtual-local-rank"] if config.virtual_local_rank else [])


def _place(config: Any, rank: int | None) -> dict[str, Any]:
    """Where the nodes meet. A static rendezvous of one node says where the workers' store is."""
    host, _, port = config.rdzv_endpoint.strip().rpartition(":")
    if config.max_nodes > 1:
        return {"rdzv-endpoint": config.rdzv_endpoint, "node-rank": rank if config.rdzv_backend == "static" else None}
    if port == "0":
        return {}
    if config.rdzv_backend == "static" and host:
        return {"master-addr": host, "master-port": port}
    return {"rdzv-endpoint": config.rdzv_endpoint}


def _logs(specs: Any) -> dict[str, Any]:
    """`specs` is PyTorch's `DefaultLogsSpecs`, whose fields have no public names."""
    if specs is None:
        return {}
    if type(specs).__name__ != "DefaultLogsSpecs":
        raise _refused("logs_specs", "there is one layout of log files", type(specs).__name__)
    ranks, redirects, tee = specs._local_ranks_filter, _streams(specs._redirects), _streams(specs._tee)
    folder = str(specs._root_log_dir or "")
    # PyTorch makes a folder for each launch if none is given; without redirection nothing would be in it.
    is_unused = folder == os.devnull or (not redirects + tee and pathlib.Path(folder).name.startswith("torchelastic_"))
    return {
        "log-dir": "" if is_unused else folder,
        "redirects": redirects,
        "tee": tee,
        "local-ranks-filter": ",".join(map(str, sorted(ranks))) if ranks else None,
    }


def _streams(chosen: Any) -> str:
    if isinstance(chosen, dict):
        return ",".join(f"{rank}:{int(streams)}" for rank, streams in chosen.items())
    return str(int(chosen)) if chosen else ""


def _words(filters: list[str] | None) -> str:
    return ",".join(word.replace(",", ",,") for word in filters or ())


def _refused(name: str, hint: str, value: Any = None) -> ValueError:
    given = "" if value is None else f" `{value}`"
    return ValueError(f"`{name}`{given} has no counterpart in ddp-run\n  hint: {hint}")


def _environment() -> dict[str, str]:
    """Without the variables that the configuration has replaced; `ddp-run`'s own ones stay."""
    replaced = {f"PET_{field.name.upper()}" for field in dataclasses.fields(LaunchConfig)}
    replaced |= {f"PET_{name}" for name in ("NNODES", "RDZV_ID", "RDZV_CONF", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    replaced |= {f"PET_{name}" for name in ("STANDALONE", "MODULE", "NO_PYTHON", "RUN_PATH", "LOG_DIR", "REDIRECTS", "TEE")}
    replaced |= {f"PET_{name}" for name in ("LOCAL_RANKS_FILTER", "NUMA_BINDING")}
    return {name: value for name, value in os.environ.items() if name not in replaced}


def _target(program: str, args: list[str], env: dict[str, str]) -> list[str]:
    """A script or module that torchrun runs by Python keeps its name in reports."""
    if args[:2] == ["-u", "-m"] and len(args) > 2:
        env["PYTHON_EXEC"] = program
        return ["-m", "--", *args[2:]]
    if args[:1] == ["-u"] and len(args) > 1 and args[1].endswith(".py"):
        env["PYTHON_EXEC"] = program
        return ["--", *args[1:]]
    return ["--no-python", "--", program, *args]


def start(words: list[str], env: dict[str, str], **streams: Any) -> subprocess.Popen[bytes]:
    """Starts `ddp-run` in a session of its own, so that it gets each signal once. It stops when this thread ends."""

    def stop_with_parent() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(words, env=env, start_new_session=True, preexec_fn=stop_with_parent, **streams)


def _run(words: list[str], env: dict[str, str], signals: str) -> tuple[int, int | None]:
    """The exit code, and the signal that was passed on."""
    shown = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    for stream in shown:
        stream.flush()
    # A notebook shows what goes through `sys.stdout`, which is not the descriptor.
    copied = [None if _is_descriptor(stream, number) else stream for number, stream in ((1, sys.stdout), (2, sys.stderr))]
    pipes = [subprocess.PIPE if stream is not None else None for stream in copied]
    process = start(words, env, stdout=pipes[0], stderr=pipes[1])
    ends = ((process.stdout, copied[0]), (process.stderr, copied[1]))
    copies = [threading.Thread(target=_copy, args=pair, daemon=True) for pair in ends if pair[1] is not None]
    for copy in copies:
        copy.start()
    try:
        with _passed_on(process, signals) as received:
            exit_code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    for copy in copies:
        copy.join()
    return exit_code, received[0] if received else None


def _is_descriptor(stream: Any, number: int) -> bool:
    try:
        return stream is None or stream.fileno() == number
    except (OSError, ValueError, AttributeError):
        return False


def _copy(source: Any, target: Any) -> None:
    with source:
        for line in source:
            target.write(line.decode(errors="replace"))
            target.flush()


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes], signals: str) -> Iterator[list[int]]:
    """Passes the signals on to `ddp-run`; yields those that came. Only the main thread may handle signals."""
    received: list[int] = []

    def pass_on(number: int, _frame: Any) -> None:
        received.append(number)
        process.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name.strip()) for name in signals.split(",") if name.strip()] if is_main else []
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _outcome(folder: pathlib.Path, exit_code: int) -> tuple[list[int], Failure | None, str]:
    """The ranks of this node in the last generation, its first failure, and the report, from the events."""
    events = folder / "events"
    known = []
    for line in events.read_bytes().split(b"\n") if events.exists() else ():
        with contextlib.suppress(ValueError):  # cut off by a `kill -9` of `ddp-run`
            known.append(json.loads(line))
    last = max((event.get("generation", 0) for event in known), default=0)
    of_last = [event for event in known if event.get("generation") == last]
    started = {event["local_rank"]: event for event in of_last if event["event"] == "worker_started"}
    report = next((event.get("report") or "" for event in known if event["event"] == "finished"), "")
    ends = (event for event in of_last if event["event"] == "worker_ended")
    not_failures = ("exited with code 0", "terminated by ddp-run")
    failed = next((event for event in ends if not event["ending"].startswith(not_failures)), None)
    failure = None
    if exit_code != 0 and started:
        local_rank = -1 if failed is None else failed["local_rank"]
        place = started.get(local_rank, {"rank": -1, "pid": 0})
        code = exit_code if exit_code < 128 else 128 - exit_code
        failure = Failure(place["rank"], local_rank, place["pid"], code, str(folder / "error.json"))
    return sorted(event["rank"] for event in started.values()), failure, report
