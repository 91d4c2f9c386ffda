#!/usr/bin/env python3
"""Records killed-rank.svg: two ranks train, one is killed, the job restarts, and ends with the bits of a calm run.

To re-record it, run this on an otherwise idle machine (a minute on two cores), from the repository's root:

    python3 docs/pictures/src/record.py target/release/ddp-run

Other uses:

    python3 docs/pictures/src/record.py --render          # draws the picture again from killed-rank.cast
    python3 docs/pictures/src/record.py --check           # fails if the picture is not what --render draws
    python3 docs/pictures/src/record.py --frame 9.5 > x.svg    # the still picture after 9.5 s, to look at

Recording trains in `/tmp/demo`: first a run that nobody disturbs, which is not shown, then the same in a terminal (a
pty) of 80 columns. There, rank 1 is killed with SIGKILL some steps after a checkpoint. A shell then compares the
parameters of both. What the terminal receives, and when, goes to killed-rank.cast, which is an asciinema file
(version 2), so `asciinema play` replays it. Its markers are the kill, the restart and the comparison.

The picture renders this file with a small terminal emulator. It is an SVG with CSS animations: no script, no link, no
embedded font. Viewers without animation (`prefers-reduced-motion`, rsvg-convert) show the end. Its title bar says by
how much it is faster than the run was; pauses are cut shorter still. Nothing here depends on the wording that ddp-run
prints, except that a recording with a warning is refused: it would be what people look at.
"""

import argparse
import codecs
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import termios
import time
import xml.etree.ElementTree as ElementTree
from html import escape
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
ROOT = SOURCES.parents[2]
CAST = SOURCES / "killed-rank.cast"
PICTURE = SOURCES.parent / "killed-rank.svg"

COLUMNS, ROWS = 80, 24
STEPS, CHECKPOINT_EVERY, KILL_AFTER = 300, 50, 120
# What a person would have typed: the run, and what is shown of it when it has ended.
RUN = ["ddp-run", "--nproc-per-node", "2", "train.yaml", "--set", "run.out_dir=killed"]
COMPARE = f"b2sum -l 40 */checkpoints/step_{STEPS:08}/parameters*"
SETTINGS = {
    "steps: 600": f"steps: {STEPS}",
    "checkpoint_every: 100": f"checkpoint_every: {CHECKPOINT_EVERY}",
    "../data/python-reference.txt": "python-reference.txt",
}
# It must not exist.
DIRECTORY = Path("/tmp/demo")
RECORDING_BOUND_S = 300

# The recording ----------------------------------------------------------------------------------------------------


def record(binary):
    """Runs the example and writes the cast."""
    try:
        DIRECTORY.mkdir()
    except FileExistsError:
        sys.exit(f"`{DIRECTORY}` exists: the example is run there\nhint: remove it")
    try:
        shutil.copy(ROOT / "examples/data/python-reference.txt", DIRECTORY)
        (DIRECTORY / "train.yaml").write_text(configuration())
        run(binary, [*RUN[:-1], "run.out_dir=calm"], kills=False)
        events = run(binary, RUN, kills=True)
        compared = events[-1][0]
        events.append((compared, "m", "compare"))
        events += [(compared + at, *what) for at, *what in run("/bin/bash", ["bash", "-c", COMPARE], kills=False)]
    finally:
        shutil.rmtree(DIRECTORY)
    shown = "".join(data for _, kind, data in events if kind == "o")
    sums = re.findall(r"^([0-9a-f]{10})  \w+/\S+-(\d)-of-", shown, re.M)
    if "warning" in shown or len(sums) != 4 or len(set(sums)) != 2:
        sys.exit(f"{shown}\na warning, or sums that differ ({sums}): not what the picture shows\nhint: record it again")
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "ddp-run: a rank is killed, the job restarts"}
    lines = [header, *([round(at, 3), kind, data] for at, kind, data in events)]
    CAST.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def configuration():
    """The example with fewer steps and more checkpoints."""
    text = (ROOT / "examples/single-node/train.yaml").read_text()
    for old, new in SETTINGS.items():
        if text.count(old) != 1:
            sys.exit(f"examples/single-node/train.yaml has no `{old}`\nhint: change `SETTINGS` in {__file__}")
        text = text.replace(old, new)
    return text


