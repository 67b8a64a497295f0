"""Count the hand-written words of each page, and name the sentences that are too long.

python docs/scripts/words.py [PAGE ...]

Code blocks, what ``docs/scripts/generate.py`` writes, and the tables of docs/claims_in_detail.md do not count. Without
arguments, the pages are README.md, CONTRIBUTING.md and docs/*.md.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LONGEST = 40  # words in a sentence
WITH_GENERATED_TABLES = "claims_in_detail.md"  # its prose is typed in results/studies/night/claims_in_detail.py

CODE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- (?:keys|records|house)\b[^>]*-->\n.*?<!-- end -->", re.DOTALL)
TABLE = re.compile(r"^\|.*\n", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")  # its text is read, its address is not
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[\"'`*(\[]*[A-Z0-9`])")


def pages() -> list[Path]:
    """The pages whose words are counted."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(text: str) -> str:
    """A page's Markdown without code, generated parts, comments and the addresses of links."""
    for left_out in (GENERATED, CODE, COMMENT):
        text = left_out.sub("", text)
    return LINK.sub(r"\1", text)


def by_hand(path: Path) -> str:
    """The prose of a page that is typed."""
    text = prose(path.read_text(encoding="utf-8"))
    return TABLE.sub("", text) if path.name == WITH_GENERATED_TABLES else text


def words(text: str) -> int:
    """The number of words, each with a letter or a digit: signs such as ``|`` and ``-`` are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's prose; a heading, an item of a list and a cell of a table end one."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) |\||#)", text):
        cells = paragraph.split("|") if paragraph.lstrip().startswith("|") else [paragraph]
        for cell in cells:
            yield from (sentence for sentence in END_OF_SENTENCE.split(" ".join(cell.split())) if sentence)


def too_long(text: str) -> list[str]:
    """The sentences with more than ``LONGEST`` words."""
    return [sentence for sentence in sentences(text) if words(sentence) > LONGEST]


def main(paths: list[Path]) -> None:
    total = 0
    for path in paths:
        text = by_hand(path)
        total += words(text)
        print(f"{words(text):6,}  {path.relative_to(ROOT)}")
        for sentence in too_long(text):
            print(f"        {words(sentence)} words: {sentence[:100]}...")
    print(f"{total:6,}  in all")


if __name__ == "__main__":
    main([Path(path).resolve() for path in sys.argv[1:]] or pages())
