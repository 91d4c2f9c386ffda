"""The cell of a notebook that calls `notebook_launcher`: it starts the ranks itself."""
import argparse

from accelerate import notebook_launcher
from train_accelerate import train

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--node", type=int, default=0)
parser.add_argument("--port", required=True)
args = parser.parse_args()

notebook_launcher(
    train,
    (args.out, args.steps),
    num_processes=2,  # of this node; with one it would start nothing
    num_nodes=args.nodes,
    node_rank=args.node,
    use_port=args.port,
    max_restarts=3,
)
