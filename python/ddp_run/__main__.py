"""`python -m ddp_run train.py` runs `ddp-run train.py`, whose script runs under this Python."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig


def find() -> str | None:
    """The program among this Python's scripts, else the one in PATH."""
    return shutil.which("ddp-run", path=os.pathsep.join(_folders())) or shutil.which("ddp-run")


def _folders() -> list[str]:
    """Where pip installs programs: for this environment, and for the user."""
    return [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")]


def missing() -> str:
    """What to say where `find` finds nothing."""
    return (
        f"`ddp-run` is neither in {' nor in '.join(f'`{folder}`' for folder in _folders())}, nor in PATH\n"
        "  hint: install the wheel of ddp-run, or add the directory with `ddp-run` (in a checkout: `target/release`) to PATH"
    )


def main() -> None:
    program = find()
    if program is None:
        sys.stderr.write(f"error: {missing()}\n")
        sys.exit(127)
    os.environ.setdefault("PYTHON_EXEC", sys.executable)
    os.execv(program, ["ddp-run", *sys.argv[1:]])


if __name__ == "__main__":
    main()
