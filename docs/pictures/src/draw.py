#!/usr/bin/env python3
"""Draws architecture.svg and step.svg.

    python3 docs/pictures/src/draw.py                 # both; architecture needs Graphviz (`apt-get install graphviz`)
    python3 docs/pictures/src/draw.py step            # one of them
    python3 docs/pictures/src/draw.py --check step    # fails if the picture is not what this script draws

architecture.svg comes from architecture.dot, which gives every position. step.svg is drawn here: edit the times and
words in `step`. Both follow the reader's light or dark theme and paint their own background. Other versions of Graphviz
may place text differently, so `--check architecture` is for the version that drew the picture.
"""

import re
import subprocess
import sys
from html import escape
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
PICTURES = SOURCES.parent

# The classes are those of architecture.dot; the dark theme follows the light one.
ARCHITECTURE_CSS = """
text{font-family:system-ui,sans-serif;fill:#222}
.page>rect{fill:#fff}
.node path{stroke:#888;fill:none}.group path{stroke:#999;fill:none}
.daemon path{fill:#e3ecf8;stroke:#2f6db5}.agent path{fill:#e3ecf8;stroke:#2f6db5}
.guardian path{fill:#fae6e6;stroke:#b83a3a}.worker path{fill:#e4f2ea;stroke:#2f7a55}
.memory path{fill:#fbeedd;stroke:#c4741a}.words polygon{fill:#fff;stroke:none}
.control path,.control polygon{stroke:#2f6db5}.control polygon{fill:#2f6db5}
.data path,.data polygon{stroke:#c4741a}.data polygon{fill:#c4741a}
.guard path,.guard polygon{stroke:#b83a3a}.guard polygon{fill:#b83a3a}
@media (prefers-color-scheme:dark){
text{fill:#e4e4e4}
.page>rect,.words polygon{fill:#16181c}
.node path{stroke:#777}.group path{stroke:#777}
.daemon path,.agent path{fill:#1d2c40;stroke:#6ea3e0}.guardian path{fill:#3d2022;stroke:#e07a7a}
.worker path{fill:#1c3327;stroke:#63b68c}.memory path{fill:#3a2a17;stroke:#e09a4a}
.control path,.control polygon{stroke:#6ea3e0}.control polygon{fill:#6ea3e0}
.data path,.data polygon{stroke:#e09a4a}.data polygon{fill:#e09a4a}
.guard path,.guard polygon{stroke:#e07a7a}.guard polygon{fill:#e07a7a}
}
"""


def architecture():
    """Lets Graphviz draw, and replaces its header, comments and page by ours."""
    drawn = subprocess.run(
        ["neato", "-n2", "-Tsvg", str(SOURCES / "architecture.dot")], check=True, capture_output=True, text=True
    ).stdout
    width, height = re.search(r'<svg width="(\d+)pt" height="(\d+)pt"', drawn).groups()
    body = drawn[drawn.index("<g id=") :]
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.S)
    body = re.sub(r"<title>.*?</title>\n?", "", body, flags=re.S)
    body = re.sub(r' id="[^"]*"', "", body)
    # Graphviz adds the classes `graph`, `node` and `edge`; ours include a `node` too.
    body = re.sub(r'class="(?:graph|node|edge) ([a-z]+)"', r'class="\1"', body)
    body = re.sub(r'class="(?:graph|node|edge)"', "", body)
    body = body.replace('font-family="sans-serif" ', "")
    # Outside the group that Graphviz moves, so that it covers the whole picture.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        "<title>A job on two nodes: daemon, agents, guardians, workers and what connects them</title>\n"
        f"<style>{ARCHITECTURE_CSS.replace(chr(10), '')}</style>\n"
        f'<g class="page"><rect width="100%" height="100%" fill="#fff"/></g>\n{body}'
    )


