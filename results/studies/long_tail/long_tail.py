"""The table of classes of unequal size on docs/classifier_details.md: results/studies/long_tail.

python docs/scripts/generate.py
"""

from over_seeds import beside, grouped

MEASURES = {"average": "average accuracy", "weakest_tenth": "on the worst tenth", "forgetting": "forgetting"}
KINDS = ("none", "sampler", "weights")


def rows() -> list[tuple[str, ...]]:
    """The header; accuracies with ``class_balance`` "none", and differences from them; empty without records."""
    runs = grouped("long_tail", lambda run: run["class_balance"])
    if not runs:
        return []
    (size,) = runs["none"]
    lines: list[tuple[str, ...]] = [("`class_balance`", *MEASURES.values())]
    for kind in KINDS:
        cells = [beside(runs[kind], runs["none"], size, measure) for measure in MEASURES]
        lines.append((f'`"{kind}"`', *cells))
    return lines
