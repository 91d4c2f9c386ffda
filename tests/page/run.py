#!/usr/bin/env python3
"""The status page in a headless Chromium (Debian's `chromium`), while two nodes train.

    tests/page/run.py --programs target/debug                            what it shows, by keyboard, dark, on a phone
    tests/page/run.py --programs target/debug --pictures docs/pictures   the same, and makes the pictures of the docs

A directory has the name of an attack, and a rank is killed.
"""
import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from browser import Browser

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKEN = "a-read-token-for-this-test-alone"
NODES_TOKEN = "a-token-of-nodes-for-this-test-alone"
# If any of it were taken for HTML, there would be a picture, whose error would leave a mark.
ATTACK = "logs<img src=x onerror=document.title='attacked'>"
WORKER = """
import os, sys, time
import ddp_run
rank, life = int(os.environ["RANK"]), ddp_run.generation()
with open(os.path.join(sys.argv[1], f"pid-{rank}-{life}"), "w") as file:
    file.write(str(os.getpid()))
step = 0
while not os.path.exists(os.path.join(sys.argv[1], "done")):
    time.sleep(0.3 if rank == 3 else 0.1)
    step += 1
    ddp_run.heartbeat(step, loss=4.0 / step ** 0.5 if rank == 0 else None)
"""


class Job:
    """A daemon, two nodes of two ranks of one job, and one node of another."""

    def __init__(self, programs, folder, logs, stack):
        self.folder, self.logs = folder, logs
        (folder / "worker.py").write_text(WORKER)
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(TOKEN + "\n")
        command = [programs / "ddp-rendezvous", "serve", "--listen", "127.0.0.1:0", "--metrics-addr", "127.0.0.2:0",
                   "--lease", "1.5"]
        environment = {**os.environ, "DDP_READ_TOKEN_FILE": str(folder / "token"), "DDP_TOKEN": NODES_TOKEN,
                       "PYTHONPATH": str(ROOT / "python")}
        daemon = self._start(stack, command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        endpoint = daemon.stdout.readline().strip()
        while "http://" not in (line := daemon.stderr.readline()):
            assert line, "the daemon has ended"
        self.url = "http://" + line.split("http://")[1].strip()
        log = open(folder / "launchers.log", "w")
        for node, job, count in (("a", "nightly-gpt", 2), ("b", "nightly-gpt", 2), ("c", "other", 1)):
            command = [programs / "ddp-run", "--nnodes", str(count), "--nproc-per-node", "2", "--max-restarts", "3",
                       "--rdzv-endpoint", endpoint, "--rdzv-id", job, "--rdzv-conf", "is_host=false",
                       "--log-dir", folder / logs / node, folder / "worker.py", folder / job]
            (folder / job).mkdir(exist_ok=True)
            self._start(stack, command, environment, stdout=log, stderr=log)

    @staticmethod
    def _start(stack, command, environment, **streams):
        process = subprocess.Popen(list(map(str, command)), env=environment, **streams)

        def end():
            process.terminate()
            process.wait(timeout=60)

        stack.callback(end)
        return process

    def kill_rank(self, rank):
        pid = int((self.folder / "nightly-gpt" / f"pid-{rank}-1").read_text())
        os.kill(pid, signal.SIGKILL)


def log_in(page):
    page.wait("!document.getElementById('login').hidden")
    assert page.ask("document.activeElement.id") == "token", "the field has the focus"
    page.type("a wrong token, typed by a person")
    page.press("Enter", 13, "\r")
    page.wait("document.getElementById('refused').textContent.includes('does not take')")
    page.type(TOKEN)
    page.press("Enter", 13, "\r")
    page.wait("!document.getElementById('content').hidden")
    assert TOKEN not in page.ask("location.href + document.documentElement.outerHTML")


def follow_printed_address(page, job):
    """As a launcher prints it, in a tab that knows no token."""
    page.ask("sessionStorage.clear(); 1")
    page.open(job.url + "livez")
    page.open(job.url + "#token=" + TOKEN)
    page.wait("!document.getElementById('content').hidden")
    assert TOKEN not in page.ask("location.href + document.documentElement.outerHTML")


def choose_job(page):
    """With the keyboard alone."""
    page.wait("document.querySelectorAll('#jobs button').length === 2")
    for _ in range(10):
        page.press("Tab", 9)
        if page.ask("document.activeElement.dataset.job") == "nightly-gpt":
            break
    else:
        raise AssertionError("no key leads to the job")
    page.press("Enter", 13, "\r")
    page.wait("document.title === 'nightly-gpt'")
    assert page.wait("document.querySelector('#jobs button[aria-pressed=true]').dataset.job") == "nightly-gpt"


def check_curve(page):
    page.wait("document.querySelector('#curve polyline')?.getAttribute('points').split(' ').length >= 8")
    label = page.ask("document.getElementById('curve').getAttribute('aria-label')")
    assert "lowest" in label, label
    labels = page.ask("[...document.querySelectorAll('#curve text')].map((text) => text.textContent)")
    assert {"step", "loss"} <= set(labels) and len(labels) >= 6, labels
    edge = page.ask("document.getElementById('curve').getBoundingClientRect().toJSON()")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=edge["x"] + 60, y=edge["y"] + 60)
    page.wait("/^step [0-9]+: [0-9.]+$/.test(document.getElementById('loss-words').textContent)")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)


