"""Names of classes that are probably the same name."""

from __future__ import annotations

from collections.abc import Sequence


def similar_names(names: Sequence[str], known: Sequence[str]) -> list[tuple[str, str]]:
    """Classes of which another one differs by case or spaces only: (class, the other).

    Args:
        names: of new images or classes; one of each pair is among them.
        known: of the learned classes.
    """
    pairs = []
    earlier: dict[str, str] = {}
    given = set(names)
    for name in dict.fromkeys([*known, *names]):
        plain = "".join(letter for letter in name.casefold() if not letter.isspace() and letter not in "_-")
        other = earlier.setdefault(plain, name)
        if other != name and (name in given or other in given):
            pairs.append((name, other))
    return pairs


def told_similar(names: Sequence[str], known: Sequence[str]) -> str:
    """A line about the first such pair of a new class; "" if there is none."""
    new = set(names).difference(known)
    pairs = similar_names([name for name in names if name in new], known) if new else []
    if not pairs:
        return ""
    name, other = pairs[0]
    more = f" (and {len(pairs) - 1} more such pairs)" if len(pairs) > 1 else ""
    return (
        f"'{name}' and '{other}' are two classes{more}; if they are one, merge(['{name}', '{other}'], into='{other}')"
    )
