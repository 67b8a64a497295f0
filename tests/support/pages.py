"""What several tests share: see ``test_docs.py``."""

import html
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def blocks(page):
    return [match.groups() for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))]


def shown_in(image):
    """The data that a figure shows, from its description."""
    svg = image.read_text(encoding="utf-8")
    return json.loads(html.unescape(re.search(r"<dc:description>(.*?)</dc:description>", svg, re.DOTALL)[1]))


def rows_after(page, mark):
    """(header, rows) of the first table after ``mark`` on a page."""
    table = re.search(r"(?:^\|.*\|\n)+", page.read_text().partition(mark)[2], re.MULTILINE)[0].strip()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n"))
    return header, rows
