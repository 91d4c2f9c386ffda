#!/usr/bin/env bash
# Real PyTorch scripts under ddp-run, with gloo on the CPU, and weights and training beside transformers. `cargo test` does
# not need PyTorch; these tests do, and those two are skipped without transformers.
#
#     tests/torch/run.sh                                   all of them
#     PYTHON=/path/to/venv/bin/python tests/torch/run.sh   with another Python
#     tests/torch/run.sh -k restart                        those whose name contains `restart`
#     tests/torch/run.sh -k Live                           those of ranks that outlive others
#     tests/torch/run.sh -k Weights                        those of the weights
#     tests/torch/run.sh -k Training                       training under parallel layouts, beside transformers
#
# DDP_RUN=… takes a binary that is built already, with `ddp-train` beside it; DDP_RESTARTS=20 says how often the restart is tried.
# Exit code 77: PyTorch is missing, nothing was tested.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHON=${PYTHON:-python3}

if ! version=$("$PYTHON" -c 'import torch, torch.distributed as d; assert d.is_gloo_available(); print(torch.__version__)' 2>/dev/null); then
    cat >&2 <<END
======================================================================
SKIPPED, NOTHING WAS TESTED: \`$PYTHON\` has no PyTorch with gloo
  hint: pip install torch --index-url https://download.pytorch.org/whl/cpu
        or name another Python: PYTHON=/path/to/venv/bin/python $0
======================================================================
END
    exit 77
fi

if [[ -z ${DDP_RUN:-} ]]; then
    cargo build --quiet --manifest-path "$root/Cargo.toml" --bin ddp-run --bin ddp-train
    DDP_RUN=$root/target/debug/ddp-run
fi
export DDP_RUN
# What these tests share with those of the Python package.
export PYTHONPATH=$root/tests/python
echo "PyTorch $version, $DDP_RUN"
exec "$PYTHON" -m unittest discover --verbose --start-directory "$root/tests/torch" "$@"
