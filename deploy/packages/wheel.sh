#!/usr/bin/env bash
# Builds the wheel, checks it, and installs it into a fresh environment, where it runs scripts.
#
#     deploy/packages/wheel.sh                                    the wheel lies in target/wheels afterwards
#     PYTHON=/path/to/venv/bin/python deploy/packages/wheel.sh    with another Python; with its PyTorch, if it has one
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

tools=target/packages/tools
if [[ ! -x $tools/bin/twine ]]; then
    "$python" -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check maturin==1.16.0 twine==7.0.0
fi
rm -rf target/wheels
"$tools/bin/maturin" build --release --out target/wheels
"$tools/bin/twine" check --strict target/wheels/*.whl
du -h target/wheels/*.whl

fresh=target/packages/fresh
rm -rf "$fresh"
"$python" -m venv "$fresh"
bin=$PWD/$fresh/bin
start=$SECONDS
"$bin/pip" install --quiet --disable-pip-version-check --no-index target/wheels/*.whl
echo "installed in $((SECONDS - start)) s"
for program in ddp-run ddp-rendezvous ddp-train; do "$bin/$program" --version; done

DDP_REPLACE_TORCHRUN=1 "$bin/python" -c 'import sys; assert "ddp_run.torchrun" in sys.modules'

# Nothing of the repository may stand in for what was installed.
export DDP_RUN=$bin/ddp-run PACKAGE_PATH=
"$bin/python" -m unittest discover --start-directory tests/python

if torch=$("$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null); then
    echo "$torch" >"$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
    out=$(mktemp -d)
    PATH=$bin:$PATH ddp-run --nproc-per-node 2 --hang-timeout 60 examples/pytorch/train.py "$out/checkpoint.pt"
    [[ -s $out/checkpoint.pt ]] || { echo "error: no checkpoint was written" >&2; exit 1; }
    rm -rf "$out"
else
    echo "\`$python\` has no PyTorch: no script of it was run"
fi