STEP_CSS = """
.page{fill:#fff}text{font:12px system-ui,sans-serif;fill:#222}.quiet{fill:#555}.title{font-size:16px;font-weight:600}
.heading{font-size:14px;font-weight:600}rect{stroke:#fff;stroke-width:.8}
.in{fill:#fff;font-size:11px;text-anchor:middle}.ground{fill:#f1f1f1}.data{fill:#6f757c}.forward{fill:#4c78a8}
.backward{fill:#35795a}.wait{fill:#c9403c}.optimizer{fill:#7f5fa3}.metrics{fill:#6b6b6b}.gradients{fill:#b5641a}
.parameters{fill:#857115}.launch{stroke:#b5641a;stroke-width:1.5}
.next{fill:#dcdcdc}.later{fill:#555;font-size:11px;text-anchor:middle}
@media (prefers-color-scheme:dark){.page{fill:#16181c}text{fill:#e4e4e4}.quiet{fill:#ababab}rect{stroke:#16181c}
.in{fill:#fff}.ground{fill:#24272d}.launch{stroke:#e09a4a}.next{fill:#3a3d43}.later{fill:#ababab}}
"""


class Drawing:
    """Rectangles and words, in the order in which they are drawn."""

    def __init__(self, width, title):
        self.width = width
        self.title = title
        self.parts = []

    def rect(self, kind, x, y, width, height, words=""):
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>')
        if words:
            self.text("later" if kind == "next" else "in", x + width / 2, y + height / 2 + 4, words)

    def text(self, kind, x, y, words, anchor=""):
        anchor = f' text-anchor="{anchor}"' if anchor else ""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}"{anchor}>{escape(words)}</text>')

    def line(self, kind, x1, y1, x2, y2):
        self.parts.append(f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')

    def svg(self, css, height):
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" '
            f'width="{self.width}" height="{height}" role="img">'
        )
        page = '<rect class="page" width="100%" height="100%"/>'
        style = f"<style>{css.replace(chr(10), '')}</style>"
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, style, page, *self.parts, "</svg>"]) + "\n"


