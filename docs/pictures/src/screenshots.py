#!/usr/bin/env python3
"""Screenshots of README.md, of the plot of a run and of the book, with a headless Chromium.

    pip install markdown; npm pack github-markdown-css; tar xf github-markdown-css-*.tgz
    python3 docs/book.py
    python3 docs/pictures/src/screenshots.py --css package/github-markdown.css --run runs/single-node/RUN

README is rendered with GitHub's style sheet by another renderer, so that it looks as on GitHub except for small things.
The pictures go to docs/pictures: readme.png, plot.png and book.png.
"""
import argparse
import pathlib
import re
import subprocess
import tempfile

import markdown

ROOT = pathlib.Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs/pictures"
PAGE = """<!doctype html><meta charset="utf-8"><base href="file://{root}/"><style>{css}</style>
<body class="markdown-body" style="max-width: 880px; margin: auto; padding: 24px">{body}"""


def shoot(page, name, width, height):
    """A picture of the top of a page."""
    size, target = f"--window-size={width},{height}", f"--screenshot={PICTURES / name}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
    subprocess.run(["chromium", *flags, size, target, page.as_uri()], check=True, capture_output=True, timeout=120)
    print(PICTURES / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--css", type=pathlib.Path, required=True, help="GitHub's style sheet")
    parser.add_argument("--run", type=pathlib.Path, required=True, help="directory of a run")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/release")
    args = parser.parse_args()
    text = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.S)
    body = markdown.markdown(text, extensions=["tables", "fenced_code", "sane_lists"])
    with tempfile.TemporaryDirectory() as folder:
        readme, plot = pathlib.Path(folder) / "readme.html", pathlib.Path(folder) / "plot.html"
        readme.write_text(PAGE.format(root=ROOT, css=args.css.read_text(), body=body))
        shoot(readme, "readme.png", 960, 3200)
        subprocess.run([args.programs / "ddp-train", "plot", args.run, "--output", plot], check=True)
        shoot(plot, "plot.png", 1000, 880)
    shoot(ROOT / "target/book/getting-started.html", "book.png", 1200, 900)


if __name__ == "__main__":
    main()
