"""The cell of a notebook that calls `notebook_launcher`: it starts the ranks itself."""
import argparse
import os

from accelerate import notebook_launcher
from train_accelerate import train

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

notebook_launcher(train, (args.out, args.steps), num_processes=2, use_port=os.environ["PORT"], max_restarts=3)