def check_content(page, job):
    page.wait("document.querySelectorAll('#ranks tr').length === 4")
    check_curve(page)
    nodes = page.ask("document.getElementById('nodes').textContent")
    assert job.logs in nodes, nodes
    assert page.ask("document.images.length") == 0 and "attacked" not in page.ask("document.title")
    # A snapshot later, the rows are the same elements.
    page.ask("document.querySelector('#ranks tr').dataset.kept = 'yes'; 1")
    step = page.ask("Number(document.querySelector('#ranks tr').cells[2].textContent)")
    page.wait(f"Number(document.querySelector('#ranks tr').cells[2].textContent) > {step + 10}")
    assert page.ask("document.querySelector('#ranks tr').dataset.kept") == "yes"


def check_restart(page, job):
    job.kill_rank(1)
    first = "document.getElementById('restarts').lastElementChild.textContent"
    page.wait(f"{first}.includes('died of SIGKILL')")
    page.wait("document.querySelectorAll('#restarts li').length === 2")
    page.wait("document.getElementById('facts').textContent.includes('restarts 1 of 3')")
    mark = page.wait("document.querySelector('#curve .restart title')?.textContent")
    assert mark.startswith("restart 1 at step ") and "died of SIGKILL" in mark, mark
    check_content(page, job)


def check_looks(page, pictures):
    light = page.ask("getComputedStyle(document.body).backgroundColor")
    if pictures:
        page.resize(1000, 1120)
        page.picture(pictures / "status.png")
    page.prefer("dark")
    dark = page.ask("getComputedStyle(document.body).backgroundColor")
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(13, 17, 23)"), (light, dark)
    page.resize(390, 844)
    assert page.ask("document.documentElement.scrollWidth") <= 390, "a phone does not scroll sideways"


def check_end(page, job):
    (job.folder / "nightly-gpt" / "done").touch()
    page.wait("!document.getElementById('ended').hidden")
    assert page.ask("document.getElementById('ended').textContent").startswith("The job has ended: ")
    assert page.ask("document.querySelectorAll('#ranks tr').length") == 4, "its last state stays"
    check_curve(page)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, required=True, help="directory of the built programs")
    parser.add_argument("--pictures", type=pathlib.Path, help="where pictures go; none without it")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        # The pictures show how it is meant to be.
        job = Job(args.programs.resolve(), folder, "logs" if args.pictures else ATTACK, stack)
        page = Browser(1000, 1120, folder / "profile")
        stack.callback(page.close)
        page.open(job.url)
        checks = {
            "login": lambda: log_in(page),
            "printed address": lambda: follow_printed_address(page, job),
            "keyboard": lambda: choose_job(page),
            "content": lambda: check_content(page, job),
            "restart": lambda: check_restart(page, job),
            "dark and small": lambda: check_looks(page, args.pictures),
            "end": lambda: check_end(page, job),
        }
        for name, check in checks.items():
            check()
            assert not page.complaints, page.complaints
            print(f"{name}: ok")
    print(f"{len(checks)} passed, 0 failed")


if __name__ == "__main__":
    sys.exit(main())
