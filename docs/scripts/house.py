"""Draw the house in docs/development.md: which room of the package imports which, and what each is.

python docs/scripts/house.py
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "development.md"
PACKAGE = ROOT / "pycil_wsc"
IMAGE = ROOT / "docs" / "images" / "house.svg"
START, END = "<!-- house -->\n", "<!-- end -->"

Place = tuple[str, int]  # a room, or an arrow on its way, and the level
WIDTH, FLOOR, HALF = 640, 72, 16  # pixels: of the picture, from level to level, half a box
ROUNDS = 20  # of sorting the levels; the order no longer changes
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" style="background: white">
<style>
polyline {{ fill: none; stroke: #888 }}
rect {{ fill: #e8eaf6; stroke: #3f51b5 }}
text {{ text-anchor: middle; fill: #111; font: 15px sans-serif }}
</style>
<marker id="end" orient="auto" markerWidth="8" markerHeight="8" refX="2" refY="4">
<path d="M0,0 L7,4 L0,8" fill="#888"/>
</marker>
"""


def rooms() -> list[str]:
    """The folders of the package."""
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def imported(path: Path) -> Iterator[str]:
    """The rooms that a file imports, at any level."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE.name and rest.partition(".")[0] in rooms():
                yield rest.partition(".")[0]


def arrows() -> dict[str, set[str]]:
    """{room: the rooms that it imports}."""
    return {
        room: {other for path in (PACKAGE / room).rglob("*.py") for other in imported(path)} - {room}
        for room in rooms()
    }


def below(room: str, found: dict[str, set[str]]) -> set[str]:
    """The rooms that ``room`` imports, directly or not."""
    reached: set[str] = set()
    waiting = [room]
    while waiting:
        new = found[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def needed(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows without those that a longer way implies, so that the chart can be read."""
    return {
        room: {other for other in others if not any(other in below(third, found) for third in others - {other})}
        for room, others in found.items()
    }


def levels(drawn: dict[str, set[str]]) -> dict[str, int]:
    """How high each room stands: 0 for one that imports none, else one above the highest that it imports."""
    heights: dict[str, int] = {}
    while len(heights) < len(drawn):
        for room, others in drawn.items():
            if others <= heights.keys():
                heights[room] = max((heights[other] + 1 for other in others), default=0)
    return heights


def routes(drawn: dict[str, set[str]]) -> list[list[Place]]:
    """The places that each arrow passes: its rooms, and on the levels between them a place of its own."""
    heights = levels(drawn)
    found = []
    for room, others in sorted(drawn.items()):
        for other in sorted(others):
            between = range(heights[room] - 1, heights[other], -1)
            stops = [(f"{room} {other}", height) for height in between]
            found.append([(room, heights[room]), *stops, (other, heights[other])])
    return found


def positions(ways: list[list[Place]]) -> dict[Place, float]:
    """Where each place is on its level, 0 to 1: near those that its arrows come from and lead to."""
    floors: dict[int, list[Place]] = {}
    for place in sorted({place for way in ways for place in way}):
        floors.setdefault(place[1], []).append(place)
    beside: dict[Place, set[Place]] = {}
    for way in ways:
        for one, other in zip(way, way[1:]):
            beside.setdefault(one, set()).add(other)
            beside.setdefault(other, set()).add(one)
    found = spread(floors)
    for _ in range(ROUNDS):
        for height in sorted(floors):
            floors[height].sort(key=lambda place: sum(found[near] for near in beside[place]) / len(beside[place]))
            found |= spread({height: floors[height]})
    return found


def spread(floors: dict[int, list[Place]]) -> dict[Place, float]:
    """The places of each level, at equal distances."""
    return {place: (i + 0.5) / len(floor) for floor in floors.values() for i, place in enumerate(floor)}


def picture() -> str:
    """The chart as SVG, from what stands on the others down to what imports nothing."""
    ways = routes(needed(arrows()))
    across = positions(ways)
    top = max(height for _, height in across)
    points = {place: (WIDTH * x, (top - place[1] + 0.5) * FLOOR) for place, x in across.items()}
    parts = []
    for way in ways:
        (x, y), *between, (end, low) = (points[place] for place in way)
        line = [(x, y + HALF), *between, (end, low - HALF - 6)]
        parts.append(f'<polyline points="{" ".join(f"{x:.0f},{y:.0f}" for x, y in line)}" marker-end="url(#end)"/>')
    for name, (x, y) in sorted((place[0], point) for place, point in points.items()):
        if " " not in name:
            parts.append(f'<rect x="{x - 60:.0f}" y="{y - HALF:.0f}" width="120" height="{2 * HALF}" rx="5"/>')
            parts.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{name}</text>')
    return HEAD.format(height=(top + 1) * FLOOR) + "\n".join(parts) + "\n</svg>\n"


def table() -> str:
    """A row for each room: the first sentence of its docstring."""
    rows = ["| `pycil_wsc/` | content |", "|---|---|"]
    for room in rooms():
        docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))) or ""
        sentence = re.split(r"(?<=\.)\s", docstring, maxsplit=1)[0]
        rows.append(f"| `{room}` | {sentence.replace('``', '`')} |")
    return "\n".join([*rows, ""])


def page() -> str:
    """The page with the table made again."""
    text = PAGE.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    assert start and end, f"{PAGE} has no marks for the chart"
    return f"{before}{start}{table()}{end}{after}"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    IMAGE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
