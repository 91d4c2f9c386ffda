"""The Hugging Face Trainer with its own checkpoints.

Its own answer to SIGTERM, `enable_jit_checkpoint`, stops each rank by a clock of its own, and the others may wait for it.
"""
import argparse
import pathlib
import signal
import time

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()


class Announce(TrainerCallback):
    def on_train_begin(self, arguments, state, control, **kwargs):
        print(f"rank {arguments.process_index} starts at step {state.global_step}", flush=True)

    def on_step_end(self, arguments, state, control, **kwargs):
        time.sleep(0.05)

    def on_log(self, arguments, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}", flush=True)


class StopOnSigterm(TrainerCallback):
    """All ranks save after the same step."""

    asked = False

    def on_train_begin(self, arguments, state, control, **kwargs):
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))

    def on_step_end(self, arguments, state, control, **kwargs):
        flag = torch.tensor(float(self.asked))
        dist.all_reduce(flag)
        if flag.item() > 0:
            control.should_save = control.should_training_stop = True


class SavingTrainer(Trainer):
    def _save_checkpoint(self, *args, **kwargs):
        super()._save_checkpoint(*args, **kwargs)
        if self.is_world_process_zero():
            print(f"saved step {self.state.global_step}", flush=True)


tokens = torch.randint(64, (128, 16), generator=torch.Generator().manual_seed(0))
trainer = SavingTrainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)),
    args=TrainingArguments(
        output_dir=args.out,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=20,
        save_total_limit=3,
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[Announce(), StopOnSigterm()],
)
pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out))
print(f"rank {trainer.args.process_index} finished at step {trainer.state.global_step}", flush=True)
