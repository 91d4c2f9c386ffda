#!/usr/bin/env bash
# One rank of several that share a card, with an NCCL before 2.30: it refuses two ranks of one host on one card, so
# each names a host of its own, and they talk over the loopback interface.
#
#     ddp-run --nproc-per-node 2 -- sharing.sh FILE.yaml [--set KEY=VALUE]...
set -euo pipefail
export NCCL_HOSTID="rank-${RANK:?ddp-run sets it}" NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket
# As ddp-run has it for workers of its own.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
exec "$(dirname "$0")/ddp-train" run "$@"
