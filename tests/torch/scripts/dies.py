"""Runs a script, some of whose ranks die: `GENERATION:RANK:STEP:PLACE,… SCRIPT ARGUMENTS`. The places are those of the
commit rule: `gradients` (the rank has its own), `all` (all ranks have theirs), `update`, and `updated`. STEP_S is added to
each step.
"""
import os
import runpy
import signal
import sys
import time

from ddp_run import LiveJob, generation, recovery

plan, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
deaths = {tuple(map(int, death.split(":")[:3])): death.split(":")[3] for death in plan.split(",") if death}
step, meet, update = LiveJob.step, recovery._meet, LiveJob._update
place = None


def at(name):
    if place == name:
        os.kill(os.getpid(), signal.SIGKILL)


def mortal_step(job, *words):
    global place
    place = deaths.get((generation(), int(os.environ["RANK"]), job.finished + 1))
    at("gradients")
    time.sleep(float(os.environ.get("STEP_S", 0)))
    step(job, *words)


def mortal_meet():
    meet()
    at("all")


def mortal_update(job, version, own):
    def half():
        at("update")
        own()

    update(job, version, half)
    at("updated")


LiveJob.step, LiveJob._update, recovery._meet = mortal_step, mortal_update, mortal_meet
runpy.run_path(script, run_name="__main__")