def run(program, command, kills):
    """What the terminal receives, as (seconds, kind, data), and the markers."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(DIRECTORY)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        environment = {**kept, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        os.execve(program, command, environment)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    start = time.monotonic()
    typed = command[-1] if command[0] == "bash" else " ".join(command)
    events = [(0.0, "o", f"\x1b[1m$ {typed}\x1b[0m\r\n")]
    killed = restarted = None
    while True:
        at = time.monotonic() - start
        if at > RECORDING_BOUND_S:
            os.kill(child, signal.SIGTERM)
            sys.exit(f"the run did not end within {RECORDING_BOUND_S} s")
        if kills and killed is None and finished_steps() >= KILL_AFTER:
            killed = worker_of_rank(1, child)
            if killed:
                os.kill(killed, signal.SIGKILL)
                events.append((at, "m", f"kill {killed}"))
        elif killed and restarted is None:
            restarted = worker_of_rank(1, child, other_than=killed)
            if restarted:
                events.append((at, "m", "restart"))
        if select.select([terminal], [], [], 0.01)[0]:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # The other end is closed.
                data = b""
            if not data:
                break
            events.append((time.monotonic() - start, "o", decode(data)))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0 or kills and not restarted:
        said = "".join(data for _, kind, data in events if kind == "o")
        sys.exit(f"{said}\nexit code {code}, killed {killed}, restarted {restarted}: not what the picture shows")
    return events


def finished_steps():
    """Lines of the metrics of the run that is shown."""
    file = DIRECTORY / "killed/metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def worker_of_rank(rank, launcher, other_than=None):
    """Process id of a worker that this launcher started, if it has one."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == other_than:
            continue
        try:
            parent = int(re.search(r"^PPid:\s*(\d+)", (entry / "status").read_text(), re.M)[1])
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    return None


# The terminal -----------------------------------------------------------------------------------------------------

SEQUENCE = re.compile(
    r"\x1b\[(?P<private>[?>=]?)(?P<numbers>[\d;]*)(?P<name>[@-~])"  # CSI
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|\x1b[^\[\]]"
)
# One that the next read continues.
BEGUN = re.compile(r"\x1b(?:\[[?>=]?[\d;]*|\][^\x07\x1b]*\x1b?)?$")
PLAIN = ""


class Terminal:
    """What is on the screen and above it. Rows are counted from the first line ever printed."""

    def __init__(self):
        self.rows = [[]]
        self.row = self.column = 0
        self.style = PLAIN
        self.begun = ""

    def top(self):
        """The first row on the screen."""
        return max(0, len(self.rows) - ROWS)

    def feed(self, text):
        text, self.begun, at = self.begun + text, "", 0
        while at < len(text):
            if BEGUN.match(text, at):
                self.begun = text[at:]
                return
            sequence = SEQUENCE.match(text, at)
            if sequence:
                at = sequence.end()
                if sequence["name"] and not sequence["private"]:
                    numbers = [int(n or 0) for n in sequence["numbers"].split(";")]
                    self.control(sequence["name"], numbers)
                continue
            self.put(text[at])
            at += 1

    def put(self, char):
        if char == "\n":
            self.row += 1
        elif char == "\r":
            self.column = 0
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char >= " ":
            if self.column == COLUMNS:
                self.row, self.column = self.row + 1, 0
            self.grow()
            line = self.rows[self.row]
            line.extend([(" ", PLAIN)] * (self.column + 1 - len(line)))
            line[self.column] = (char, self.style)
            self.column += 1
        self.grow()

    def grow(self):
        while len(self.rows) <= self.row:
            self.rows.append([])

    def control(self, name, numbers):
        count = max(1, numbers[0])
        line = self.rows[self.row]
        if name == "A":
            self.row = max(self.top(), self.row - count)
        elif name == "B":
            self.row = min(len(self.rows) - 1, self.row + count)
        elif name == "C":
            self.column = min(COLUMNS - 1, self.column + count)
        elif name == "D":
            self.column = max(0, self.column - count)
        elif name == "G":
            self.column = count - 1
        elif name == "H":
            self.row = self.top() + count - 1
            self.column = max(1, (numbers + [0])[1]) - 1
            self.grow()
        elif name == "K":
            if numbers[0] == 0:
                del line[self.column :]
            else:
                end = len(line) if numbers[0] == 2 else min(len(line), self.column + 1)
                line[:end] = [(" ", PLAIN)] * end
        elif name == "J" and numbers[0] == 0:
            del line[self.column :]
            for below in self.rows[self.row + 1 :]:
                below.clear()
        elif name == "m":
            self.style = styled(self.style, numbers)

    def lines(self):
        """Each row as runs of one style: ((style, text), …)."""
        return [runs(line) for line in self.rows]


