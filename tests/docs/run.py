#!/usr/bin/env python3
"""Runs the shell commands of README.md, docs/ and the READMEs of examples/ and deploy/, and checks their flags.

    tests/docs/run.py --programs target/debug                  all pages
    tests/docs/run.py --programs target/debug docs/runs.md  some pages by name
    tests/docs/run.py --list                                   which block is run, and why the others are not

Shell commands are indented blocks and fences of `sh` or `bash`. Everything else is in a fence of another language, such
as `text` for output. The blocks of a page run in order, in one bash session, which begins in the root of a copy of the
tracked files and ends with the first error. Comments above a block, which readers do not see, say the rest:

    <!-- not run: needs Slurm -->              the block is not run; the reason is concrete
    <!-- run by: tests/it/a.rs::name -->       this test runs the like; it must exist
    <!-- needs: torch -->                      the block is run if `python3` can import this module
    <!-- first: cp a.txt b.txt -->             a command that is run before the block; may be repeated
    <!-- file: train.yaml -->                  above a fence of any language: it is saved in this file

`target/release` in the copy is the directory given with --programs. `cargo build` does nothing there, and `cargo run
--release --` is `ddp-run`. `python3` is $PYTHON. After `few 20`, native training has 20 steps and little to validate
on. Flags of the three programs must be in their `--help`, keys after `--set` in docs/reference.md. This is checked
for all blocks, and for code within paragraphs.
"""
import argparse
import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = re.compile(r"README\.md|docs/[^/]+\.md|(examples|deploy)/(.+/)?README\.md")
COMMENT = re.compile(r"\s*<!-- (not run|run by|needs|first|file): (.+) -->")
PYTHON = os.environ.get("PYTHON", "python3")
KEYS = (ROOT / "docs/reference.md").read_text()
FEW = """few() { STEPS=$1 VAL=$PWD/val.txt; head -c 5000 examples/data/python-reference.txt >val.txt; }
ddp-run() { command ddp-run "$@" ${STEPS:+--set train.steps=$STEPS --set data.val=$VAL}; }"""
DEADLINE = 120  # seconds for a block
CARGO = """#!/bin/bash
[[ "$*" != "run --release -- "* ]] || exec ddp-run "${@:4}"
[[ "$1 $2" == "build --release" ]] || { echo "tests/docs/run.py does not know: cargo $*" >&2; exit 2; }
"""


@dataclasses.dataclass
class Block:
    """A block of code. `comments` are the annotations above it, as (kind, text)."""
    page: str
    line: int
    language: str
    text: str
    comments: list

    def given(self, kind):
        return [text for found, text in self.comments if found == kind]

    def reason(self):
        """Why it is not run; none if it is."""
        named = [f"run by {text}" for text in self.given("run by")]
        missing = [f"python3 has no {module}" for module in self.given("needs") if not has_module(module)]
        return next(iter(self.given("not run") + named + missing), None)

    def commands(self):
        files = [f"cat >{shlex.quote(name)} <<'END OF FILE'\n{self.text}\nEND OF FILE" for name in self.given("file")]
        return "\n".join(self.given("first") + (files or [self.text])) + "\n"


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


@functools.cache
def has_module(name):
    return subprocess.run([PYTHON, "-c", f"import {name}"], capture_output=True).returncode == 0


def read_page(page):
    """The blocks of a page, and its text without them, in as many lines."""
    lines = (ROOT / page).read_text().split("\n")
    blocks, prose, comments, at = [], [], [], 0
    while at < len(lines):
        start, line = at, lines[at]
        fence = re.match(r"\s*```(.*)", line)
        if comment := COMMENT.fullmatch(line):
            comments.append(comment.groups())
        if fence is None and not (line.startswith("    ") and (at == 0 or not lines[at - 1].strip())):
            comments = comments if comment or not line.strip() else []
            prose.append(line)
            at += 1
            continue
        if fence:
            at = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == "```") + 1
            code, language = lines[start + 1 : at - 1], fence[1]
        else:
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            code, language = lines[start:at], "sh"
        blocks.append(Block(page, start + 1, language, textwrap.dedent("\n".join(code)).rstrip(), comments))
        prose, comments = prose + [""] * (at - start), []
    return blocks, "\n".join(prose)


@functools.cache
def help_of(directory, *words):
    return subprocess.run([directory / words[0], *words[1:], "--help"], capture_output=True, text=True).stdout


def wrong_flags(line, directory):
    """Flags and keys on a command line that do not exist."""
    line = line.replace("cargo run --release --", "ddp-run")
    words = line.split()
    with contextlib.suppress(ValueError):
        words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
    for start, word in enumerate(words):
        command = [pathlib.Path(word).name]
        if command[0] not in ("ddp-run", "ddp-train", "ddp-rendezvous") or words[start - 1] in ("-p", "--binary"):
            continue
        for at in range(start + 1, len(words)):
            word, text = words[at], help_of(directory, *command)
            # The end of the command, or what follows belongs to the script.
            if re.fullmatch(r"--|[();<>|&]+|-m|--module", word) or command == ["ddp-run"] and word.endswith(".py"):
                break
            if len(command) == at - start and re.search(rf"^  {re.escape(word)}  ", text, re.MULTILINE):
                command.append(word)
            flag = word.split("=")[0].replace("_", "-")
            if word[0] == "-" and re.fullmatch(r"-[a-z]|--[a-z].*", flag) and not re.search(rf"(?<![\w-]){flag}(?![\w-])", text):
                yield f"`{' '.join(command)}` has no flag `{word}`"
            key = "".join(words[at + 1 : at + 2]).split("=")[0]
            if word == "--set" and key not in ("", "KEY", "section.key") and f"`{key}`" not in KEYS:
                yield f"docs/reference.md has no key `{key}`"


