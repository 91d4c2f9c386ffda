"""`torchrun --rdzv-backend ddp`: torchrun's launchers meet at the rendezvous of `ddp-run`.

A `ddp-run` joins the job for each torchrun, with one worker: a stand-in that says where its node stands and lives as
long as torchrun's workers do. The daemon decides about nodes, ranks and new generations, and the launcher of node 0
hosts the store, as for any job.

`--rdzv-conf` takes the keys of `ddp-run`, and `insecure=1`. torchrun counts restarts itself.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import tempfile
from typing import Any, Callable

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import api

from .__main__ import find, missing
from .functions import PACKAGE_PARENT
from .launch import TORCHRUN_TIMEOUT_S, start

CONF_KEYS = ("is_host", "join_timeout", "connect_timeout", "outage_timeout", "takeover_timeout", "last_call_timeout")
# More than any torchrun asks for: each counts its own.
MAX_RESTARTS = 1_000_000
STORE_TIMEOUT = datetime.timedelta(seconds=60)
# How long a node waits at its end for the others, as torchrun's exit barrier.
END_TIMEOUT_S = 300.0
# How often is looked whether `ddp-run` still runs while the next generation is waited for.
LOOK_INTERVAL_S = 0.2
# Exit codes of `ddp-run`.
TIMED_OUT, UNREACHABLE, DO_NOT_RESTART = 75, (69, 76, 77), 93


def creator() -> Callable[[api.RendezvousParameters], api.RendezvousHandler]:
    """The entry point."""
    return Handler


class _Place:
    """The stand-in of one generation."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # Unbuffered: what follows is for `is_over`.
        with connection.makefile("rb", buffering=0) as lines:
            self.env: dict[str, str] = json.loads(lines.readline() or b"{}")

    def is_over(self) -> bool:
        """The generation is: the stand-in says so, or is gone."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def end(self, exit_code: int) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(bytes([exit_code]))
        self._connection.close()


class Handler(api.RendezvousHandler):
    """The rendezvous of one torchrun."""

    def __init__(self, parameters: api.RendezvousParameters) -> None:
        self._parameters = parameters
        self._member: subprocess.Popen[bytes] | None = None
        self._place: _Place | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ddp_run-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(pathlib.Path(self._folder.name, "stand-in")))
        self._listener.listen()
        self._listener.settimeout(LOOK_INTERVAL_S)

    def get_backend(self) -> str:
        return self._parameters.backend

    def get_run_id(self) -> str:
        return self._parameters.run_id

    @property
    def use_agent_store(self) -> bool:
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> api.RendezvousInfo:
        if self._member is None:
            self._member = self._join()
        if self._place is not None:
            # torchrun has stopped its workers: the rendezvous asked for it, or one of them failed.
            self._place.end(0 if self._place.is_over() else 1)
        while True:
            self._place = place = self._next_place()
            address, port = place.env["MASTER_ADDR"], int(place.env["MASTER_PORT"])
            try:
                store = TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)
            except Exception as error:
                if place.is_over():
                    place.end(0)
                    continue
                raise api.RendezvousConnectionError(f"no store at {address}:{port}") from error
            rank, nodes = int(place.env["RANK"]), int(place.env["WORLD_SIZE"])
            shared = api.RendezvousStoreInfo(address, port) if self.use_agent_store else None
            own = PrefixStore("torchelastic", store)
            shared = shared or api.RendezvousStoreInfo.build(rank, own, self._parameters.local_addr)
            return api.RendezvousInfo(own, rank, nodes, shared)

    def num_nodes_waiting(self) -> int:
        return int(self._place is not None and self._place.is_over())

    def is_closed(self) -> bool:
        return self._member is not None and self._member.poll() is not None

    def set_closed(self) -> None:
        self._end(DO_NOT_RESTART)

    def shutdown(self) -> bool:
        # torchrun calls this after success and after failure; in the second case its exception is under way.
        return self._end(0 if sys.exc_info()[0] is None else DO_NOT_RESTART)

    def _end(self, exit_code: int) -> bool:
        if self._place is not None:
            self._place.end(exit_code)
            self._place = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._member is not None:
                self._member.wait(END_TIMEOUT_S)
        return self._member is None or self._member.poll() is not None

    def _join(self) -> subprocess.Popen[bytes]:
        program = find()
        if program is None:
            raise api.RendezvousConnectionError(missing())
        asked = self._parameters
        conf = {key: asked.get(key) for key in CONF_KEYS if asked.get(key) is not None}
        if asked.get_as_int("timeout", TORCHRUN_TIMEOUT_S) != TORCHRUN_TIMEOUT_S:
            conf.setdefault("connect_timeout", asked.get("timeout"))
        values: dict[str, Any] = {
            "nnodes": f"{asked.min_nodes}:{asked.max_nodes}",
            "rdzv-endpoint": asked.endpoint,
            "rdzv-id": asked.run_id,
            "rdzv-conf": ",".join(f"{key}={value}" for key, value in conf.items()),
            "local-addr": asked.local_addr,
            "max-restarts": MAX_RESTARTS,
        }
        words = [word for name, value in values.items() if value for word in (f"--{name}", str(value))]
        if asked.get_as_bool("insecure", False):
            words.append("--insecure")
        path = str(pathlib.Path(self._folder.name, "stand-in"))
        code = f"import sys; sys.path.append({PACKAGE_PARENT!r}); from ddp_run.stand_in import main; main({path!r})"
        env = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        # For workers. The store of the rendezvous is there in any case.
        env.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
        return start([program, *words, "--no-python", "--", sys.executable, "-c", code], env)

    def _next_place(self) -> _Place:
        while True:
            with contextlib.suppress(socket.timeout):
                connection = self._listener.accept()[0]
                connection.settimeout(None)
                place = _Place(connection)
                if place.env and not place.is_over():
                    return place
                place.end(0)
            exit_code = self._member.poll() if self._member is not None else None
            if exit_code == TIMED_OUT:
                raise api.RendezvousTimeoutError("the other nodes did not join in time")
            if exit_code in UNREACHABLE:
                raise api.RendezvousConnectionError(f"`ddp-run` ended with exit code {exit_code}; it printed why")
            if exit_code is not None:
                raise api.RendezvousClosedError(f"the job is over: `ddp-run` ended with exit code {exit_code}")
