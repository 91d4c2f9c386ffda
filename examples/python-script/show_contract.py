"""Prints what a launcher tells its workers, as one line of JSON. Needs nothing but the standard library.

The script knows nothing of ddp-run: it reads the variables that every torchrun-style launcher sets.
"""

import json
import os
import sys

CONTRACT = [
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "OMP_NUM_THREADS",
]


def main() -> None:
    seen = {name: os.environ.get(name) for name in CONTRACT}
    # One write: lines of several ranks never mix.
    sys.stdout.write(json.dumps({"contract": seen, "argv": sys.argv[1:]}) + "\n")


if __name__ == "__main__":
    main()