def check_page(blocks, prose, directory):
    """Mistakes that are seen without running anything, as (line, what)."""
    for block in blocks:
        for test in block.given("run by"):
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
            if name not in re.findall(r"\b(?:fn|def) (\w+)", text):
                yield block.line, f"`{test}` does not exist"
        if not block.language:
            yield block.line, "a fence without a language: `sh`, or `text` for output"
        if block.language in ("sh", "bash"):
            parsed = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
            yield from ((block.line, mistake) for mistake in parsed.stderr.splitlines())
        for line in re.sub(r"\\\n\s*", " ", block.text).split("\n"):
            yield from ((block.line, wrong) for wrong in wrong_flags(line, directory))
    for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
        code = re.sub(r"^--set ", "ddp-run --set ", " ".join(span[1].split()))
        line = prose.count("\n", 0, span.start()) + 1
        yield from ((line, wrong) for wrong in wrong_flags(code, directory))


def prepare(scratch, directory):
    """The copy of the repository, the commands that stand for others, and the environment of the session."""
    for path in tracked():
        target = scratch / "copy" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    (scratch / "copy/target").mkdir()
    (scratch / "copy/target/release").symlink_to(directory)
    (scratch / "bin").mkdir()
    python = f'#!/bin/sh\nexec {shlex.quote(shutil.which(PYTHON))} "$@"\n'
    torchrun = python.replace('"$@"', '-m torch.distributed.run "$@"')
    for name, text in {"cargo": CARGO, "python3": python, "python": python, "torchrun": torchrun}.items():
        (scratch / "bin" / name).write_text(text)
        (scratch / "bin" / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = f"{scratch}/bin:{directory}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "DDP_", "VIRTUAL_ENV"))}
    # Not into the home of the user who runs this.
    kept["DDP_TOKEN_FILE"] = str(scratch / "token")
    return kept | {"PATH": path, "DDP_PORT": str(port), "PYTHON_EXEC": f"{scratch}/bin/python3"}


def run_page(blocks, directory):
    """Runs the blocks of a page until one fails. True if one did."""
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        scratch = pathlib.Path(folder)
        place = {"env": prepare(scratch, directory), "cwd": scratch / "copy", "start_new_session": True}
        reader, writer = os.pipe()
        script = ["set -Eeuo pipefail", FEW, """trap 'echo "failed: $BASH_COMMAND"' ERR"""]
        for number, block in enumerate(blocks):
            (scratch / f"{number}.sh").write_text(block.commands())
            # After a block the session writes a byte. Programs that go on do not hold the pipe open.
            script.append(f". {scratch}/{number}.sh </dev/null >{scratch}/{number}.out 2>&1 {writer}>&-")
            script.append(f"echo >&{writer}")
        session = subprocess.Popen(["bash", "-c", "\n".join(script)], pass_fds=[writer], **place)
        os.close(writer)
        for number, block in enumerate(blocks):
            start = time.monotonic()
            byte = select.select([reader], [], [], DEADLINE)[0] and os.read(reader, 1)
            if not byte:
                cause = f"exit code {session.wait()}" if byte == b"" else f"not done after {DEADLINE} s"
                print(f"{block.page}:{block.line}: FAILED, {cause}\n{block.commands()}  its last output:")
                lines = (scratch / f"{number}.out").read_text(errors="replace").splitlines()
                print(textwrap.indent("\n".join(lines[-15:]), "    "), flush=True)
                break
            print(f"{block.page}:{block.line}: ran in {time.monotonic() - start:.1f} s", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session.pid, signal.SIGKILL)
        session.wait()
        os.close(reader)
    return not byte


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/debug")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("pages", nargs="*")
    arguments = parser.parse_args()
    known = [path for path in tracked() if PAGES.fullmatch(path)]
    if unknown := set(arguments.pages) - set(known):
        parser.error(f"no such page: {', '.join(sorted(unknown))}")
    directory = arguments.programs.resolve()
    failures, counts = 0, collections.Counter()
    for page in arguments.pages or known:
        blocks, prose = read_page(page)
        shell = [block for block in blocks if block.language in ("sh", "bash") or block.given("file")]
        for block in shell:
            what = f"not run: {block.reason()}" if block.reason() else "run"
            counts[what] += not block.given("file")
            if arguments.list:
                print(f"{page}:{block.line}: {what}")
        mistakes = [] if arguments.list else list(check_page(blocks, prose, directory))
        failures += len(mistakes)
        for line, what in mistakes:
            print(f"{page}:{line}: {what}", flush=True)
        runnable = [block for block in shell if block.reason() is None]
        if runnable and not arguments.list:
            failures += run_page(runnable, directory)
    print("\n".join(f"{count:4} {what}" for what, count in counts.most_common()))
    sys.exit(f"{failures} failed" if failures else 0)


if __name__ == "__main__":
    main()