def styled(style, numbers):
    """The classes after a sequence of SGR: `b` bold, `d` dim, `c1` to `c7` colours (bright ones are the same)."""
    classes = set(style.split())
    for number in numbers:
        if number == 0:
            classes.clear()
        elif number in (1, 2):
            classes.add("bd"[number - 1])
        elif number == 22:
            classes -= {"b", "d"}
        elif number // 10 in (3, 9):
            classes = {name for name in classes if not name.startswith("c")}
            if 1 <= number % 10 <= 7:
                classes.add(f"c{number % 10}")
    return " ".join(sorted(classes))


def runs(line):
    found = []
    for char, style in line:
        if found and found[-1][0] == style:
            found[-1][1].append(char)
        else:
            found.append((style, [char]))
    found = [(style, "".join(chars)) for style, chars in found]
    while found and not found[-1][1].strip():
        found.pop()
    if found:
        found[-1] = (found[-1][0], found[-1][1].rstrip())
    return tuple(found)


# The time of the picture --------------------------------------------------------------------------------------------

# Seconds of the picture.
TRAINING_S = 9.0  # All of the run, but for the pauses below.
LONGEST_GAP_S = 0.6  # Nothing is printed for longer than this.
PROMPT_S = 1.5  # After a command is typed.
KILL_S = 2.0  # Between the kill and what it causes.
READ_S = 3.0  # After the first line that it causes.
END_S = 3.0  # When the run has ended.
LAST_S = 5.5  # At the end.
TICK_S = 0.15  # Between two pictures.


def faster(events):
    """By how much the run is faster in the picture than it was."""
    return max(1.0, events[-1][0] / TRAINING_S)


def play(events):
    """The events with the picture's times, and its length."""
    played, now, before = [], 0.0, 0.0
    killed = told = False
    for i, (at, kind, data) in enumerate(events):
        if i > 0:
            now += min((at - before) / faster(events), LONGEST_GAP_S)
        if kind == "m" and data == "compare":
            now += END_S
        before = at
        played.append((now, kind, data))
        if i == 0 or events[i - 1][1:] == ("m", "compare"):
            now += PROMPT_S
        elif kind == "m" and data.startswith("kill"):
            now += KILL_S
            killed = True
        elif killed and not told and kind == "o" and is_line(data):
            now += READ_S
            told = True
    return played, now + LAST_S


def is_line(data):
    """A line was printed, and not only a bar drawn anew."""
    return "\n" in data


def screens(played):
    """By row its contents [(from, runs)], and where the screen begins [(from, row)]; at most one each TICK_S."""
    terminal = Terminal()
    history, tops = [], [(0.0, 0)]
    i = 0
    while i < len(played):
        now = played[i][0]
        while i < len(played) and played[i][0] < now + TICK_S:
            is_marker = played[i][1] == "m"
            if not is_marker:
                terminal.feed(played[i][2])
            i += 1
            if is_marker:
                break
        for row, line in enumerate(terminal.lines()):
            if row == len(history):
                history.append([(now, ())])
            if history[row][-1][1] != line:
                history[row].append((now, line))
        if tops[-1][1] != terminal.top():
            tops.append((now, terminal.top()))
    return history, tops


# The picture ------------------------------------------------------------------------------------------------------

FONT_PX, LINE_PX, MARGIN_PX, BAR_PX = 14, 19, 14, 30
COLUMN_PX = FONT_PX * 0.602
SCREEN_WIDTH = round(COLUMNS * COLUMN_PX)
WIDTH = SCREEN_WIDTH + 2 * MARGIN_PX
SCREEN_HEIGHT = ROWS * LINE_PX + 6
CAPTION_TOP, CAPTION_PX = BAR_PX + SCREEN_HEIGHT + 2 * MARGIN_PX - 6, 48
HEIGHT = CAPTION_TOP + CAPTION_PX
BASELINE_PX = 14
BOUND_BYTES = 60_000

