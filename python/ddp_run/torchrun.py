"""`import ddp_run.torchrun` makes `torch.distributed.run` and `elastic_launch` of PyTorch start `ddp-run`.

So does `DDP_REPLACE_TORCHRUN=1` in the environment of a Python with the wheel. What calls torchrun's Python, such as
`accelerate launch`, then works unchanged. `torch` is imported only when the script does so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import signal
import sys
from types import ModuleType
from typing import Any

from . import launch

API = "torch.distributed.launcher.api"
# What has imported `elastic_launch` from there by name.
IMPORTERS = ("torch.distributed.launcher", "torch.distributed.run")


class elastic_launch(launch.elastic_launch):  # noqa: N801, the name in PyTorch
    """PyTorch's, with its own exceptions."""

    def _error(self, report: str, exit_code: int, failure: launch.Failure | None, stopped_by: int | None) -> BaseException:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

        if stopped_by is not None:
            return SignalException(report, signal.Signals(stopped_by))
        if failure is None:
            return super()._error(report, exit_code, failure, stopped_by)
        name = self._entrypoint if isinstance(self._entrypoint, str) else self._entrypoint.__name__
        of_torch = ProcessFailure(failure.local_rank, failure.pid, failure.exit_code, failure.error_file)
        return ChildFailedError(name, {failure.rank: of_torch})


def launch_agent(config: Any, entrypoint: Any, args: list[Any], health_check_server: Any = None) -> dict[int, Any]:
    """PyTorch's."""
    return elastic_launch(config, entrypoint, health_check_server)(*args)


def replace(api: ModuleType) -> None:
    """Replaces what is imported already, and what will be imported from `api`."""
    for module in (api, *(sys.modules[name] for name in IMPORTERS if name in sys.modules)):
        module.elastic_launch = elastic_launch  # type: ignore[attr-defined]
    api.launch_agent = launch_agent  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces when the module has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != API:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                replace(module)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


if API in sys.modules:
    replace(sys.modules[API])
else:
    sys.meta_path.insert(0, _Finder())
