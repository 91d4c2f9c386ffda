#!/usr/bin/env python3
"""Builds the book in target/book with mdbook and checks its links.

    cargo install --locked mdbook
    python3 docs/book.py

Documents link to files outside of docs/ by relative paths, which is what GitHub shows. In the book these become links to the
repository. Every other link, its anchor included, must exist in the book. Exit code 1 if one does not.
"""
import html.parser
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS, BOOK = ROOT / "docs", ROOT / "target/book"
REPOSITORY = "https://github.com/ddp-run/ddp-run/blob/main"
# Not part of the book: scripts and sources of pictures, and mdbook's own files.
SOURCES = ("*.py", "*.cast", "*.dot", "book.toml", "SUMMARY.md")
# Pages that repeat others.
REPEATED = ("print.html", "toc.html", "404.html")


class Page(html.parser.HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.add(values.get("id"))
        self.links += [values[key] for key in ("href", "src") if values.get(key)]


def outside(page, link):
    """The file of the repository outside of docs/ that a link of a page names, if it names one."""
    path, _, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:|/", path):
        return None
    target = (DOCS / page.relative_to(BOOK).parent / path).resolve()
    # mdbook writes .html for every .md.
    if target.suffix == ".html" and not target.exists():
        target = target.with_suffix(".md")
    if target.is_relative_to(DOCS):
        return None
    return target, anchor


def rewrite(page):
    """Links to the repository instead of files that the book lacks. Returns what is wrong."""
    text, wrong = page.read_text(), []

    def replace(match):
        found = outside(page, match.group(2))
        if found is None:
            return match.group(0)
        target, anchor = found
        if not target.exists():
            wrong.append(match.group(2))
            return match.group(0)
        path = f"{REPOSITORY}/{target.relative_to(ROOT)}" + (f"#{anchor}" if anchor else "")
        return f'{match.group(1)}="{path}"'

    page.write_text(re.sub(r'(href)="([^"]+)"', replace, text))
    return wrong


def main():
    subprocess.run(["mdbook", "build", DOCS], check=True)
    for pattern in SOURCES:
        for source in BOOK.rglob(pattern):
            source.unlink()
    pages = [page for page in BOOK.rglob("*.html") if page.name not in REPEATED]
    wrong = [(page, link) for page in pages for link in rewrite(page)]
    parsed = {page: Page(page.read_text()) for page in pages}
    for page, content in parsed.items():
        for link in content.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|/", link):
                continue
            target = pathlib.Path(os.path.normpath(page.parent / path)) if path else page
            known = parsed.get(target)
            if not target.exists() or (anchor and known and anchor not in known.anchors):
                wrong.append((page, link))
    for page, link in wrong:
        print(f"error: {page.relative_to(BOOK)}: `{link}` does not exist", file=sys.stderr)
    print(f"{len(pages)} pages in {BOOK}, {len(wrong)} broken links")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
