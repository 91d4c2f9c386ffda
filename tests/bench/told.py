"""A worker that writes when it starts and when it is told to stop: `start|stop RANK NODE PID NANOSECONDS`."""
import time

now = time.monotonic_ns()
import os
import signal
import sys

log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
place = " ".join(os.environ[name] for name in ("RANK", "GROUP_RANK"))


def say(what, at):
    os.write(log, f"{what} {place} {os.getpid()} {at}\n".encode())


def stop(*_):
    say("stop", time.monotonic_ns())
    os._exit(0)


signal.signal(signal.SIGTERM, stop)
say("start", now)
while True:
    signal.pause()