def step():
    """One step of a model of three blocks, each with a bucket of its own, under each strategy."""
    left, right = 112, 1028
    data, forward, backward = 44, 56, 112  # Times of a block; backward computes twice as much.
    all_reduce, half = 88, 44  # An all-reduce is a reduce-scatter and an all-gather.
    norm, update, shard, metrics = 64, 84, 42, 66

    def starts(first_gather=0):
        """When forward and each bucket's reduction begin, and backward between them."""
        forward_at = left + data + first_gather
        backward_at = forward_at + 3 * forward
        return forward_at, backward_at, [backward_at + (i + 1) * backward for i in range(3)]

    d = Drawing(1044, "One training step of one rank: what it computes and sends, with DDP and with ZeRO")
    d.text("title", 16, 27, "One training step, as one rank runs it")
    x = 16
    for kind, words in [
        ("forward", "forward"),
        ("backward", "backward"),
        ("wait", "waits for communication"),
        ("optimizer", "norm, clip, update"),
        ("gradients", "sends gradients"),
        ("parameters", "sends parameters"),
    ]:
        d.rect(kind, x, 42, 14, 14)
        d.text("quiet", x + 20, 53.5, words)
        x += 20 + 7.4 * len(words) + 24

    def compute(y, height, exposed, share, words, first_gather=0):
        """The lane of computing. Returns when the update ends."""
        forward_at, backward_at, ready = starts(first_gather)
        d.rect("ground", left, y, right - left, height)
        d.rect("data", left, y, data, height, "data")
        if first_gather:
            d.rect("wait", left + data, y, first_gather, height, "waits")
        for i in range(3):
            d.rect("forward", forward_at + i * forward, y, forward, height, f"block {i + 1}")
            d.rect("backward", backward_at + i * backward, y, backward, height, f"block {3 - i}")
        d.rect("wait", ready[-1], y, exposed, height, "waits")
        norm_at = ready[-1] + exposed
        d.rect("optimizer", norm_at, y, norm, height, "norm, clip")
        d.rect("optimizer", norm_at + norm, y, share, height, words)
        updated = norm_at + norm + share
        d.rect("metrics", updated, y, metrics, height, "metrics")
        begin = updated + metrics
        d.rect("next", begin, y, right - begin, height, "next step")
        return updated

    def reduce(y, height, length, words, lane_end, first_gather=0):
        """Each bucket is sent when its block's backward, in a lane that ends at `lane_end`, is over."""
        for i, at in enumerate(starts(first_gather)[2]):
            d.line("launch", at, lane_end, at, y)
            d.rect("gradients", at, y, length, height, f"{words} {3 - i}")

    def heading(y, name, *lanes):
        d.text("heading", 16, y + 17, name)
        for lane_y, words in lanes:
            d.text("quiet", left - 8, lane_y, words, "end")

    def note(y, *lines):
        for i, words in enumerate(lines):
            d.text("quiet", left, y + 16 * i, words)

    # DDP.
    y = 74
    heading(y, "ddp", (y + 52, "sends"))
    compute(y, 30, all_reduce, update, "update all")
    d.rect("ground", left, y + 36, right - left, 24)
    reduce(y + 36, 24, all_reduce, "all-reduce", y + 30)
    note(
        y + 78,
        "Each bucket of gradients is all-reduced as soon as it is full, while backward continues. The step waits for the last one.",
        "Every rank then has the same sums, makes the same update of all parameters, and holds all of the optimizer's state.",
    )

    # ZeRO-1 and ZeRO-2.
    for y, name, words in [
        (
            200,
            "zero1",
            [
                "The optimizer's state is sharded over N ranks. Gradients are reduce-scattered: each rank gets the sums of its shard,",
                "updates that shard, and the parameters are all-gathered while the next forward begins.",
            ],
        ),
        (
            312,
            "zero2",
            [
                "As zero1, and gradients are sharded too: a rank keeps the sums of its shard. The rest exists only until it is sent.",
            ],
        ),
    ]:
        heading(y, name, (y + 41, "sends"))
        updated = compute(y, 24, half, shard, "1/N")
        d.rect("ground", left, y + 28, right - left, 20)
        reduce(y + 28, 20, half, "r-s", y + 24)
        for i in range(3):
            d.rect("parameters", updated + i * half, y + 28, half, 20, f"a-g {i + 1}")
        note(y + 66, *words)

    # ZeRO-3: gathers have a communicator of their own.
    y = 408
    heading(y, "zero3", (y + 41, "parameters"), (y + 63, "gradients"))
    compute(y, 24, half, shard, "1/N", first_gather=half)
    forward_at, backward_at, _ = starts(half)
    for lane in (28, 50):
        d.rect("ground", left, y + lane, right - left, 20)
    gathers = [
        (left + data, 1),
        (forward_at, 2),
        (forward_at + forward, 3),
        (backward_at, 2),
        (backward_at + backward, 1),
    ]
    for at, block in gathers:
        d.rect("parameters", at, y + 28, half, 20, f"a-g {block}")
    reduce(y + 50, 20, half, "r-s", y + 24, half)
    note(
        y + 88,
        "As zero2, and parameters are sharded too (FSDP). Those of the next block are all-gathered while a block computes,",
        "and released after its pass. The last block keeps them from forward to backward. No gather follows the update.",
    )
    note(
        y + 132,
        "Blocks and buckets are numbered alike; r-s is a reduce-scatter, a-g an all-gather. An all-reduce is as long as both.",
        "With several micro-batches per step, forward and backward repeat. ddp and zero1 send gradients in the last one only.",
    )
    return d.svg(STEP_CSS, y + 160)


DRAWINGS = {"architecture": architecture, "step": step}


def main(arguments):
    check = "--check" in arguments
    names = [word for word in arguments if word != "--check"] or list(DRAWINGS)
    for name in names:
        path = PICTURES / f"{name}.svg"
        drawn = DRAWINGS[name]()
        if not check:
            path.write_text(drawn)
        elif path.read_text() != drawn:
            sys.exit(f"`{path}` is not what `{Path(__file__).name}` draws\nhint: run it without --check")


if __name__ == "__main__":
    main(sys.argv[1:])
