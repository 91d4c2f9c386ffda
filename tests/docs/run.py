#!/usr/bin/env python3
"""Runs the shell commands of README.md, docs/ and the READMEs of examples/ and deploy/, and checks their flags.

    tests/docs/run.py --programs target/debug                  all pages
    tests/docs/run.py --programs target/debug docs/metrics.md  some pages by name
    tests/docs/run.py --list                                   which block is run, and why the others are not

Shell commands are indented blocks and fences of `sh` or `bash`. Everything else is a fence with another language, such
as `text` for output. The blocks of a page run in order, in one bash session with `set -Eeuo pipefail`. The session
starts in the root of a copy of the tracked files. A page says the rest in comments above a block, which readers do not
see:

    <!-- not run: needs Slurm -->              the block is not run; the reason is concrete
    <!-- run by: tests/it/a.rs::name -->       a test runs it; the file, and the function in it, must exist
    <!-- needs: torch -->                      the block is run if `python3` can import this module
    <!-- first: cp a.txt b.txt -->             a command that is run before the block; may be repeated
    <!-- file: train.yaml -->                  above a fence of any language: it is saved in this file

`target/release` in the copy is the directory given with --programs, and `cargo` there builds nothing: it checks that a
program is there, and `cargo run --release --` is `ddp-run`. `python3` is $PYTHON. Flags of `ddp-run`, `ddp-train` and
`ddp-rendezvous` must be in their `--help`, and keys after `--set` in docs/configuration.md. This is checked for all
blocks, and for code within paragraphs. The exit code is 1 if anything fails.
"""
import argparse
import collections
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
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = re.compile(r"README\.md|docs/[^/]+\.md|(examples|deploy)/(.+/)?README\.md")
COMMENT = re.compile(r"\s*<!-- (not run|run by|needs|first|file): (.+) -->")
PROGRAMS = ("ddp-run", "ddp-train", "ddp-rendezvous")
PYTHON = os.environ.get("PYTHON", "python3")
# Seconds for a block.
DEADLINE = 120
CARGO = """#!/bin/bash
set -eu
case "$*" in
    "run --release -- "*) exec ddp-run "${@:4}" ;;
    "build --release"*) ;;
    *) echo "the cargo of tests/docs/run.py does not know: cargo $*" >&2; exit 2 ;;
esac
for word in "${@:3}"; do
    [[ $word == -* || -x $TARGET/$word ]] || { echo "$word was not built in $TARGET" >&2; exit 1; }
done
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
        missing = [f"python3 has no {module}" for module in self.given("needs") if not has_module(module)]
        named = [f"run by {text}" for text in self.given("run by")]
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
        is_indented = line.startswith("    ") and (at == 0 or not lines[at - 1].strip())
        if comment := COMMENT.fullmatch(line):
            comments.append(comment.groups())
        elif not fence and not is_indented:
            comments = comments if not line.strip() else []
        if not fence and not is_indented:
            prose.append(line)
            at += 1
            continue
        if fence:
            at = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == "```") + 1
            code, language = lines[start + 1 : at - 1], fence[1]
        else:
            # Blank lines belong to the block if it goes on behind them.
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            while not lines[at - 1].strip():
                at -= 1
            code, language = lines[start:at], "sh"
        indent = min((len(line) - len(line.lstrip()) for line in code if line.strip()), default=0)
        code = "\n".join(line[indent:] for line in code)
        blocks.append(Block(page, start + 1, language, code, comments))
        prose += [""] * (at - start)
        comments = []
    return blocks, "\n".join(prose)


@functools.cache
def help_of(directory, *words):
    return subprocess.run([directory / words[0], *words[1:], "--help"], capture_output=True, text=True).stdout


@functools.cache
def configuration_keys():
    return set(re.findall(r"`([\w.]+)`", (ROOT / "docs/configuration.md").read_text()))


def wrong_flags(line, directory):
    """Flags and keys on a command line that do not exist."""
    lexer = shlex.shlex(line.replace("cargo run --release --", "ddp-run"), posix=True, punctuation_chars=True)
    try:
        words = list(lexer)
    except ValueError:
        words = line.split()
    for start, word in enumerate(words):
        if pathlib.Path(word).name not in PROGRAMS or words[start - 1] in ("-p", "--binary"):
            continue
        command = [pathlib.Path(word).name]
        for at in range(start + 1, len(words)):
            word, text = words[at], help_of(directory, *command)
            if word == "--" or set(word) <= set("();<>|&") or word in ("-m", "--module"):
                break
            if command[0] == "ddp-run" and re.search(r"\.(py|sh)$", word):
                break  # what follows belongs to the script
            if len(command) == at - start and re.search(rf"^  {re.escape(word)}  ", text, re.MULTILINE):
                command.append(word)
            flag = word.split("=")[0].replace("_", "-")
            if re.fullmatch(r"-[a-z]|--[a-z].*", flag) and not re.search(rf"(?<![\w-]){flag}(?![\w-])", text):
                yield f"`{' '.join(command)}` has no flag `{word}`"
            if word == "--set" and at + 1 < len(words) and "=" in words[at + 1]:
                key = words[at + 1].split("=")[0]
                if key not in configuration_keys() | {"KEY", "section.key"}:
                    yield f"docs/configuration.md has no key `{key}`"


def check_page(blocks, prose, directory):
    """Mistakes that are seen without running anything, as (line, what)."""
    for block in blocks:
        for kind, text in block.comments:
            path, _, name = text.partition("::")
            file = ROOT / path
            if kind == "run by" and not (file.is_file() and re.search(rf"(fn|def) {name}\b|^$", file.read_text() if name else "")):
                yield block.line, f"`{text}` does not exist"
        if not block.language:
            yield block.line, "a fence without a language: `sh`, or `text` for output"
        joined = re.sub(r"\\\n\s*", " ", block.text).split("\n")
        for number, line in enumerate(joined):
            yield from ((block.line, wrong) for wrong in wrong_flags(line, directory))
    for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
        code = " ".join(span[1].split())
        code = f"ddp-run {code}" if code.startswith("--set ") else code
        line = prose.count("\n", 0, span.start()) + 1
        yield from ((line, wrong) for wrong in wrong_flags(code, directory))


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


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
    own = {"PATH": f"{scratch}/bin:{directory}:{os.environ['PATH']}", "TARGET": str(directory)}
    own |= {"DDP_PORT": str(free_port()), "PYTHON_EXEC": str(scratch / "bin/python3")}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "DDP_", "VIRTUAL_ENV"))}
    return kept | own


def run_page(blocks, directory):
    """Runs the blocks of a page until one fails. Returns how many failed: 0 or 1."""
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        scratch = pathlib.Path(folder)
        environment = prepare(scratch, directory)
        reader, writer = os.pipe()
        script = ["set -Eeuo pipefail", """trap 'echo "failed: $BASH_COMMAND"' ERR"""]
        for number, block in enumerate(blocks):
            (scratch / f"{number}.sh").write_text(block.commands())
            script.append(f". ../{number}.sh </dev/null >../{number}.out 2>&1 {writer}>&-")
            script[-1] = script[-1].replace("../", f"{scratch}/")
            script.append(f"echo >&{writer}")
        session = subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=scratch / "copy", env=environment, pass_fds=[writer], start_new_session=True, stdin=subprocess.DEVNULL,
        )
        os.close(writer)
        try:
            for number, block in enumerate(blocks):
                start = time.monotonic()
                if select.select([reader], [], [], DEADLINE)[0] and os.read(reader, 1):
                    print(f"{block.page}:{block.line}: ran in {time.monotonic() - start:.1f} s", flush=True)
                    continue
                is_late = time.monotonic() - start >= DEADLINE
                cause = f"not done after {DEADLINE} s" if is_late else f"exit code {session.wait(10)}"
                print(f"{block.page}:{block.line}: FAILED, {cause}\n{block.commands()}  its last output:")
                lines = (scratch / f"{number}.out").read_text(errors="replace").splitlines()[-15:]
                print("\n".join(f"    {line}" for line in lines), flush=True)
                return 1
        finally:
            try:
                os.killpg(session.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            session.wait()
            os.close(reader)
    return 0


def main():
    parser = argparse.ArgumentParser(description="Run the commands of the documents.")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/debug", help="directory of ddp-run")
    parser.add_argument("--list", action="store_true", help="list the blocks, run nothing")
    parser.add_argument("pages", nargs="*", help="pages, such as docs/metrics.md [default: all]")
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
            reason = block.reason()
            counts["run" if reason is None else f"not run: {reason}"] += not block.given("file")
            if arguments.list:
                print(f"{page}:{block.line}: {'run' if reason is None else f'not run: {reason}'}")
        if arguments.list:
            continue
        for line, what in check_page(blocks, prose, directory):
            print(f"{page}:{line}: {what}", flush=True)
            failures += 1
        if runnable := [block for block in shell if block.reason() is None]:
            failures += run_page(runnable, directory)
    print("\n".join(f"{count:4} {what}" for what, count in counts.most_common()))
    sys.exit(f"{failures} failed" if failures else 0)


if __name__ == "__main__":
    main()
