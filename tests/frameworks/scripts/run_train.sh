#!/usr/bin/env bash
# A launch script in the style of torchtitan's: everything by variables, the trainer as a module.
set -ex

NGPU=${NGPU:-8}
NNODES=${NNODES:-1}
RDZV_ENDPOINT=${RDZV_ENDPOINT:-localhost:0}
LOG_RANK=${LOG_RANK:-0}

exec "${LAUNCHER:-torchrun}" --nnodes="$NNODES" --nproc_per_node="$NGPU" --max_restarts=3 \
    --rdzv_id=101 --rdzv_backend c10d --rdzv_endpoint="$RDZV_ENDPOINT" \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 --log-dir "$LOG_DIR" \
    -m train_titan "$@"