CSS = """
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#dfe3e8;white-space:pre}
.frame{fill:#16181c;stroke:#6b7078}.bar{fill:#2b2f36}
.name{font:13px system-ui,sans-serif;fill:#a9b0b9}.said{font:600 20px system-ui,sans-serif;fill:#ffd479}
.typed{font-size:20px;font-weight:700;fill:#ff8080}
.mark{fill:#6b2323}.b{font-weight:700}.d{fill:#98a0aa}
.c1{fill:#ff8080}.c2{fill:#86d993}.c3{fill:#f0cd6b}.c4{fill:#86b8ff}.c5{fill:#d9a3f0}.c6{fill:#74d3d8}.c7{fill:#fff}
"""


class Animation:
    """CSS that shows things from one time to another, over and over; without it, what is there at the end."""

    def __init__(self, length, still):
        self.length = length
        self.still = still
        self.rules = {}

    def percent(self, at):
        return f"{100 * at / self.length:.2f}".rstrip("0").rstrip(".") + "%"

    def shown(self, begin, end):
        """Attributes of what is there from `begin` to `end` (None: to the end of the picture). None: never."""
        if self.still is not None:
            return "" if begin <= self.still and (end is None or self.still < end) else None
        if begin <= 0 and end is None:
            return ""
        name = self.rules.setdefault((begin, end), f"k{len(self.rules)}")
        return f' class="{name}"'

    def css(self, tops):
        """All rules, and those that scroll the screen."""
        last = f"translateY({-tops[-1][1] * LINE_PX}px)"
        if self.still is not None:
            top = [row for at, row in tops if at <= self.still][-1]
            return f".s{{transform:translateY({-top * LINE_PX}px)}}"
        out = []
        names = ",".join(f".{name}" for name in self.rules.values())
        rule = f"{self.length:.2f}s step-end infinite"
        out.append(f"{names}{{animation:{rule}}}")
        for (begin, end), name in self.rules.items():
            steps = ["0%{visibility:hidden}"] if begin > 0 else []
            steps.append(f"{self.percent(begin)}{{visibility:visible}}")
            if end is not None:
                steps.append(f"{self.percent(end)},to{{visibility:hidden}}")
                out.append(f".{name}{{visibility:hidden}}")
            else:
                # A loop of `step-end` shows its last value for no time: it must be given before.
                steps.append("to{visibility:visible}")
            out.append(f".{name}{{animation-name:{name}}}@keyframes {name}{{{''.join(steps)}}}")
        scroll = "".join(f"{self.percent(at)}{{transform:translateY({-row * LINE_PX}px)}}" for at, row in tops)
        out.append(f".s{{transform:{last};animation:s {rule}}}@keyframes s{{{scroll}to{{transform:{last}}}}}")
        out.append("@media (prefers-reduced-motion:reduce){*{animation:none!important}}")
        return "".join(out)


def render(events, still=None):
    """The picture; `still`: as it is after so many seconds."""
    played, length = play(events)
    history, tops = screens(played)
    animation = Animation(length, still)
    markers = {data.split()[0]: (at, data) for at, kind, data in played if kind == "m"}
    (kill_at, kill), (restart_at, _), (compare_at, _) = [markers[name] for name in ("kill", "restart", "compare")]
    done_at = compare_at - END_S

    screen = []
    told = first_line_after(history, kill_at)
    if told is not None:
        row, count, at = told
        shown = animation.shown(at, None)
        if shown is not None:
            classes = "mark" if not shown else "mark " + shown.split('"')[1]
            place = f'x="-6" y="{row * LINE_PX}" width="{SCREEN_WIDTH + 12}" height="{count * LINE_PX}"'
            screen.append(f'<rect class="{classes}" {place}/>')
    for row, versions in enumerate(history):
        for (begin, line), (end, _) in zip(versions, [*versions[1:], (None, ())]):
            shown = animation.shown(begin, end) if line else None
            if shown is not None:
                screen.append(
                    f'<text{shown} y="{row * LINE_PX + BASELINE_PX}"{stretched(line)}>{marked_up(line)}</text>'
                )

    phases = [
        (0.0, "two ranks train a GPT"),
        (kill_at, ("another terminal: ", f"kill -9 {kill.split()[1]}")),
        *([(told[2], "ddp-run names it and restarts both ranks")] if told else []),
        (restart_at, "both ranks resume from the last checkpoint"),
        (done_at, "done"),
        (compare_at, "the same bits as a run that nobody disturbed"),
    ]
    captions = []
    for (begin, words), (end, _) in zip(phases, [*phases[1:], (None, "")]):
        shown = animation.shown(begin, end)
        if shown is not None:
            if isinstance(words, tuple):
                words = f'{words[0]}<tspan class="typed">{words[1]}</tspan>'
            captions.append(
                f'<g{shown}><text class="said" x="{WIDTH / 2:g}" y="{HEIGHT - 17}" text-anchor="middle">{words}</text></g>'
            )
    speed = faster(events)
    name = "terminal" if speed < 1.05 else f"terminal, {speed:.1f} × as fast as it was"

    title = "A rank of two is killed with SIGKILL; ddp-run restarts the job, which ends with the bits of an undisturbed run"
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"',
            f' role="img" xml:space="preserve"><title>{title}</title>',
            f"<style>{CSS.replace(chr(10), '')}{animation.css(tops)}</style>\n",
            f'<rect class="frame" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
            f'<path class="bar" d="M1 {BAR_PX}V8.5q0-7.5 7.5-7.5H{WIDTH - 8.5}q7.5 0 7.5 7.5V{BAR_PX}z"/>',
            f'<path class="bar" d="M1 {CAPTION_TOP}V{HEIGHT - 8.5}q0 7.5 7.5 7.5H{WIDTH - 8.5}q7.5 0 7.5-7.5V{CAPTION_TOP}z"/>',
            f'<text class="name" x="{MARGIN_PX}" y="20">{name}</text>',
            *captions,
            f'\n<svg x="{MARGIN_PX - 6}" y="{BAR_PX + MARGIN_PX - 4}" width="{SCREEN_WIDTH + 12}" height="{SCREEN_HEIGHT}"',
            f' viewBox="-6 0 {SCREEN_WIDTH + 12} {SCREEN_HEIGHT}" overflow="hidden"><g class="s">\n',
            "\n".join(screen),
            "\n</g></svg></svg>\n",
        ]
    )


