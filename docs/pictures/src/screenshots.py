#!/usr/bin/env python3
"""The picture of a plot, docs/pictures/plot.png, with a headless Chromium.

    python3 docs/pictures/src/screenshots.py --run runs/single-node/RUN
"""
import argparse
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
PICTURE = ROOT / "docs/pictures/plot.png"
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,880"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=pathlib.Path, required=True, help="directory of a run")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/release")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plot = pathlib.Path(folder) / "plot.html"
        subprocess.run([args.programs / "ddp-train", "plot", args.run, "--output", plot], check=True)
        screenshot = ["--virtual-time-budget=20000", f"--screenshot={PICTURE}", plot.as_uri()]
        subprocess.run(CHROMIUM + screenshot, check=True, capture_output=True, timeout=120)
    print(PICTURE)


if __name__ == "__main__":
    main()
