"""What tests read on the pages: blocks of code, tables, figures, and numbers in sentences."""

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


NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def numbers_beside(text, *names):
    """The numbers, as they are written, in those sentences of a text that have all of ``names``.

    Tests of numbers in prose need not repeat its words: ``"0.05" in numbers_beside(text, "NCM", "in a row")``.
    """
    sentences = re.split(r"(?<=[.!?])\s+|\n\s*\n|\n(?=[-|#])", text)
    in_one_line = [" ".join(sentence.split()) for sentence in sentences]
    chosen = [sentence for sentence in in_one_line if all(name in sentence for name in names)]
    return NUMBER.findall("\n".join(chosen))