def first_line_after(history, at):
    """First row, number of rows and time of the first line that is printed after `at` and stays."""
    found = [
        (versions[-1][0], row) for row, versions in enumerate(history) if versions[-1][1] and versions[-1][0] > at
    ]
    if not found:
        return None
    begin, row = min(found)
    count = 1
    while sum(len(text) for _, text in history[row + count - 1][-1][1]) == COLUMNS and row + count < len(history):
        count += 1
    return row, count, begin


def stretched(line):
    """Blocks of a bar may come from a font of a different width."""
    text = "".join(text for _, text in line)
    if all(char < "\u2500" for char in text):
        return ""
    return f' textLength="{len(text) * COLUMN_PX:.0f}" lengthAdjust="spacingAndGlyphs"'


def marked_up(line):
    return "".join(
        f'<tspan class="{style}">{escape(text, False)}</tspan>' if style else escape(text, False)
        for style, text in line
    )


def checked(picture):
    """Fails if a picture is too large, or may not be shown by a browser as an image."""
    size = len(picture.encode())
    if size >= BOUND_BYTES:
        sys.exit(f"`{PICTURE.name}` has {size} bytes, {BOUND_BYTES} are allowed\nhint: raise TICK_S")
    for element in ElementTree.fromstring(picture).iter():
        name = element.tag.split("}")[-1]
        references = [value for key, value in element.attrib.items() if key.split("}")[-1] in ("href", "src")]
        if name in ("script", "foreignObject", "image") or references:
            sys.exit(f"`{PICTURE.name}` has a `{name}` {references}")
    if "url(" in picture or "@import" in picture:
        sys.exit(f"`{PICTURE.name}` refers to something outside")
    return picture


def load():
    with CAST.open() as lines:
        next(lines)
        return [tuple(json.loads(line)) for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("binary", nargs="?", type=Path, help="ddp-run, built with --release: record, then draw")
    what.add_argument("--render", action="store_true", help="draw the recording again")
    what.add_argument("--check", action="store_true", help="compare the picture with the recording")
    what.add_argument("--frame", type=float, metavar="SECONDS", help="print a still picture")
    arguments = parser.parse_args()
    if arguments.binary:
        record(arguments.binary.resolve())
    events = load()
    if arguments.frame is not None:
        sys.stdout.write(render(events, arguments.frame))
        return
    picture = checked(render(events))
    if not arguments.check:
        PICTURE.write_text(picture)
        print(f"{PICTURE}: {len(picture.encode())} bytes, {play(events)[1]:.1f} s")
    elif PICTURE.read_text() != picture:
        sys.exit(f"`{PICTURE}` is not what `--render` draws\nhint: python3 {sys.argv[0]} --render")


if __name__ == "__main__":
    main()
